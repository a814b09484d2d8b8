"""Runs that are cut at several steps and gone on with, against a run that nothing cut.

    python benchmarks/faults/resume.py [--quick] [--write]

Each part of a run has a model, an optimizer and a data set made anew. Prints counts, for the
backend of KERAS_BACKEND: how far weights, optimizer and losses are apart at the end, and whether
the other callbacks decided alike.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tally

from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import state
from kmodels.data import ArraySource, Augment, ImageLoader
from kmodels.models import GemmaCausalLM, ViTImageClassifier
from kmodels.training import AdamW, WarmupSchedule

BATCH, STEPS, EPOCHS, EVERY = 4, 6, 3, 4
# The cuts lie before the first checkpoint, right after one, at the end of an epoch, in the next,
# and near the end.
CUTS = (2, EVERY, STEPS, STEPS + 3, STEPS * EPOCHS - 1)
rng = np.random.default_rng(0)
# The last batch of an epoch is shorter.
X = rng.normal(size=(BATCH * STEPS - 2, 5)).astype("float32")
Y = rng.integers(0, 3, len(X))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
Made = tuple[keras.Model, dict[str, Any]]


class Cut(Exception):
    """Stands for kill -9: no callback hears of it."""


class CutAt(keras.callbacks.Callback):
    """Ends `fit` after so many steps."""

    saves_itself = True

    def __init__(self, step: int):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts."""
        self.left -= 1
        if not self.left:
            raise Cut


def dense(optimizer: Any = None, dropout: float = 0.0, **fit: Any) -> Made:
    """A small network with batch normalisation, on rows in their order."""
    inputs = keras.Input((5,))
    x = keras.layers.Dense(8, activation="tanh", name="first")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(dropout, name="drop")(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="second")(x))
    model.compile(optimizer or AdamW(0.05), LOSS, metrics=["accuracy"])
    return model, {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False, "epochs": EPOCHS, **fit}


def pictures(optimizer: Any = None, lora: bool = False, **settings: Any) -> Made:
    """A ViT on pictures that are flipped, cropped and mixed."""
    drawn = np.random.default_rng(2)
    images = drawn.integers(0, 256, (BATCH * STEPS, 16, 16, 3), "uint8")
    train = ArraySource(images, drawn.integers(0, 10, len(images)))
    augment = Augment(flip=True, crop_padding=2, mixup=0.2, num_classes=10)
    shuffle = settings.pop("shuffle", False)
    loader = ImageLoader(train, BATCH, shuffle=shuffle, seed=3, augment=augment)
    model = ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=10, **settings)
    if lora:
        model.enable_lora(2, dropout=0.1)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or AdamW(0.01), loss, metrics=["accuracy"])
    return model, {"x": loader, "shuffle": False, "epochs": EPOCHS}


def adapters() -> Made:
    """A Gemma whose adapters alone are trained, with dropout in front of them."""
    model = GemmaCausalLM.from_preset("gemma3_debug", num_layers=1)
    model.enable_lora(2, dropout=0.1)
    model.compile(AdamW(0.01), LOSS)
    tokens = np.random.default_rng(1).integers(1, 60, (len(X), 9)).astype("int32")
    inputs = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((len(X), 8), "int32")}
    data = {"x": inputs, "y": tokens[:, 1:], "batch_size": BATCH, "shuffle": False}
    return model, {**data, "epochs": EPOCHS}


def everything() -> Made:
    """Has all of them at once."""
    schedule = WarmupSchedule(0.01, STEPS * EPOCHS, 4)
    optimizer = AdamW(schedule, ema=0.9, accumulate=4, clip_norm=1.0)
    return pictures(optimizer, lora=True, shuffle=True, dropout_rate=0.1, attention_dropout=0.1)


def callbacks() -> Made:
    """Callbacks that remember: what they do hangs on the epochs before."""
    chosen = [
        keras.callbacks.EarlyStopping(
            "val_loss", min_delta=10.0, patience=3, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=10.0, patience=1, verbose=0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.9 if epoch else 1.0)),
    ]
    optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
    held_out = (X[:8], Y[:8])
    return dense(optimizer, 0.3, epochs=9, validation_data=held_out, callbacks=chosen)


CASES: dict[str, Callable[[], Made]] = {
    "shuffle": lambda: dense(shuffle=True),
    "dropout": lambda: dense(dropout=0.3),
    "augmentation": pictures,
    "schedule": lambda: dense(AdamW(WarmupSchedule(0.05, STEPS * EPOCHS, 4))),
    "LoRA": adapters,
    "EMA": lambda: dense(AdamW(0.05, ema=0.9)),
    "accumulation": lambda: dense(AdamW(0.05, accumulate=4)),
    "all of them": everything,
    "callbacks": callbacks,
}
# The decisions of ops, and on what they were made.
DECISIONS = ("best", "wait", "stopped_epoch", "best_epoch", "cooldown_counter")


def train(make: Callable[[], Made], folder: Path, cut: int | None = None) -> dict[str, Any] | None:
    """Goes on from the folder, to the end or to the cut.

    Returns:
        All that must be equal; None where it was cut.
    """
    keras.utils.set_random_seed(7)
    model, arguments = make()
    base = state.digest(state.frozen(model))
    chosen = arguments.pop("callbacks", [])
    best = keras.callbacks.ModelCheckpoint(
        str(folder.with_suffix(".weights.h5")), "loss", save_best_only=True, save_weights_only=True
    )
    checkpoint = Checkpoint(folder, every=EVERY)
    beside = [checkpoint, best, *chosen, *([] if cut is None else [CutAt(cut)])]
    try:
        history = model.fit(**arguments, callbacks=beside, verbose=0)
    except Cut:
        checkpoint.wait()
        return None
    held = state.parts(model, only_trainable=False)
    arrays = {f"{part}/{k}": v for part in held for k, v in state.copied(held[part]).items()}
    arrays |= {f"history/{name}": np.array(values) for name, values in history.history.items()}
    return {
        "arrays": arrays,
        "decisions": [[getattr(c, name, None) for name in DECISIONS] for c in [best, *chosen]],
        "base kept": state.has_adapters(model) is False
        or base == state.digest(state.frozen(model)),
    }


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest over all arrays; infinite where they have not the same names and shapes."""
    if {k: v.shape for k, v in one.items()} != {k: v.shape for k, v in other.items()}:
        return float("inf")
    apart = (np.abs(one[k].astype("float64") - other[k].astype("float64")) for k in one)
    return max(float(values.max(initial=0.0)) for values in apart)


def resumed(name: str, cuts: tuple[int, ...] = CUTS) -> dict[str, Any]:
    """One case, cut once at each of the steps."""
    counts: dict[str, Any] = {"cuts": len(cuts), "equal": 0, "largest difference": 0.0}
    counts["same decisions"] = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = train(CASES[name], Path(folder) / "whole")
        assert whole is not None and whole["base kept"]
        for cut in cuts:
            out = Path(folder) / f"cut{cut}"
            assert train(CASES[name], out, cut) is None
            found = train(CASES[name], out)
            assert found is not None
            apart = difference(whole["arrays"], found["arrays"])
            counts["largest difference"] = max(counts["largest difference"], apart)
            counts["equal"] += apart == 0.0 and found["base kept"]
            counts["same decisions"] += found["decisions"] == whole["decisions"]
    return counts


def main() -> None:
    """Runs all and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    cuts = CUTS[3:4] if options.quick else CUTS
    tally.report("resume", {name: resumed(name, cuts) for name in CASES}, options)


if __name__ == "__main__":
    main()
