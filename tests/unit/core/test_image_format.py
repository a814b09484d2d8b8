"""Keras' `image_data_format`: "channels_first" is refused wherever images come in."""

import keras
import numpy as np
import pytest

from kmodels import data, models
from kmodels.core.errors import InputError

PICTURES = np.random.default_rng(0).random((2, 16, 16, 3)).astype("float32")
REFUSED = pytest.raises(InputError, match=r"^Keras' image_data_format is 'channels_first'; images")


@pytest.fixture
def channels_first():
    keras.config.set_image_data_format("channels_first")
    yield
    keras.config.set_image_data_format("channels_last")


@pytest.fixture(scope="module")
def model():
    return models.ViTImageClassifier.from_preset("vit_debug", num_classes=3)


@pytest.mark.parametrize(
    "take",
    [
        lambda: models.ViTBackbone(**models.ViTBackbone.presets["vit_debug"]),
        lambda: models.ViTImageClassifier.from_preset("vit_debug", num_classes=3),
        lambda: models.ViTImageClassifierPreprocessor((8, 8))(PICTURES),
        # Without a word it would resize rows and channels.
        lambda: models.ViTImageConverter((8, 8))(PICTURES.transpose(0, 3, 1, 2)),
        lambda: models.ViTImageConverter((8, 8)).compute_output_spec(
            keras.KerasTensor((2, 9, 9, 3))
        ),
        lambda: data.ImageLoader(data.ArraySource(255 * PICTURES, np.arange(2)), 2),
    ],
)
def test_it_is_refused(channels_first, take):
    with REFUSED:
        take()


def test_a_model_goes_on_and_a_file_holds_no_format(model, tmp_path, request):
    """What was made before keeps the order that it has; its file is read under that order alone."""
    expected = model.predict(PICTURES, verbose=0)
    request.getfixturevalue("channels_first")
    np.testing.assert_array_equal(model.predict(PICTURES, verbose=0), expected)
    with pytest.raises(ValueError, match=r"expected shape=\(None, 16, 16, 3\), found"):
        model(PICTURES.transpose(0, 3, 1, 2))
    model.save(tmp_path / "model.keras")
    with REFUSED:
        keras.saving.load_model(tmp_path / "model.keras")
    keras.config.set_image_data_format("channels_last")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(PICTURES, verbose=0), expected)
