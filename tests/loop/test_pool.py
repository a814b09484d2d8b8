"""The pool of models: whatever a test does to one, the next gets it as it was."""

import keras
import numpy as np
import pytest

import pool
from kmodels.checkpoint import state

SETTINGS = {"num_classes": 3, "num_layers": 1}


def train(model):
    images = np.random.default_rng(0).normal(size=(4, *model.backbone.config.image_shape))
    fitted = model.fit(images.astype("float32"), np.arange(4) % 3, batch_size=2, verbose=0)
    return fitted.history["loss"], state.weights_digest(model)


def freeze(model):
    model.backbone.trainable = False


def compile_again(model):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def add_adapters(model):
    model.backbone.enable_lora(2)


def quantize(model):
    model.quantize("int8")


def take_the_preprocessor(model):
    model.preprocessor = None


@pytest.fixture(scope="module")
def alone():
    with pool.pool("vit_debug", **SETTINGS) as model:
        return train(model)


@pytest.mark.each_time("quantize", "compile_again", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    "change", [freeze, compile_again, add_adapters, quantize, take_the_preprocessor]
)
def test_a_model_is_put_back(alone, change):
    with pool.pool("vit_debug", **SETTINGS) as model:
        preprocessor, first = model.preprocessor, model
        change(model)
        train(model)
    with pool.pool("vit_debug", **SETTINGS) as model:
        assert model is first and model.preprocessor is preprocessor
        assert train(model) == alone


def test_two_at_once_are_two_models():
    with pool.pool("vit_debug", **SETTINGS) as one, pool.pool("vit_debug", **SETTINGS) as other:
        assert one is not other
        assert state.weights_digest(one) == state.weights_digest(other)


def test_a_model_that_cannot_be_put_back_is_dropped_and_counted():
    def make():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pool.pool(make) as first:
        first.layers[0].kernel._shape = (9, 9)
    assert sum(pool.dropped.values()) == 1
    with pool.pool(make) as model:
        assert model is not first
