"""Pictures to normalised floats."""

import numpy as np
import pytest

from kmodels.errors import InputError
from kmodels.models import ViTImageClassifierPreprocessor


def test_pixels_are_scaled_and_normalised():
    pre = ViTImageClassifierPreprocessor((4, 4), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    x = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype="uint8")
    y = pre(x)
    assert y.dtype == np.float32
    expected = (x / 255.0 - [0.1, 0.2, 0.3]) / [0.5, 0.25, 1.0]
    np.testing.assert_allclose(y, expected, atol=1e-6)
    np.testing.assert_allclose(pre(x.astype("float32")), y)


def test_resizing_takes_pictures_of_any_size_and_antialiases():
    pre = ViTImageClassifierPreprocessor((2, 3), mean=(0.0,), std=(1.0,))
    flat = np.full((8, 9, 1), 51, "uint8")
    checker = np.indices((8, 9)).sum(0)[..., None] % 2 * 255
    y = pre([flat, checker.astype("uint8")])
    assert y.shape == (2, 2, 3, 1)
    np.testing.assert_allclose(y[0], 0.2, atol=1e-6)
    assert np.abs(y[1] - 0.5).max() < 0.1


def test_labels_and_weights_pass_through():
    pre = ViTImageClassifierPreprocessor((4, 4))
    x = np.zeros((4, 4, 3), "uint8")
    assert pre(x).shape == (1, 4, 4, 3)
    assert pre(x, [1])[1] == [1]
    assert pre(x, [1], [0.5])[2] == [0.5]


def test_wrong_pictures_and_settings():
    pre = ViTImageClassifierPreprocessor((4, 4))
    with pytest.raises(InputError, match=r"shape \(2, 4, 4, 1\); give \(height, width, 3\)"):
        pre(np.zeros((2, 4, 4, 1)))
    with pytest.raises(InputError, match="interpolation is 'magic'; choose one of nearest"):
        ViTImageClassifierPreprocessor(interpolation="magic")
