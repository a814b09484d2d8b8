"""Layers: variables in the right place, and what is random only in training."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.layers import MLP, Attention, Dropout, DropPath, LayerScale


@pytest.mark.parametrize("kind", [Dropout, DropPath])
def test_nothing_is_dropped_outside_training(kind):
    x = np.ones((4, 3, 2), "float32")
    np.testing.assert_array_equal(to_numpy(kind(0.5)(x)), x)
    np.testing.assert_array_equal(to_numpy(kind(0.0)(x, training=True)), x)


def test_drop_path_drops_whole_examples_at_its_rate():
    y = to_numpy(DropPath(0.25, name="p")(np.ones((4000, 3, 2), "float32"), training=True))
    flat = y.reshape(4000, -1)
    assert set(np.unique(flat.min(1) == flat.max(1))) == {True}
    np.testing.assert_allclose(np.unique(flat), [0.0, 1 / 0.75], atol=1e-6)
    assert abs((flat[:, 0] == 0).mean() - 0.25) < 0.03


def test_dropout_keeps_the_mean_and_is_its_own_stream():
    x = np.ones((200, 200), "float32")
    layer = Dropout(0.3, name="one")
    first, second = to_numpy(layer(x, training=True)), to_numpy(layer(x, training=True))
    assert abs(first.mean() - 1) < 0.02
    assert (first != second).any()
    keras.utils.set_random_seed(1234)
    again = to_numpy(Dropout(0.3, name="one")(x, training=True))
    np.testing.assert_array_equal(first, again)
    other = to_numpy(Dropout(0.3, name="other")(x, training=True))
    assert (other != again).any()


def test_layer_scale_multiplies_by_channel():
    layer = LayerScale(0.5)
    np.testing.assert_allclose(to_numpy(layer(np.ones((2, 3), "float32"))), 0.5)
    layer.scale.assign([0.0, 1.0, 2.0])
    np.testing.assert_allclose(to_numpy(layer(np.ones((1, 3), "float32")))[0], [0, 1, 2])


def test_attention_probabilities_explain_its_output():
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    layer = Attention(2, qk_norm=True)
    y = to_numpy(layer(x))
    p = to_numpy(layer.probabilities(x))
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
    v = to_numpy(layer.heads(x)[2])
    mixed = np.einsum("bnts,bsnh->btnh", p, v).reshape(2, 5, 8)
    kernel, bias = to_numpy(layer.output_dense.kernel), to_numpy(layer.output_dense.bias)
    np.testing.assert_allclose(y, mixed @ kernel + bias, atol=1e-5)


def test_paths_are_those_that_weights_and_sharding_match_on():
    layer = Attention(2, dropout=0.1, name="attention")
    layer.build((None, 5, 8))
    names = {v.path for v in layer.trainable_variables}
    expected = {
        f"attention/{n}/{w}"
        for n in ("query", "key", "value", "output")
        for w in ("kernel", "bias")
    }
    assert names == expected
    rest = {v.path for v in layer.variables} - names
    assert rest == {"attention/seed/seed_generator_state"}


@pytest.mark.parametrize("approximate", [False, True])
def test_mlp_against_numpy(approximate):
    from math import erf

    x = np.random.default_rng(0).normal(size=(3, 4))
    layer = MLP(6, approximate=approximate)
    y = to_numpy(layer(x.astype("float32")))
    up, down = (to_numpy(d.kernel).astype("float64") for d in (layer.up, layer.down))
    h = x @ up
    if approximate:
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    else:
        h = 0.5 * h * (1 + np.vectorize(erf)(h / np.sqrt(2)))
    np.testing.assert_allclose(y, h @ down, atol=1e-5)
