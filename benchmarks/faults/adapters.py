"""Single bits turned and files cut, over every file of an adapter's directory.

    python benchmarks/faults/adapters.py [--quick] [--write]

Prints counts.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tally

from kmodels.checkpoint.state import weights_digest
from kmodels.core.errors import InputError
from kmodels.lora import describe
from kmodels.lora.enable import adapters
from kmodels.models import ViTBackbone, ViTImageClassifier


def make(seed: int) -> ViTImageClassifier:
    """A model with adapters, a trained head, and values of its own in all of them."""
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
    model = ViTImageClassifier(ViTBackbone(image_shape=(8, 8, 1), patch_size=4, **sizes), 3)
    model.enable_lora(2, alpha=6.0, dropout=0.25, targets=("query", "up"), dora=True)
    fill(model, seed)
    return model


def fill(model: ViTImageClassifier, seed: int) -> None:
    """New values for all that is trained."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape).astype("float32"))


def what(model: ViTImageClassifier) -> tuple[Any, str]:
    """Returns all that an adapter's directory and the base decide, but the names of the targets."""
    settings = {path: {**held, "targets": ()} for path, held in describe(model).items()}
    return settings, weights_digest(model)


def damage(flips: int, cuts: int) -> dict[str, int]:
    """Loads what was damaged into a model with an adapter of its own."""
    counts = {
        "bit flips": flips,
        "cuts": cuts,
        "wrong loads": 0,
        "refused": 0,
        "harmless": 0,
        "models changed by a refusal": 0,
        "other errors": 0,
    }
    draw = random.Random(10)
    model = make(1)
    with tempfile.TemporaryDirectory() as name:
        folder = model.save_adapter(Path(name) / "adapter")
        good, fresh = what(model), True
        files = sorted(folder.iterdir())
        for _ in tally.damaged(files, flips, cuts, draw):
            if fresh:
                fill(model, 2)
            before = what(model)
            fresh = False
            try:
                model.load_adapter(folder)
                fresh = True
                # A flip in a setting that only PEFT looks at is such a case.
                counts["harmless" if what(model) == good else "wrong loads"] += 1
            except InputError as error:
                counts["refused"] += "\n" not in str(error)
                counts["models changed by a refusal"] += what(model) != before
            except Exception:
                counts["other errors"] += 1
        # Undamaged it loads, or the counts above would mean nothing.
        model.load_adapter(folder)
        counts["whole after all"] = int(what(model) == good and len(adapters(model)) == 2)
    return counts


def main() -> None:
    """Runs it and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    found = damage(*((60, 12) if options.quick else (1000, 200)))
    tally.report("adapters", {"damage": found}, options)


if __name__ == "__main__":
    main()
