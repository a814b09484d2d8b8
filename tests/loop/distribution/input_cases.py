"""What several processes are fed with, and one alone: the same script for both."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import small_models

from kmodels.core import processes
from kmodels.data import ArraySource, Augment, ImageLoader
from kmodels.distribution import current, distribute
from refusals import messages

BATCH, ROWS, HELD_OUT, CLASSES = 16, 56, 27, 10
# Without the last batch, which over a mesh is not trained on.
FULL = ROWS // BATCH * BATCH


def numbers(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.random((rows, 8, 8, 3), "float32")
    return x, np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, rows)]


class Batches(keras.utils.PyDataset):
    """A user's data set, the last batch of which is short."""

    def __init__(self, x, y, size=BATCH):
        super().__init__()
        self.x, self.y, self.size = x, y, size

    @property
    def num_batches(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


class Samples:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def arrays(x, y):
    """Shuffled by kmodels; what is left out hangs on the order, so there is nothing to leave."""
    return x[:FULL], y[:FULL]


def pictures(x, y):
    """Shuffled, and mixed in pairs."""
    x, y = arrays(x, y)
    source = ArraySource((x * 255).astype("uint8"), y.argmax(-1))
    mixed = Augment(mixup=0.2, num_classes=CLASSES)
    return ImageLoader(source, BATCH, shuffle=len(x) == FULL, seed=3, augment=mixed), None


def numbered(x, y):
    return Batches(x, y), None


def generated(x, y, size=BATCH):

    def batches():
        for start in range(0, len(x), size):
            yield {"image": x[start : start + size], "label": y[start : start + size]}

    return batches, None


def own(x, y):
    """Each process brings its own rows of each batch."""
    (x, y), plan = arrays(x, y), current()
    if plan is None:
        return generated(x, y)
    share = BATCH // plan.engine.shards
    part = slice(plan.engine.shard * share, (plan.engine.shard + 1) * share)

    def batches():
        for start in range(0, len(x), BATCH):
            rows = slice(start, start + BATCH)
            yield x[rows][part], y[rows][part]

    return plan.shard(batches, own=True, training=len(x) > HELD_OUT), None


def dataloader(x, y):
    """A PyTorch DataLoader, shuffled from the seed of the run."""
    import torch

    keras.utils.set_random_seed(5)
    torch.manual_seed(5)
    samples: Any = Samples(*arrays(x, y))
    return torch.utils.data.DataLoader(samples, BATCH, shuffle=len(samples) == FULL), None


def tf_data(x, y):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), None


def grain(x, y):
    import grain

    return grain.MapDataset.source(Samples(*arrays(x, y))).seed(1).shuffle().batch(BATCH), None


def datasets(x, y):
    from datasets import Dataset

    x, y = arrays(x, y)
    return Dataset.from_dict({"x": x, "y": y}).with_format("numpy"), None


def vit(spec, **compiled):
    plan = distribute(spec)
    keras.utils.set_random_seed(3)
    model = small_models.vit(8, CLASSES)
    model = model if plan is None else plan.prepare(model)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2), loss, **compiled or {"weighted_metrics": ["accuracy"]})
    return model


def fed(spec, kinds, model=None):
    """Two epochs of each kind of data from the same weights, and evaluation and prediction."""
    model, found = model or vit(spec), {}
    # Of weights in parts no process has all.
    first = model.get_weights() if len(kinds) > 1 else None
    whole, held_out = numbers(), numbers(HELD_OUT, seed=1)
    for kind in kinds:
        if first is not None:
            model.set_weights(first)
        # What one process leaves out by itself is left out here for it.
        x, y = kind(*(part[:FULL] if spec is None else part for part in whole))
        history = model.fit(x, y, epochs=2, batch_size=BATCH, verbose=0).history
        x, y = kind(*held_out)
        logs = model.evaluate(x, y, batch_size=BATCH, return_dict=True, verbose=0)
        predicted = model.predict(kind(*held_out)[0], batch_size=BATCH, verbose=0)
        found[kind.__name__] = {
            **history,
            **{f"val_{name}": [value] for name, value in logs.items()},
            "predicted": predicted.tolist(),
        }
    return found


def spread(spec):
    return fed(spec, [arrays])["arrays"]


class Stop(keras.callbacks.Callback):
    """What only one of the processes wants."""

    def on_epoch_end(self, epoch, logs=None):
        if processes.index() == 1 and epoch == 2:
            self.model.stop_training = True
        # On JAX a variable is assigned in all processes or in none.
        if epoch == 1 and (processes.index() == 0 or keras.backend.backend() == "jax"):
            self.model.optimizer.learning_rate = 0.01


def followed(model, folder):
    name = f"{folder}/{processes.index()}"
    callbacks = [
        keras.callbacks.CSVLogger(f"{name}.csv"),
        keras.callbacks.ModelCheckpoint(f"{name}.weights.h5", save_weights_only=True),
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        Stop(),
    ]
    history = model.fit(*numbers(), batch_size=BATCH, epochs=9, callbacks=callbacks).history
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    return {"epochs": len(history["loss"]), "rate": rate}


def refused(spec):
    model, me = vit(spec, metrics=["accuracy"]), processes.index()
    plan, (x, y) = current(), numbers()
    assert plan is not None

    def own():
        for start in range(0, 32 - 8 * me, 8):
            yield x[start : start + 8], y[start : start + 8]

    attempts = {
        "counts": lambda: model.fit(Batches(x[16 * me :], y[16 * me :]), verbose=0),
        "content": lambda: model.fit(*numbers(seed=me), batch_size=BATCH, verbose=0),
        "stream": lambda: model.fit(generated(*numbers(seed=me))[0], verbose=0),
        "own": lambda: model.fit(plan.shard(own, own=True), verbose=0),
        "batch": lambda: model.fit(x, y, batch_size=15, verbose=0),
        "few": lambda: model.fit(x[:9], y[:9], batch_size=BATCH, verbose=0),
        "metrics": lambda: model.evaluate(x, y, batch_size=BATCH, verbose=0),
        "backup": lambda: model.fit(
            x, y, callbacks=[keras.callbacks.BackupAndRestore(str(me))], verbose=0
        ),
        "prepare": lambda: small_models.vit(8, CLASSES).fit(x, y, verbose=0),
    }
    return messages(attempts)


def unequal(spec):
    """The first process has a batch less, which cannot be known before it is over."""
    os.environ[processes.ENVIRONMENT] = "3"
    there = slice(0, 48 if processes.index() else 32)
    x, y = generated(*(part[there] for part in numbers()))
    vit(spec).fit(x, y, verbose=0)


if __name__ == "__main__":
    specs, folder, *names = sys.argv[1:]
    main, *others = specs.split(";")
    model = vit(main)
    found: dict[str, Any] = {"fed": fed(main, [globals()[name] for name in names], model)}
    if folder:
        found["followed"] = followed(model, folder)
        found["files"] = sorted(path.name for path in Path(folder).iterdir())
    found |= {other: spread(other) for other in others}
    if folder:
        found["refused"] = refused(main)
    print(json.dumps(found), flush=True)
    if folder:
        unequal(main)
