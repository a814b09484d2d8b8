"""Do the defaults of recipes/gemma_lora.py learn more from the same tokens than the former ones?

    KERAS_BACKEND=torch python benchmarks/lora_defaults.py [--tokens 196608] [--write]

The recipe trains its demonstration with the former defaults (adapters of rank 4 on queries and
values, all tokens in the loss, one example in each row of 128 tokens, learning rate 2e-3) and with
those that took their place: adapters of rank 16 and alpha 32 on all linear layers, the loss on
responses alone, packed rows of the 99th percentile of the records' lengths, and a learning rate by
the width of the model, 5e-5 * 10 * (2000 / width) ** 0.781. That is the rule for Llama in
tinker-cookbook's `hyperparam_utils.get_lr` (Thinking Machines, 2025), which was fitted to models of
widths from 2048. Warm-up and schedule are the same in both. Each run takes `--tokens` positions,
padding included, from the same base model.

Losses are per token of the held-out records, without padding or cuts: of their responses, and of
all their tokens. `gain` is the mean over the seeds of former minus proposed, on the responses.
"""

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record

RECIPE = Path(__file__).parents[1] / "recipes" / "gemma_lora.py"
ROWS = 8
FORMER = [
    *("--rank", "4", "--alpha", "4", "--targets", "query,value", "--loss-on", "all", "--no-pack"),
    *("--sequence-length", "128", "--learning-rate", "2e-3"),
]
LENGTHS_OF = 16  # Rows are a multiple of this long.


def rate_by_width(width: int) -> float:
    return 5e-5 * 10 * (2000 / width) ** 0.781


def records(seed: int) -> tuple[list, list]:
    """The records that the recipe trains on, and those that it holds out."""
    from kmodels.text import demo

    recipe = runpy.run_path(str(RECIPE))
    return recipe["split"](demo.instructions().rows[550:], recipe["Settings"]().held_out, seed)


def lengths(model: Any, rows: list) -> Any:
    text = model.preprocessor
    text.sequence_length, text.loss_on = 4096, "all"
    return text(rows)[0]["padding_mask"].sum(axis=-1)


def proposed(base: Path, seed: int) -> list[str]:
    """The flags of the proposed settings."""
    import numpy as np

    from kmodels.models import GemmaCausalLM

    model = GemmaCausalLM.from_preset(base)
    longest = int(np.percentile(lengths(model, records(seed)[0]), 99))
    length = -(-longest // LENGTHS_OF) * LENGTHS_OF
    rate = rate_by_width(model.backbone.config.hidden_dim)
    return [
        *("--rank", "16", "--alpha", "32", "--targets", "all-linear", "--loss-on", "responses"),
        *("--pack", "--sequence-length", str(length), "--learning-rate", f"{rate:.3g}"),
        *("--weights", str(base)),
    ]


def train(out: Path, seed: int, tokens: int, flags: list[str]) -> None:
    """Runs the recipe for so many positions."""
    length = int(flags[flags.index("--sequence-length") + 1])
    steps = max(tokens // (ROWS * length), 1)
    common = [*("--out", out, "--seed", seed, "--steps", steps, "--batch-size", ROWS)]
    command = [sys.executable, RECIPE, *common, "--samples", 0, *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(flags)} failed:\n{done.stderr[-3000:]}")


def held_out_losses(directory: Path, seed: int) -> dict[str, float]:
    """The losses of the merged model on the held-out records."""
    import keras

    from kmodels.models import GemmaCausalLM
    from kmodels.text import TextLoader

    model = GemmaCausalLM.from_preset(directory)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = records(seed)[1]
    longest = int(lengths(model, rows).max())
    losses = {}
    for part in ("responses", "all"):
        model.preprocessor.sequence_length, model.preprocessor.loss_on = longest, part
        loader = TextLoader(model.preprocessor(rows), ROWS)
        losses[part] = round(model.evaluate(loader, return_dict=True, verbose=0)["loss"], 5)
    return losses


def compare(seed: int, tokens: int, folder: Path) -> list[dict]:
    """Trains with both settings, and returns a row for each."""
    train(folder / "former", seed, tokens, FORMER)
    base = folder / "former" / "base"
    flags = {"former": FORMER, "proposed": proposed(base, seed)}
    train(folder / "proposed", seed, tokens, flags["proposed"])
    rows = []
    for name, given in flags.items():
        result = json.loads((folder / name / "result.json").read_text())
        shown = [word for word in given if word not in ("--weights", str(base))]
        row = {"settings": name, "seed": seed, "flags": shown, "steps": result["steps"]}
        row |= {"filled": result["filled"], "base": held_out_losses(base, seed)}
        rows.append(row | {"held_out": held_out_losses(folder / name / "model", seed)})
    return rows


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tokens", type=int, default=196_608, help="positions of each run")
    parser.add_argument("--hardware", default="cpu", help="a word for the name of the file")
    options = parser.parse_args()
    rows: list[dict] = []
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(seed, options.tokens, Path(folder))
        for row in rows[-2:]:
            print(json.dumps(row), flush=True)
    loss = {
        name: [row["held_out"]["responses"] for row in rows if row["settings"] == name]
        for name in ("former", "proposed")
    }
    gains = [a - b for a, b in zip(loss["former"], loss["proposed"], strict=True)]
    content = {
        "gain": round(statistics.mean(gains), 5),
        "gains": [round(gain, 5) for gain in gains],
    }
    print(json.dumps(content))
    if options.write:
        backend = os.environ["KERAS_BACKEND"]
        content |= {"backend": backend, "tokens": options.tokens, "rows": rows}
        name = f"lora_defaults_{options.hardware}"
        record.write(name, __doc__, ("keras", "numpy", backend), **content)


if __name__ == "__main__":
    main()
