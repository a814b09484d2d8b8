"""Do the defaults of recipes/vit.py for pretrained weights classify better than those for new ones?

    KERAS_BACKEND=torch python benchmarks/vit_fine_tuning.py WEIGHTS DATA [--seeds 0,1] [--write]
    KERAS_BACKEND=torch python benchmarks/vit_fine_tuning.py WEIGHTS DATA --heads [...]

Fine-tunes the weights (a path that --weights of the recipe takes) on DATA (such as folder:FILE.zip)
with the recipe's defaults, and with a learning rate of 3e-3 for all blocks, which it used to take
for pretrained weights as well. Everything else is the same: 98 pixels, batches of 32, six epochs,
mixed_bfloat16. `gain` is the mean over the seeds of the difference in test accuracy.

`--heads` compares the defaults with themselves, but for the new head: its standard deviation is
0.02, or 2e-5 (`--head-std`) as in MAE's recipe and as timm's `head_init_scale=0.001` makes it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record

RECIPE = Path(__file__).parents[1] / "recipes" / "vit.py"
SHARED = (
    *("--image-size", "98", "--batch-size", "32", "--epochs", "6"),
    *("--precision", "mixed_bfloat16"),
)
SETTINGS = {"former": ("--learning-rate", "3e-3", "--layer-decay", "1"), "defaults": ()}
HEADS = {"defaults": (), "head 2e-5": ("--head-std", "2e-5")}


def run(weights: str, data: str, seed: int, flags: tuple[str, ...]) -> dict:
    """Returns settings and metrics of a run."""
    with tempfile.TemporaryDirectory() as folder:
        common = [*SHARED, "--weights", weights, "--data", data, "--seed", str(seed)]
        command = [sys.executable, RECIPE, *common, *flags, "--out", f"{folder}/run"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(flags)} failed:\n{done.stderr[-3000:]}")
        result = json.loads((Path(folder) / "run/result.json").read_text())
        config = json.loads((Path(folder) / "run/config.json").read_text())
    names = ("learning_rate", "layer_decay", "weight_decay", "label_smoothing")
    row = {"seed": seed, "steps": result["steps"], **{name: config[name] for name in names}}
    return row | {name: round(value, 4) for name, value in result["metrics"].items()}


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("weights")
    parser.add_argument("data")
    parser.add_argument("--name", default="vit", help="a word for weights and data in the result")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--heads", action="store_true", help="compare heads, not learning rates")
    parser.add_argument("--hardware", default="cpu", help="a word for the name of the file")
    options = parser.parse_args()
    settings = HEADS if options.heads else SETTINGS
    rows: list[dict] = []
    for seed in map(int, options.seeds.split(",")):
        for name, flags in settings.items():
            rows.append({"settings": name, **run(options.weights, options.data, seed, flags)})
            print(json.dumps(rows[-1]), flush=True)
    accuracy = {
        name: [row["test_accuracy"] for row in rows if row["settings"] == name] for name in settings
    }
    gains = [b - a for a, b in zip(*accuracy.values(), strict=True)]
    content: dict[str, Any] = {
        "test_accuracy": {
            name: round(statistics.mean(found), 4) for name, found in accuracy.items()
        },
        "gain": round(statistics.mean(gains), 4),
        "gains": [round(gain, 4) for gain in gains],
    }
    print(json.dumps(content))
    if options.write:
        question, name, backend = __doc__, options.name, os.environ["KERAS_BACKEND"]
        if options.heads:
            question = "Does a head that begins close to zero classify better after fine-tuning?"
            name += "_heads"
        content |= {"backend": backend, "of": options.name, "rows": rows}
        file = f"vit_fine_tuning_{name}_{options.hardware}"
        record.write(file, question, ("keras", "numpy", backend), **content)


if __name__ == "__main__":
    main()
