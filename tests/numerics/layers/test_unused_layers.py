"""Layers of a user's model that are never called, and Keras' methods of plain models."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import layers
from refusals import refused
from tolerances import tolerance

UNUSED = {
    "dense": lambda: layers.Dense(3),
    "embedding": lambda: layers.Embedding(5, 3),
    "untied": lambda: layers.Embedding(5, 3, tie_weights=False),
    "experts": lambda: layers.GroupedDense(2, 3),
    "attention": lambda: layers.Attention(2),
    "mlp": lambda: layers.MLP(4),
    "norm": layers.RMSNorm,
}


@keras.saving.register_keras_serializable(package="kmodels_tests")
class Branched(keras.Model):
    """Has a layer in a branch that is not taken."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.used = layers.Dense(2)
        self.unused = UNUSED[kind]()

    def build(self, shape):
        self.used.build(shape)
        self.built = True

    def call(self, x):
        return self.used(x)

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@pytest.mark.parametrize("kind", UNUSED)
def test_a_layer_that_was_never_called_is_saved_and_read_back(kind, tmp_path):
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    model = Branched(kind)
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    again = keras.saving.load_model(tmp_path / "model.keras")
    other = Branched(kind)
    other.build((None, 3))
    other.load_weights(tmp_path / "model.weights.h5")
    for read in (again, other):
        np.testing.assert_array_equal(to_numpy(read(x)), to_numpy(model(x)))
        assert not read.unused.built


@pytest.mark.parametrize(
    ("layer", "shape"), [(layers.Dense(3), (None, 3)), (layers.Embedding(5, 3), (None, 3))]
)
def test_weights_for_a_layer_that_was_never_built_are_one_line(layer, shape):
    store = {}
    layer.build(shape)
    layer.save_own_variables(store)
    fresh = type(layer).from_config(layer.get_config())
    refused("was never built and the file holds weights for it", fresh.load_own_variables, store)


@pytest.mark.filterwarnings("ignore:Layer InputLayer")
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_quantization_by_keras(mode, tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    x = np.linspace(-1, 1, 8, dtype="float32").reshape(2, 4)
    before = to_numpy(model(x))
    model.quantize(mode)
    dense = model.layers[0]
    assert dense.kernel is None and dense.quantized.mode == mode
    coarse = to_numpy(model(x))
    assert 0 < np.abs(coarse - before).max() < 0.2
    wanted = x @ to_numpy(dense.wide_kernel()) + to_numpy(dense.bias)
    np.testing.assert_allclose(coarse, wanted, rtol=0, atol=tolerance("logits"))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(to_numpy(again(x)), coarse)
    refused(f"is {mode} already", model.quantize, mode)
