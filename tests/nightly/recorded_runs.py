"""Compares runs of the recipes by two versions of the package, bit by bit.

    KERAS_BACKEND=jax python tests/nightly/recorded_runs.py record after.json
    KERAS_BACKEND=jax python BEFORE/tests/nightly/recorded_runs.py record before.json
    python tests/nightly/recorded_runs.py compare before.json after.json

A record holds the losses of all steps, the metrics and a digest of the weights of each run: every
recipe that trains, with and without mixed_bfloat16, accumulation, moving averages, LoRA, a mesh of
two devices, and a stop within an epoch. Torch's meshes need processes of their own; they are
compared with single ones in tests/loop/distribution.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VIT = (
    *("vit", "--preset", "vit_debug", "--data", "synthetic:48", "--batch-size", "8"),
    *("--dropout", "0.1", "--epochs", "2", "--mixup", "0.2"),
)
GEMMA = (
    *("gemma_lora", "--batch-size", "4", "--sequence-length", "96", "--loss-on", "responses"),
    *("--epochs", "2", "--lora-dropout", "0.1", "--rank", "2", "--samples", "0"),
)
MAE = (
    *("mae", "--preset", "vit_debug", "--patch-size", "4", "--data", "synthetic:96"),
    *("--batch-size", "16", "--steps", "9", "--epochs", "2", "--decoder-dim", "8", "--crop", "0.5"),
    *("--decoder-layers", "1", "--decoder-heads", "2", "--neighbours", "3", "--probe-images", "40"),
)
DINO = (
    *("dino", "--preset", "vit_debug", "--data", "synthetic:48", "--batch-size", "8", "--flip"),
    *("--steps", "8", "--epochs", "2", "--local-views", "1", "--units", "16", "--hidden-dim", "8"),
    *("--neighbours", "3", "--probe-images", "20"),
)
HALF = ("--precision", "mixed_bfloat16")
# Stops after five steps, and goes on from a checkpoint within an epoch.
STOP = ("--checkpoint-every", "2")
RUNS: dict[str, tuple[str, ...]] = {
    "vit": VIT,
    "vit, mixed_bfloat16": (*VIT, *HALF),
    "vit, average of the weights": (*VIT, "--ema", "0.5"),
    "vit, accumulation": (*VIT, "--accumulate", "2"),
    "vit, all of these": (*VIT, "--accumulate", "2", "--ema", "0.5", "--layer-decay", "0.7", *HALF),
    "vit, stopped": (*VIT, "--ema", "0.5", *STOP),
    "vit, data=2": (*VIT, "--mesh", "data=2"),
    "vit, fsdp=2": (*VIT, "--mesh", "fsdp=2", "--ema", "0.5"),
    "gemma": GEMMA,
    "gemma, mixed_bfloat16": (*GEMMA, *HALF),
    "gemma, accumulation": (*GEMMA, "--accumulate", "2"),
    "gemma, quantized": (*GEMMA, "--quantize", "int8"),
    "gemma, stopped": (*GEMMA, *STOP),
    "mae": MAE,
    "mae, mixed_bfloat16": (*MAE, *HALF),
    "dino": DINO,
    "dino, stopped": (*DINO, *STOP),
    "distill": (
        *("distill", "--preset", "vit_debug", "--teacher-preset", "vit_debug", "--layers", "1"),
        *("--data", "synthetic:48", "--batch-size", "8", "--teacher-epochs", "1", "--epochs", "2"),
    ),
    "dpo": (
        *("prefer", "--batch-size", "2", "--sequence-length", "48", "--rank", "2", "--steps", "6"),
        *("--lora-dropout", "0.1", "--first-steps", "2", "--learning-rate", "1e-2"),
    ),
    "segment": (
        *("segment", "--data", "scenes:40", "--image-size", "16", "--batch-size", "8"),
        *("--epochs", "2", "--crop", "0.5", "--head-dropout", "0.1"),
    ),
    "caption": (
        *("caption", "--images", "1", "--batch-size", "16", "--answers", "8"),
        *("--held-out", "0.05", "--steps", "6"),
    ),
}
COMPARED = ("step_losses", "weights_digest", "metrics")


def record(path: Path, only: str) -> None:
    """Runs the recipes of the running backend and writes what they leave."""
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (recipe, *flags) in RUNS.items():
            if only not in name or not supported(backend, flags):
                continue
            keras.utils.clear_session()
            out = Path(folder) / name.replace(", ", "-").replace(" ", "_")
            found[name] = run(
                recipe, [*flags, *data(recipe, Path(folder))], out, "--checkpoint-every" in flags
            )
            print(name, len(found[name]["step_losses"]), "steps", file=sys.stderr, flush=True)
            path.write_text(json.dumps(found, indent=1))


def supported(backend: str, flags: list[str]) -> bool:
    """Returns True if one process of the backend can run with these flags."""
    if "--mesh" not in flags:
        return True
    return backend == "jax" or (backend == "tensorflow" and "data=2" in flags)


def run(recipe: str, flags: list[str], out: Path, stops: bool) -> dict[str, Any]:
    """Runs a recipe, with a stop within it if asked for, and returns what is compared."""
    from recipe_modules import load, result, run_killed

    module = load(recipe)
    if stops:
        run_killed(module, [*flags, "--out", str(out)], 5)
        flags = ["--resume"]
    if code := module.main([*flags, "--out", str(out)]):
        raise SystemExit(f"{recipe} {' '.join(flags)} ended with {code}")
    from kmodels.distribution import distribute

    distribute(None)
    return {name: result(out)[name] for name in COMPARED}


def data(recipe: str, folder: Path) -> list[str]:
    """Makes the small files that a recipe for text reads, and returns the flags that name them."""
    if recipe not in ("gemma_lora", "prefer"):
        return []
    from kmodels.text import demo
    from saved_models import language

    weights, path = folder / "base", folder / f"{recipe}.jsonl"
    if not weights.exists():
        language(weights)
    if recipe == "gemma_lora":
        rows = demo.instructions().rows[:20]
    else:
        words = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
        rows = [
            {"prompt": f"A colour like {a}? ", "chosen": f"{b} it is", "rejected": f"not {b}"}
            for a, b in zip(words, words[1:] + words[:1], strict=True)
        ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--weights", str(weights), "--data", str(path)]


def compare(one: Path, other: Path) -> int:
    """Prints each run and whether both records of it are equal, and returns how many are not."""
    before, after = json.loads(one.read_text()), json.loads(other.read_text())
    wrong = 0
    for name in {**before, **after}:
        differ = [
            key for key in COMPARED if before.get(name, {}).get(key) != after.get(name, {}).get(key)
        ]
        wrong += bool(differ)
        print(f"{name}: {'equal' if not differ else 'other ' + ', '.join(differ)}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    asked = parser.parse_args()
    if asked.what == "compare":
        return int(compare(*asked.files) > 0)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    record(asked.files[0], asked.only)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
