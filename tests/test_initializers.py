"""First weights: the same numbers on every backend, whatever the order of building."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import compat, initializers
from kmodels.layers import Dense


def test_numbers_depend_on_seed_and_path_alone():
    draws = [initializers.generator(path, seed).random(3) for seed in (1, 2) for path in "ab"]
    assert len({tuple(draw) for draw in draws}) == 4
    np.testing.assert_array_equal(draws[0], initializers.generator("a", 1).random(3))


def test_golden_numbers_are_the_same_on_each_backend():
    layer = Dense(2, name="golden")
    keras.utils.set_random_seed(7)
    layer.build((None, 3))
    kernel = to_numpy(layer.kernel)
    # One uint32 of the stream each, by hand: limit * (2u - 1) with u = (word >> 8) / 2**24.
    words = initializers.generator("golden/kernel", 7).random((3, 2), "float32").astype("float64")
    limit = np.sqrt(6 / 5)
    np.testing.assert_allclose(kernel, limit * (2 * words - 1), atol=1e-6)
    np.testing.assert_allclose(kernel.ravel()[:2], [-0.08642268, -0.9271798], atol=1e-6)


def test_an_unseeded_process_keeps_one_stream():
    a, b = (initializers.generator("x", None).random() for _ in range(2))
    assert a == b


@pytest.mark.parametrize(
    ("draw", "deviation"),
    [
        (initializers.normal(0.5), 0.5),
        (initializers.truncated_normal(0.5), 0.5 * 0.8796),
        (initializers.variance_scaling(1.0, "fan_in", "untruncated_normal"), 1 / np.sqrt(200)),
        (initializers.variance_scaling(1.0, "fan_in", "truncated_normal"), 1 / np.sqrt(200)),
        (initializers.variance_scaling(1.0, "fan_avg", "uniform"), np.sqrt(2 / 400)),
        (initializers.uniform(-1.0, 1.0), 1 / np.sqrt(3)),
    ],
)
def test_deviation(draw, deviation):
    values = draw(np.random.default_rng(0), (200, 200))
    assert values.dtype == np.float32
    assert abs(values.std() / deviation - 1) < 0.02


def test_truncated_normal_has_no_tails():
    values = initializers.truncated_normal(1.0)(np.random.default_rng(0), (10_000,))
    assert 1.9 < np.abs(values).max() <= 2.0


def test_variables_made_without_values_get_them_later():
    with compat.without_values() as made:
        late = Dense(2, name="d")
        late.build((None, 3))
    keras.utils.set_random_seed(1234)
    drawn = Dense(2, name="d")
    drawn.build((None, 3))
    assert made == [late.kernel, late.bias]
    assert not any(compat.has_value(variable) for variable in made)
    compat.give_value(late.bias, keras.ops.ones(2))
    compat.draw_values(made)
    np.testing.assert_array_equal(to_numpy(late.kernel), to_numpy(drawn.kernel))
    np.testing.assert_array_equal(to_numpy(late.bias), 1.0)
