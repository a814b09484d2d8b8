"""Layers: variables in the right place, and what is random only in training."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import ops
from kmodels.core.errors import InputError
from kmodels.layers import MLP, Attention, Dropout, DropPath, Embedding, LayerScale
from refusals import refused
from tolerances import tolerance


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


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


def test_a_causal_attention_sees_what_a_mask_of_that_form_lets_it_see():
    x, context = normal(2, 4, 8), normal(2, 6, 8)
    plain, causal = Attention(2, name="one"), Attention(2, causal=True, name="two")
    plain(x), causal(x)
    causal.set_weights(plain.get_weights())
    whole = np.tril(np.ones((4, 4), bool))[None].repeat(2, 0)
    expected = to_numpy(plain(x, attention_mask=whole))
    np.testing.assert_allclose(to_numpy(causal(x)), expected, atol=1e-6)
    assert np.abs(to_numpy(plain(x)) - expected).max() > 1e-2
    # A mask of three axes, or of four by head, is an attention mask under Keras' name too.
    np.testing.assert_allclose(to_numpy(plain(x, mask=whole)), expected, atol=1e-6)
    by_head = whole[:, None].repeat(2, 1)
    np.testing.assert_allclose(to_numpy(plain(x, mask=by_head)), expected, atol=1e-6)
    padding = np.array([[True, True, True, False]] * 2)
    both = to_numpy(plain(x, attention_mask=whole & padding[:, None]))
    np.testing.assert_allclose(to_numpy(causal(x, mask=padding)), both, atol=1e-6)
    # The last query sees all of a longer context.
    seen = np.tril(np.ones((4, 6), bool), 2)[None].repeat(2, 0)
    np.testing.assert_allclose(
        to_numpy(causal(x, context)), to_numpy(plain(x, context, seen)), atol=1e-6
    )
    weights = to_numpy(causal.probabilities(x))
    assert np.all(weights[..., ~whole[0]] == 0)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_rotary_positions_count_as_distances():
    x = normal(2, 4, 8)
    layer = Attention(2, rope_wavelength=100.0, name="attention")
    found = to_numpy(layer(x))
    moved = to_numpy(layer(x, positions=np.arange(4) + 3))
    np.testing.assert_allclose(moved, found, atol=1e-5)
    rows = np.array([[0, 1, 2, 3], [0, 2, 4, 6]])
    other = to_numpy(layer(x, positions=rows))
    np.testing.assert_allclose(other[0], found[0], atol=1e-5)
    assert np.abs(other[1] - found[1]).max() > 1e-3
    halved = Attention(2, rope_wavelength=100.0, rope_scaling=2.0, name="other")
    halved(x)
    halved.set_weights(layer.get_weights())
    np.testing.assert_allclose(to_numpy(halved(x, positions=2 * rows)), other, atol=1e-5)
    # By the op itself, of queries and keys alone.
    q, k, v = layer.heads(x)
    plain = [layer._split(part(x)) for part in (layer.query_dense, layer.key_dense)]
    for turned, still in zip((q, k), plain, strict=True):
        expected = ops.rotary_embedding(still, np.arange(4), max_wavelength=100.0)
        np.testing.assert_allclose(to_numpy(turned), to_numpy(expected), atol=1e-6)
    np.testing.assert_allclose(to_numpy(v), to_numpy(layer._split(layer.value_dense(x))), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Attention(2)(x, positions=np.arange(4)), "got positions and has no rotary"),
        (lambda x: Attention(8, rope_wavelength=1e4)(x), "1 channels; a rotary embedding needs an"),
    ],
)
def test_what_does_not_go_with_a_rotary_embedding(call, message):
    refused(message, call, normal(2, 4, 8))


def test_an_embedding_with_an_output_table_of_its_own(tmp_path):
    layer = Embedding(7, 4, scaled=False, tie_weights=False, name="table")
    ids = np.array([[0, 3, 6]])
    rows = to_numpy(layer(ids))
    table, output = (to_numpy(w) for w in layer.weights)
    np.testing.assert_array_equal(rows, table[ids])
    hidden = normal(1, 3, 4)
    logits = to_numpy(layer(hidden, reverse=True))
    np.testing.assert_allclose(logits, hidden @ output.T, atol=1e-6)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layer])
    model.save_weights(tmp_path / "x.weights.h5")
    before = [to_numpy(w) for w in layer.weights]
    model.set_weights([np.zeros_like(w) for w in before])
    model.load_weights(tmp_path / "x.weights.h5")
    for weight, value in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), value)
    layer.resize(9)
    assert [tuple(w.shape) for w in layer.weights] == [(9, 4)] * 2
    np.testing.assert_allclose(to_numpy(layer.output_table)[7], output.mean(0), atol=1e-6)
    tied = Embedding(7, 4, name="tied")
    tied(ids)
    with pytest.raises(InputError, match="the file holds an output layer of its own"):
        tied.load_own_variables({"0": table, "1": output})
    refused("the file holds no output layer of its own", layer.load_own_variables, {"0": table})


def test_a_row_that_is_looked_up_twice_has_one_gradient():
    layer = Embedding(7, 4, keras.initializers.RandomNormal(0.5, 0.1))
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layer])
    model.compile(keras.optimizers.Adam(0.1, epsilon=1e-12), "mse")
    ids = np.array([[0, 3, 3, 5], [3, 5, 5, 6]])
    before = to_numpy(layer.embeddings)
    model.train_on_batch(ids, np.zeros((2, 4, 4), "float32"))
    # The first step of Adam (Kingma & Ba 2015, algorithm 1) has the rate as its length everywhere.
    wanted = before - 0.1 * np.isin(np.arange(7), ids)[:, None]
    np.testing.assert_allclose(to_numpy(layer.embeddings), wanted, atol=tolerance("optimizer"))
