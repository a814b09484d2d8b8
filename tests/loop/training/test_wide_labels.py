"""Labels of 64 bits, as NumPy makes them: no backend says a word about them."""

import warnings

import keras
import numpy as np
import pytest

from kmodels.core import keras_internals
from kmodels.training import TrainStep
from pool import pool

IMAGES = np.random.default_rng(0).normal(size=(4, 16, 16, 3))
LABELS = np.arange(4, dtype="int64") % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture
def model():
    with pool("vit_debug", num_classes=3, num_layers=1) as lent:
        yield lent


def loss(model, batch, training):
    return LOSS(batch[1], model(batch[0]))


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
@pytest.mark.parametrize("own", [False, True], ids=["task", "step"])
def test_nothing_is_said_about_64_bits(model, own, method):
    if own:
        model = TrainStep(model, loss)
        model.compile(keras.optimizers.SGD(0.1))
    else:
        model.compile("sgd", LOSS, metrics=["accuracy"])
    quiet = {"verbose": 0} if method in ("fit", "evaluate") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(model, method)(IMAGES, LABELS, **quiet)
    assert keras_internals.metrics_built(model)
