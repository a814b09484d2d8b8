"""Labels of 64 bits, as NumPy makes them: no backend says a word about them."""

import warnings

import keras
import numpy as np
import pytest

from kmodels.core import keras_internals
from kmodels.models import ViTImageClassifier
from kmodels.training import TrainStep

IMAGES = np.random.default_rng(0).normal(size=(4, 16, 16, 3))
LABELS = np.arange(4, dtype="int64") % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier():
    return ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1)


def step():
    return TrainStep(classifier(), lambda models, batch, training: LOSS(batch[1], models(batch[0])))


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
@pytest.mark.parametrize("make", [classifier, step], ids=["task", "step"])
def test_nothing_is_said_about_64_bits(make, method):
    model = make()
    if make is classifier:
        model.compile("sgd", LOSS, metrics=["accuracy"])
    else:
        model.compile(keras.optimizers.SGD(0.1))
    quiet = {"verbose": 0} if method in ("fit", "evaluate") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(model, method)(IMAGES, LABELS, **quiet)
    assert keras_internals.metrics_built(model)
