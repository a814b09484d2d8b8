"""How many files of kmodels a reader of one `fit` comes through.

Counted are the files below `src/kmodels` of which a function, method, property, lambda or
comprehension is entered while `fit` runs: in the thread that calls it, and in the threads that it
starts. The model, a ViT classifier, is built and compiled, and has been
trained by one `fit` before, so that on JAX and TensorFlow the step is traced. The data is NumPy
arrays on one device, an epoch has two batches. Modules that are only imported, by now or in the
call, do not count.

- "plain" is `fit(x, y)`.
- "saved" is that with a new `Checkpoint` in an empty directory.
- "resumed" is that with a new `Checkpoint` that continues after the epoch in its directory.

On torch Python runs the network itself in each step, 23 files of layers, ops and overrides; so what
`fit` adds to the files that one call of the model enters has bounds of its own.
"""

import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

import kmodels
from kmodels.callbacks import Checkpoint
from kmodels.models import ViTImageClassifier

SOURCE = f"{Path(kmodels.__file__).parent}/"
BACKEND = keras.backend.backend()
KINDS = ("plain", "saved", "resumed")
# All files, in the order of KINDS.
BOUNDS = {"jax": (21, 37, 41), "tensorflow": (23, 38, 42), "torch": (49, 66, 69)}
# Those that a call of the model does not enter.
BESIDES = {"jax": (16, 32, 36), "tensorflow": (18, 33, 36), "torch": (20, 37, 40)}


def entered(call):
    """Files, relative to the package, of the functions that a call enters."""
    found = set()

    def note(frame, event, argument):
        if event == "call" and (file := frame.f_code.co_filename).startswith(SOURCE):
            found.add(file.removeprefix(SOURCE))

    former = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(former[0])
        threading.setprofile(former[1])
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files entered by each kind of fit, and by a call of the model."""
    model = ViTImageClassifier.from_preset("vit_debug", num_layers=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    x = np.zeros((8, *model.backbone.config.image_shape), "float32")
    y = np.zeros(8, "int32")

    def fit(epochs=1, callbacks=None):
        model.fit(x, y, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0)

    folder = tmp_path_factory.mktemp("checkpoints")
    fit()
    return {
        "model": entered(lambda: model(x)),
        "plain": entered(fit),
        "saved": entered(lambda: fit(callbacks=[Checkpoint(folder)])),
        "resumed": entered(lambda: fit(2, [Checkpoint(folder, resume=True)])),
    }


def test_what_is_counted_ran(files):
    assert {"data/fit/run.py", "training/keras_methods.py"} <= files["plain"]
    assert "checkpoint/callback.py" in files["saved"] - files["plain"]
    assert "weights/readers.py" in files["resumed"] - files["saved"]
    assert "models/vit/model.py" in files["model"]
    assert ("models/vit/model.py" in files["plain"]) == (BACKEND == "torch")


@pytest.mark.parametrize("kind", KINDS)
def test_fit_enters_few_files(files, kind):
    number = KINDS.index(kind)
    besides = files[kind] - files["model"]
    assert len(files[kind]) <= BOUNDS[BACKEND][number], sorted(files[kind])
    assert len(besides) <= BESIDES[BACKEND][number], sorted(besides)
