"""Pictures to normalised floats."""

from dataclasses import replace

import numpy as np
import pytest

from kmodels.data import ArraySource, ImageLoader
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


class Listed(ArraySource):
    """Pictures of different sizes."""

    def __init__(self, pictures):
        super().__init__(np.zeros((len(pictures), 1, 1, 3), "uint8"), np.arange(len(pictures)))
        self.pictures = pictures

    def batch(self, indices):
        return [self.pictures[i] for i in indices], self.labels[indices]


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize(
    ("interpolation", "antialias"),
    [("nearest", True), ("bilinear", True), ("bilinear", False), ("bicubic", True)],
)
def test_a_loader_resizes_as_the_preprocessor_does(interpolation, antialias, crop):
    rng = np.random.default_rng(0)
    # Far from black and white, where whole numbers are cut off between the passes.
    sizes = ((40, 31), (9, 50), (16, 12))
    pictures = [rng.integers(64, 192, (*size, 3), "uint8") for size in sizes]
    preprocessor = ViTImageClassifierPreprocessor(
        (16, 12), interpolation=interpolation, antialias=antialias, crop_to_aspect_ratio=crop
    )
    loader = ImageLoader(
        Listed(pictures),
        3,
        image_size=preprocessor.image_size,
        resizing=preprocessor.resizing,
        mean=preprocessor.mean,
        std=preprocessor.std,
    )
    expected = preprocessor(pictures)
    # The loader keeps pixels: whole numbers after each of Pillow's two passes.
    np.testing.assert_allclose(loader[0][0], expected, rtol=0, atol=2 / 255 / 0.5)
    other = replace(preprocessor, interpolation="lanczos", antialias=True)(pictures)
    assert np.abs(other[:2] - expected[:2]).max() > 4 / 255 / 0.5
