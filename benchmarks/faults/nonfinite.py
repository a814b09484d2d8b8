"""Numbers that are not finite, at ten steps: whether any checkpoint holds one.

    python benchmarks/faults/nonfinite.py [--quick] [--write]

Prints counts, for the backend of KERAS_BACKEND.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tally

from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import manager
from kmodels.core.errors import InputError
from kmodels.training import AdamW, Runner
from kmodels.weights import read_safetensors

BATCH, STEPS, EPOCHS = 4, 6, 2
KINDS = ("NaN pixel", "learning rate 1e6", "overflow")
WAYS = ("fit", "fit, loss not looked at", "fit that skips", "run", "run that skips")


class Spike(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that is 1e6 from some step on."""

    total_steps = STEPS * EPOCHS

    def __init__(self, step: int):
        self.step = step

    def __call__(self, step: Any) -> Any:
        """The rate at a step."""
        return keras.ops.where(keras.ops.cast(step, "int32") >= self.step, 1e6, 1e-2)


class Batches(keras.utils.PyDataset):
    """The data of a run: batches by number, told the epoch."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self.x, self.y = x, y

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """The order is the same in each."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(BATCH * index, BATCH * (index + 1))
        return self.x[rows], self.y[rows]


def run(kind: str, way: str, step: int, folder: Path) -> str:
    """Trains, with a checkpoint after each step; says how it ended."""
    keras.utils.set_random_seed(7)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 4, 4, 1)).astype("float32")
    y = x.sum(axis=(1, 2))
    if kind != KINDS[1]:
        x[BATCH * (step % STEPS) + 1, 2, 3] = np.nan if kind == KINDS[0] else 3e38
    schedule = Spike(step if kind == KINDS[1] else STEPS * EPOCHS)
    inputs = keras.Input((4, 4, 1))
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Flatten()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    if way.endswith("skips"):
        optimizer: Any = AdamW(schedule, skip_non_finite=True)
    elif way == "run":
        optimizer = AdamW(schedule)
    else:
        # SGD reaches infinity with such a rate; the steps of AdamW are bounded.
        optimizer = keras.optimizers.SGD(schedule)
    model.compile(optimizer, "mse", metrics=["mae"])
    try:
        if way.startswith("run"):
            options: dict[str, Any] = {"batch_size": BATCH, "log_every": 3, "checkpoint_every": 1}
            Runner(model, folder, Batches(x, y), None, schedule, keep=99, **options).run()
        else:
            saved = Checkpoint(
                folder / "checkpoints", every=1, keep=99, stop_on_non_finite=way == "fit"
            )
            model.fit(
                x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, callbacks=[saved], verbose=0
            )
    except InputError as error:
        return "told in a line" if "\n" not in str(error) else "told badly"
    return "went on"


def not_finite(path: Path) -> bool:
    """Returns whether a checkpoint holds such a value."""
    files = map(read_safetensors, path.glob("*.safetensors"))
    arrays = [tensor.read() for file in files for tensor in file.values()]
    logs = json.loads((path / "state.json").read_text())["logs"].values()
    return not all(math.isfinite(value) for value in logs if value is not None) or not all(
        np.isfinite(values).all() for values in arrays if values.dtype.kind == "f"
    )


def trials(kind: str, way: str, steps: range) -> dict[str, int]:
    """One kind of trouble in one way of training, from each of the steps on."""
    names = ["runs", "told in a line", "told badly", "went on", "checkpoints", "not finite"]
    counts: dict[str, int] = dict.fromkeys(names, 0)
    for step in steps:
        with tempfile.TemporaryDirectory() as name:
            counts[run(kind, way, step, Path(name))] += 1
            counts["runs"] += 1
            kept = manager.list_checkpoints(Path(name) / "checkpoints")
            counts["checkpoints"] += len(kept)
            counts["not finite"] += sum(map(not_finite, kept))
    return counts


def main() -> None:
    """Runs all and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    steps = range(1, 2) if options.quick else range(10)
    found = {kind: {way: trials(kind, way, steps) for way in WAYS} for kind in KINDS}
    tally.report("nonfinite", found, options)


if __name__ == "__main__":
    main()
