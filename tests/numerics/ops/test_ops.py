"""What the ops promise beside their values, which `overrides/test_parity.py` looks at."""

import math

import keras
import numpy as np
import pytest

from gradients import differences, to_numpy
from kmodels import ops
from kmodels.core.errors import InputError
from op_cases import PLACES, layer_norm
from tolerances import tolerance

RNG = np.random.default_rng(0)
IDS = np.array([[0, 0, 1]], "int32")


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


def ones(*shapes: tuple[int, ...]) -> list:
    return [keras.ops.ones(shape) for shape in shapes]


def test_attention_dropout_needs_a_seed_and_keeps_the_expectation() -> None:
    q, k, v = (keras.ops.convert_to_tensor(normal(64, 4, 2, 4) * 0.1 + 1) for _ in range(3))
    plain = to_numpy(ops.attention(q, k, v))
    np.testing.assert_array_equal(to_numpy(ops.attention(q, k, v, dropout=0.5)), plain)
    dropped = to_numpy(ops.attention(q, k, v, dropout=0.5, seed=keras.random.SeedGenerator(1)))
    assert np.abs(dropped - plain).max() > 0.1
    # 4 equal weights: the standard deviation of one output is 0.5, and 512 rows are independent.
    assert abs(dropped.mean() - plain.mean()) < 5 * 0.5 / math.sqrt(512)


FEWER_KEYS = ((1, 4, 1, 8), (1, 3, 1, 8), (1, 3, 1, 8))
SAME = ((1, 3, 1, 8),) * 3
# Op, shapes of its arguments, the others, and the message.
REFUSED = [
    ("attention", ((2, 3, 8),) * 3, {}, "takes .batch, length, heads, head_dim. three times"),
    ("attention", ((1, 3, 4, 8), *[(1, 3, 3, 8)] * 2), {}, "the query a multiple"),
    ("attention", ((1, 3, 4, 8), *[(1, 3, 4, 6)] * 2), {}, "same head_dim"),
    ("attention", FEWER_KEYS, {"causal": True}, "at least as many keys as queries"),
    ("attention", SAME, {"block_ids": IDS}, "block_ids without causal=True"),
    ("attention", ((2, 4, 1, 8),) * 3, {"segment_ids": IDS}, r"segment_ids \(1, 3\) for key \(2, "),
    ("attention", SAME, {"segment_ids": IDS[0]}, r"one for each key: .*, so \(1, 3\)"),
    (
        *("attention", FEWER_KEYS, {"segment_ids": IDS}),
        "with segment_ids got query .* at least as many keys as queries",
    ),
    ("attention", SAME, {"window": 0}, "window 0; it must be at least 1"),
    ("attention", SAME, {"soft_cap": 0.0}, "soft_cap 0.0; it must be positive"),
    ("attention", SAME, {"dropout": 1.0}, r"dropout 1.0; it must be in \[0, 1\)"),
    ("dense", ((2, 4), (5, 3)), {}, "the width must be 5"),
    ("dropout", ((3,),), {"rate": 1.0, "seed": 0}, r"rate 1.0; it must be in \[0, 1\)"),
    ("mlp", ((2, 4), (6, 8), (8,), (8, 4), (4,)), {}, "must be 6"),
    (
        *("patch_embedding", ((1, 30, 32, 3), (768, 4)), {"patch_size": 16}),
        r"30 x 32 pixels and patch_size 16.*multiples of 16",
    ),
    (
        *("patch_embedding", ((1, 32, 32, 3), (256, 4)), {"patch_size": 16}),
        "its first axis must be 768",
    ),
    ("rotary_embedding", ((1, 2, 1, 5), (2,)), {}, "width 5; it must be even"),
    ("rotary_embedding_2d", ((1, 2, 1, 6), (2, 2)), {}, "width 6; it must be a multiple of 4"),
    (
        *("rotary_embedding_2d", ((1, 2, 1, 8), (2, 3)), {}),
        r"coordinates of shape \(2, 3\); give \(T, 2\) or",
    ),
    ("rotary_embedding_2d", ((1, 2, 1, 8), (2,)), {}, r"coordinates of shape \(2,\); give"),
    (
        *("rotary_embedding_2d", ((1, 2, 1, 8), (2, 2)), {"pairs": "each"}),
        "pairs is 'each'; choose one of halves, neighbors, quarte",
    ),
]


@pytest.mark.once
@pytest.mark.parametrize(("name", "shapes", "keywords", "message"), REFUSED)
def test_an_op_says_what_does_not_fit(name, shapes, keywords, message) -> None:
    with pytest.raises(InputError, match=message):
        getattr(ops, name)(*ones(*shapes), **keywords)


@pytest.mark.parametrize("body", [ops.layer_norm, ops.layer_norm.generic], ids=["op", "generic"])
def test_layer_norm_in_bfloat16_keeps_a_float32_scale(body) -> None:
    x = keras.ops.cast(normal(4, 16), "bfloat16")
    scale = np.full(16, 1 + 2**-10, "float32")  # bfloat16 would round it to 1
    output = body(x, scale)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    expected = layer_norm(to_numpy(x).astype("float64"), scale)
    rounded = to_numpy(keras.ops.cast(expected.astype("float32"), "bfloat16"))
    assert (to_numpy(output) == rounded).mean() > 0.95


def test_mlp_without_biases_is_that_with_zeros() -> None:
    x, up, down = (keras.ops.convert_to_tensor(normal(*size)) for size in ((5, 6), (6, 8), (8, 4)))
    for body in (ops.mlp, ops.mlp.generic):
        wanted = to_numpy(body(x, up, keras.ops.zeros(8), down, keras.ops.zeros(4)))
        found = to_numpy(body(x, up, None, down, None))
        assert np.abs(found - wanted).max() < tolerance("mlp") * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pairs", ["halves", "neighbors", "quarters"])
def test_a_class_token_is_not_turned_by_one_bit(dtype, pairs) -> None:
    """What stands at (0, 0), as a register does."""
    x = keras.ops.cast(normal(2, 5, 3, 8), dtype)
    found, given = to_numpy(ops.rotary_embedding_2d(x, PLACES, pairs=pairs)), to_numpy(x)
    still = (PLACES == 0).all(-1)
    assert still.any() and np.array_equal(found[still], given[still])
    assert np.abs(found - given).max() > 0.5


@pytest.mark.parametrize("path", ["generic", "op"])
def test_dropout_statistics(path: str) -> None:
    function = ops.dropout if path == "op" else ops.dropout.generic
    n, rate = 200_003, 0.3
    x = keras.ops.ones((n,))
    seed = keras.random.SeedGenerator(5)
    np.testing.assert_array_equal(to_numpy(function(x, 0.0, seed)), np.ones(n))
    seed = keras.random.SeedGenerator(5)
    first, second = to_numpy(function(x, rate, seed)), to_numpy(function(x, rate, seed))
    again = to_numpy(function(x, rate, keras.random.SeedGenerator(5)))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    deviation = math.sqrt(rate * (1 - rate) / n)
    for dropped in (first == 0, second == 0):
        assert abs(dropped.mean() - rate) < 5 * deviation
        # Neighbours are independent, also four apart, where one 64-bit draw ends.
        for lag in (1, 2, 3, 4):
            both = (dropped[lag:] & dropped[:-lag]).mean()
            assert abs(both - rate**2) < 5 * rate / math.sqrt(n)
    assert abs(((first == 0) & (second == 0)).mean() - rate**2) < 5 * rate / math.sqrt(n)
    kept = first[first != 0]
    np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=2e-5)


def test_gradients_of_an_mlp_under_dropout_are_those_of_what_was_kept() -> None:
    arrays = [normal(*shape) for shape in ((2, 5, 6), (6, 8), (8,), (8, 4), (4,))]

    def run(*values):
        return ops.mlp(*values, dropout=0.4, seed=keras.random.SeedGenerator(5))

    differences(run, arrays)
    plain, dropped = (
        to_numpy(body(*map(keras.ops.convert_to_tensor, arrays))) for body in (ops.mlp, run)
    )
    assert np.abs(dropped - plain).max() > 0.1
