"""The generic bodies against NumPy float64, on the running backend."""

import math

import keras
import numpy as np
import pytest

import op_cases
from gradients import to_numpy, value_and_grad
from kmodels import ops
from kmodels.core.errors import InputError
from tolerances import tolerance

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


IDS = np.array([[0, 0, 1]], "int32")


@pytest.mark.parametrize("case", op_cases.ATTENTION, ids=lambda case: case.name)
def test_attention(case: op_cases.Case) -> None:
    arrays, mask = op_cases.arrays(case), op_cases.mask(case)
    expected = op_cases.reference_attention(*arrays, mask, **case.keywords)
    output = ops.attention.generic(*map(keras.ops.convert_to_tensor, arrays), mask, **case.keywords)
    np.testing.assert_allclose(to_numpy(output), expected, atol=tolerance("attention"), rtol=0)
    # The feature under test bites: without it the result would be another one.
    plain = op_cases.reference_attention(*arrays)
    if case.name != "plain":
        assert np.abs(expected - plain).max() > 100 * tolerance("attention")
    if case.mask == "pairs":
        assert not expected[0, case.shapes[0][1] // 2].any()


def test_attention_in_bfloat16_returns_bfloat16() -> None:
    case = op_cases.ATTENTION[5]
    arrays = op_cases.arrays(case)
    low = [keras.ops.cast(x, "bfloat16") for x in arrays]
    output = ops.attention.generic(*low, **case.keywords)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    expected = op_cases.reference_attention(*map(to_numpy, low), **case.keywords)
    error = np.abs(to_numpy(output) - expected).max()
    assert error < tolerance("attention", "bfloat16")


def test_gradient_of_an_empty_row_is_zero_not_nan() -> None:
    case = next(case for case in op_cases.ATTENTION if case.mask == "pairs")
    mask = op_cases.mask(case)
    _, gradients = value_and_grad(
        lambda q, k, v: ops.attention.generic(q, k, v, mask), *op_cases.arrays(case)
    )
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[0][0, case.shapes[0][1] // 2].any()
    assert gradients[0][1, 2].any()


def test_attention_dropout_needs_a_seed_and_keeps_the_expectation() -> None:
    q, k, v = (keras.ops.convert_to_tensor(normal(64, 4, 2, 4) * 0.1 + 1) for _ in range(3))
    plain = to_numpy(ops.attention(q, k, v))
    np.testing.assert_array_equal(to_numpy(ops.attention(q, k, v, dropout=0.5)), plain)
    dropped = to_numpy(ops.attention(q, k, v, dropout=0.5, seed=keras.random.SeedGenerator(1)))
    assert np.abs(dropped - plain).max() > 0.1
    # 4 equal weights: the standard deviation of one output is 0.5, and 512 rows are independent.
    assert abs(dropped.mean() - plain.mean()) < 5 * 0.5 / math.sqrt(512)


@pytest.mark.once
@pytest.mark.parametrize(
    ("shapes", "keywords", "message"),
    [
        (((2, 3, 8),) * 3, {}, "takes .batch, length, heads, head_dim. three times"),
        (((1, 3, 4, 8), (1, 3, 3, 8), (1, 3, 3, 8)), {}, "the query a multiple"),
        (((1, 3, 4, 8), (1, 3, 4, 6), (1, 3, 4, 6)), {}, "same head_dim"),
        (
            ((1, 4, 1, 8), (1, 3, 1, 8), (1, 3, 1, 8)),
            {"causal": True},
            "at least as many keys as queries",
        ),
        (((1, 3, 1, 8),) * 3, {"block_ids": IDS}, "block_ids without causal=True"),
        (((2, 4, 1, 8),) * 3, {"segment_ids": IDS}, r"segment_ids \(1, 3\) for key \(2, 4,"),
        (((1, 3, 1, 8),) * 3, {"segment_ids": IDS[0]}, r"one for each key: .*, so \(1, 3\)"),
        (
            ((1, 4, 1, 8), (1, 3, 1, 8), (1, 3, 1, 8)),
            {"segment_ids": IDS},
            "with segment_ids got query .* at least as many keys as queries",
        ),
        (((1, 3, 1, 8),) * 3, {"window": 0}, "window 0; it must be at least 1"),
        (((1, 3, 1, 8),) * 3, {"soft_cap": 0.0}, "soft_cap 0.0; it must be positive"),
        (((1, 3, 1, 8),) * 3, {"dropout": 1.0}, r"dropout 1.0; it must be in \[0, 1\)"),
    ],
)
def test_attention_says_what_does_not_fit(shapes, keywords, message) -> None:
    tensors = [keras.ops.ones(shape) for shape in shapes]
    with pytest.raises(InputError, match=message):
        ops.attention(*tensors, **keywords)


@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm(with_bias: bool) -> None:
    # A mean above the spread shows one-pass variances for what they are.
    x, scale, bias = normal(3, 5, 12) + 8, normal(12), normal(12) if with_bias else None
    expected = op_cases.reference_layer_norm(x, scale, bias, 1e-3)
    output = ops.layer_norm.generic(keras.ops.convert_to_tensor(x), scale, bias, epsilon=1e-3)
    np.testing.assert_allclose(to_numpy(output), expected, atol=tolerance("layer_norm"), rtol=0)


def test_layer_norm_in_bfloat16_keeps_a_float32_scale() -> None:
    x = keras.ops.cast(normal(4, 16), "bfloat16")
    scale = np.full(16, 1 + 2**-10, "float32")  # bfloat16 would round it to 1
    output = ops.layer_norm.generic(x, scale)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    expected = op_cases.reference_layer_norm(to_numpy(x), scale, None, 1e-6)
    rounded = to_numpy(keras.ops.cast(expected.astype("float32"), "bfloat16"))
    assert (to_numpy(output) == rounded).mean() > 0.95


def test_dense() -> None:
    x, kernel, bias = normal(2, 3, 4), normal(4, 5), normal(5)
    expected = x.astype("float64") @ kernel + bias
    output = ops.dense.generic(keras.ops.convert_to_tensor(x), kernel, bias)
    np.testing.assert_allclose(to_numpy(output), expected, atol=tolerance("dense"), rtol=0)
    with pytest.raises(InputError, match="the width must be 5"):
        ops.dense(keras.ops.ones((2, 4)), keras.ops.ones((5, 3)))


def test_patch_embedding() -> None:
    images, kernel, bias = normal(2, 4, 6, 3) * 0.3, normal(12, 5), normal(5)
    expected = op_cases.reference_patch_embedding(images, kernel, bias, 2)
    output = ops.patch_embedding.generic(
        keras.ops.convert_to_tensor(images), keras.ops.convert_to_tensor(kernel), bias, patch_size=2
    )
    assert output.shape == (2, 6, 5)
    np.testing.assert_allclose(
        to_numpy(output), expected, atol=tolerance("patch_embedding"), rtol=0
    )


@pytest.mark.once
def test_patch_embedding_refuses_to_drop_pixels() -> None:
    with pytest.raises(InputError, match=r"30 x 32 pixels and patch_size 16.*multiples of 16"):
        ops.patch_embedding(keras.ops.ones((1, 30, 32, 3)), keras.ops.ones((768, 4)), patch_size=16)
    with pytest.raises(InputError, match="its first axis must be 768"):
        ops.patch_embedding(keras.ops.ones((1, 32, 32, 3)), keras.ops.ones((256, 4)), patch_size=16)


def test_mlp() -> None:
    shapes = [(2, 5, 6), (6, 8), (8,), (8, 4), (4,)]
    x, up, up_bias, down, down_bias = arrays = [normal(*shape) for shape in shapes]
    hidden = x.astype("float64") @ up + up_bias
    hidden *= 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
    expected = hidden @ down + down_bias
    for body in (ops.mlp, ops.mlp.generic):
        found = to_numpy(body(*tensors))
        assert np.abs(found - expected).max() < tolerance("mlp") * np.abs(expected).max()
    without = to_numpy(ops.mlp(tensors[0], tensors[1], None, tensors[3], None))
    assert np.abs(without - expected).max() > 0.1
    with pytest.raises(InputError, match="must be 6"):
        ops.mlp(tensors[3], *tensors[1:])


def test_gelu() -> None:
    x = np.linspace(-4, 4, 33).astype("float32")
    exact = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.astype("float64")]
    tanh = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        for v in x.astype("float64")
    ]
    quick = [v / (1 + math.exp(-1.702 * v)) for v in x.astype("float64")]
    for other in (tanh, quick):
        assert np.abs(np.subtract(exact, other)).max() > 100 * tolerance("gelu")
    tensor = keras.ops.convert_to_tensor(x)
    assert np.abs(to_numpy(ops.gelu(tensor)) - exact).max() < tolerance("gelu")
    for form, expected in ((True, tanh), ("sigmoid", quick)):
        found = to_numpy(ops.gelu(tensor, approximate=form))
        assert np.abs(found - expected).max() < tolerance("gelu")


@pytest.mark.parametrize("path", ["generic", "op"])
def test_dropout_statistics(path: str) -> None:
    function = ops.dropout if path == "op" else ops.dropout.generic
    n, rate = 200_003, 0.3
    x = keras.ops.ones((n,))
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


def test_dropout_rate_is_checked() -> None:
    x, seed = keras.ops.ones((3,)), keras.random.SeedGenerator(0)
    np.testing.assert_array_equal(to_numpy(ops.dropout(x, 0.0, seed)), np.ones(3))
    with pytest.raises(InputError, match=r"rate 1.0; it must be in \[0, 1\)"):
        ops.dropout(x, 1.0, seed)


DROPPED = {
    "attention": [(2, 6, 2, 4)] * 3,
    "mlp": [(2, 5, 6), (6, 8), (8,), (8, 4), (4,)],
}


@pytest.mark.parametrize("name", DROPPED)
def test_gradients_under_dropout_are_those_of_what_was_kept(name: str) -> None:
    """Against differences of values, with the same draw in each call."""
    op, arrays = getattr(ops, name), [normal(*shape) for shape in DROPPED[name]]

    def run(*values: np.ndarray) -> tuple:
        seed = keras.random.SeedGenerator(5)
        return value_and_grad(lambda *x: op(*x, dropout=0.4, seed=seed), *values)

    value, gradients = run(*arrays)
    weight = np.random.default_rng(7).normal(size=tuple(value.shape)).astype("float32")

    def total(*values: np.ndarray) -> float:
        seed = keras.random.SeedGenerator(5)
        tensors = [keras.ops.convert_to_tensor(x) for x in values]
        output = to_numpy(op(*tensors, dropout=0.4, seed=seed))
        return float((output.astype("float64") * weight).sum())

    plain = to_numpy(op(*(keras.ops.convert_to_tensor(x) for x in arrays)))
    assert np.abs(to_numpy(value) - plain).max() > 0.1
    for i, gradient in enumerate(gradients):
        step = normal(*arrays[i].shape) * 1e-2
        up, down = (
            total(*(x + sign * step if j == i else x for j, x in enumerate(arrays)))
            for sign in (1, -1)
        )
        slope = float((gradient.astype("float64") * step).sum())
        assert abs(slope) > 1e-3
        assert abs((up - down) / 2 - slope) < 2e-3 * max(1.0, abs(slope))
