"""RMS norm, rotary embedding and gated GELU against their definitions in float64."""

import math

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import ops
from kmodels.core.errors import InputError
from tolerances import tolerance

RNG = np.random.default_rng(2)


def _normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def _tensors(dtype, *arrays):
    return [keras.ops.convert_to_tensor(x, dtype=dtype) for x in arrays]


def _rounded(tensors):
    return [to_numpy(keras.ops.cast(x, "float32")).astype("float64") for x in tensors]


def _check(name, found, expected, dtype):
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    error = np.abs(to_numpy(keras.ops.cast(found, "float32")) - expected).max()
    assert error <= tolerance(name, dtype) * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("offset", [1.0, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(dtype, offset):
    given = _tensors(dtype, _normal(2, 3, 8) * 5, _normal(8))
    x, scale = _rounded(given)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * (offset + scale)
    found = ops.rms_norm(*given, epsilon=0.5, offset=offset)
    _check("rms_norm", found, expected, dtype)
    default = ops.rms_norm(*given, epsilon=0.5)
    assert bool(keras.ops.all(keras.ops.equal(found, default))) == (offset == 1.0)
    normal = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5)
    _check("rms_norm", ops.rms_norm(given[0], None, epsilon=0.5, offset=offset), normal, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("per_row", "turned"), [(False, 1.0), (True, 1.0), (True, 0.7)])
def test_rotary_embedding(dtype, per_row, turned):
    given = _tensors(dtype, _normal(2, 5, 3, 6))
    (x,) = _rounded(given)
    positions = np.array([[0, 1, 2, 9, 40], [7, 3, 0, 1, 2]] if per_row else [0, 1, 2, 3, 4])
    expected = np.zeros_like(x)
    for b, t, n, i in np.ndindex(2, 5, 3, 3):
        position = positions[b, t] if per_row else positions[t]
        angle = position / 4 * 100 ** (-2 * i / 6) * (i < 3 * turned - 0.5)
        first, second = x[b, t, n, i], x[b, t, n, i + 3]
        expected[b, t, n, i] = first * math.cos(angle) - second * math.sin(angle)
        expected[b, t, n, i + 3] = second * math.cos(angle) + first * math.sin(angle)
    found = ops.rotary_embedding(
        *given,
        keras.ops.convert_to_tensor(positions.astype("int32")),
        max_wavelength=100,
        scaling=4,
        turned=turned,
    )
    _check("rotary_embedding", found, expected, dtype)


@pytest.mark.once
def test_rotary_embedding_of_an_odd_width():
    with pytest.raises(InputError, match="width 5; it must be even"):
        ops.rotary_embedding(_normal(1, 2, 1, 5), np.arange(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_gelu(dtype):
    given = _tensors(dtype, _normal(4, 9) * 2, _normal(4, 9))
    gate, up = _rounded(given)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    _check("gated_gelu", ops.gated_gelu(*given), 0.5 * gate * (1 + np.tanh(inner)) * up, dtype)
