"""Rotary embedding of places in a plane against its definition in float64."""

import math

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import ops
from kmodels.core.errors import InputError
from op_cases import PLACES
from tolerances import tolerance

RNG = np.random.default_rng(5)
H = 8
# (axis, step of the series) -> the two channels of each pair, written out.
CHANNELS = {
    "halves": {(0, 0): (0, 4), (0, 1): (1, 5), (1, 0): (2, 6), (1, 1): (3, 7)},
    "neighbors": {(0, 0): (0, 1), (0, 1): (2, 3), (1, 0): (4, 5), (1, 1): (6, 7)},
    "quarters": {(0, 0): (0, 2), (0, 1): (1, 3), (1, 0): (4, 6), (1, 1): (5, 7)},
}


@pytest.mark.parametrize("pairs", CHANNELS)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_pair_turns_by_its_coordinate(dtype, per_row, pairs):
    x = keras.ops.convert_to_tensor(RNG.normal(size=(2, 5, 3, H)), dtype=dtype)
    given = to_numpy(keras.ops.cast(x, "float32"))
    places = PLACES if per_row else PLACES[1]
    expected = np.zeros_like(given)
    for b, t, n in np.ndindex(2, 5, 3):
        place = places[b, t] if per_row else places[t]
        for (axis, i), (a, z) in CHANNELS[pairs].items():
            angle = float(place[axis]) * 10.0 ** (-4 * i / H)
            first, second = given[b, t, n, a], given[b, t, n, z]
            expected[b, t, n, a] = first * math.cos(angle) - second * math.sin(angle)
            expected[b, t, n, z] = second * math.cos(angle) + first * math.sin(angle)
    tensor = keras.ops.convert_to_tensor(places)
    found = ops.rotary_embedding_2d(x, tensor, max_wavelength=10.0, pairs=pairs)
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    found = to_numpy(keras.ops.cast(found, "float32"))
    limit = tolerance("rotary_embedding_2d", dtype) * np.abs(expected).max()
    assert np.abs(found - expected).max() <= limit
    assert np.abs(found - given).max() > 0.5
    # What stands at (0, 0) is a class token or a register: not one bit of it changes.
    still = (places == 0).all(-1)
    still = still if per_row else np.stack([still, still])
    assert still.any() and np.array_equal(found[still], given[still])


@pytest.mark.once
@pytest.mark.parametrize(
    ("shape", "places", "pairs", "message"),
    [
        ((1, 2, 1, 6), (2, 2), "halves", "width 6; it must be a multiple of 4"),
        ((1, 2, 1, 8), (2, 3), "halves", r"coordinates of shape \(2, 3\); give \(T, 2\) or"),
        ((1, 2, 1, 8), (2,), "halves", r"coordinates of shape \(2,\); give"),
        ((1, 2, 1, 8), (2, 2), "each", "pairs is 'each'; choose one of halves, neighbors, quarte"),
    ],
)
def test_what_cannot_turn(shape, places, pairs, message):
    with pytest.raises(InputError, match=message):
        ops.rotary_embedding_2d(np.zeros(shape, "float32"), np.zeros(places), pairs=pairs)
