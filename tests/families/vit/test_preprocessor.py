"""Images to normalised floats."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.data import ArraySource, ImageLoader
from kmodels.models import (
    CLIPTokenizer,
    ImageTextPreprocessor,
    NaFlexViTImageClassifierPreprocessor,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageConverter,
    ViTImageSegmenterPreprocessor,
    ViTObjectDetectorPreprocessor,
)
from kmodels.text import byte_level
from refusals import refused
from tolerances import tolerance


def test_pixels_are_scaled_and_normalised_and_labels_pass_through():
    pre = ViTImageClassifierPreprocessor((4, 4), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    x = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype="uint8")
    y = pre(x)
    assert y.dtype == np.float32
    expected = (x / 255.0 - [0.1, 0.2, 0.3]) / [0.5, 0.25, 1.0]
    np.testing.assert_allclose(y, expected, atol=1e-6)
    np.testing.assert_allclose(pre(x.astype("float32")), y)
    assert pre(x[0]).shape == (4, 4, 3) and pre(x[:1]).shape == (1, 4, 4, 3)
    assert pre(x[0], [1])[1] == [1] and pre(x[0], [1], [0.5])[2] == [0.5]


def test_resizing_takes_pictures_of_any_size_and_antialiases():
    pre = ViTImageClassifierPreprocessor((2, 3), mean=(0.0,), std=(1.0,))
    flat = np.full((8, 9, 1), 51, "uint8")
    checker = np.indices((8, 9)).sum(0)[..., None] % 2 * 255
    y = pre([flat, checker.astype("uint8")])
    assert y.shape == (2, 2, 3, 1)
    np.testing.assert_allclose(y[0], 0.2, atol=1e-6)
    assert np.abs(y[1] - 0.5).max() < 0.1
    assert pre(np.zeros((0, 8, 9, 1), "uint8")).shape == (0, 2, 3, 1)


class Darkened(ViTImageClassifierPreprocessor):
    """A user's, with an argument that `to_dict` lacks."""

    def __init__(self, *args, by=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.by = by

    def call(self, x, y=None, sample_weight=None):
        return super().call(x, y, sample_weight) - self.by


def of_texts(**settings):
    tokenizer = CLIPTokenizer(byte_level.build({"a": 0, "<|endoftext|>": 1}, []), name="words")
    return ImageTextPreprocessor(tokenizer, **{"image_size": (4, 4), **settings})


@pytest.mark.parametrize(
    ("kind", "name", "value", "wrong"),
    [
        (ViTImageClassifierPreprocessor, "image_size", (3, 5), 4),
        (ViTImageClassifierPreprocessor, "mean", (0.1, 0.2, 0.3), 0.5),
        (ViTImageClassifierPreprocessor, "std", (0.1, 0.2, 0.3), (0, 0, 0)),
        (ViTImageClassifierPreprocessor, "interpolation", "nearest", "magic"),
        (ViTImageClassifierPreprocessor, "antialias", False, "no"),
        (ViTImageClassifierPreprocessor, "crop_to_aspect_ratio", True, 2),
        (ViTImageClassifierPreprocessor, "resize_size", 5, 0),
        (Darkened, "image_size", (3, 5), "big"),
        (Darkened, "by", 2.0, None),
        (ViTImageConverter, "image_size", (3, 5), (0, 5)),
        (ViTImageConverter, "scale", 0.5, "half"),
        (ViTImageConverter, "offset", [1.0, 2.0, 3.0], "none"),
        (ViTImageConverter, "crop_to_aspect_ratio", False, "no"),
        (ViTImageConverter, "interpolation", "nearest", "magic"),
        (ViTImageConverter, "antialias", True, "yes"),
        (ViTImageConverter, "pad_to_aspect_ratio", False, True),
        (ViTImageConverter, "data_format", "channels_last", "channels_first"),
        (ViTImageSegmenterPreprocessor, "aspect_ratio", "pad", "padded"),
        (NaFlexViTImageClassifierPreprocessor, "max_num_patches", 4, 0),
        (NaFlexViTImageClassifierPreprocessor, "enlarge", True, "yes"),
        (of_texts, "image_size", (3, 5), 4),
        (of_texts, "mean", (0.1, 0.2, 0.3), 0.5),
    ],
)
def test_an_argument_that_is_set_later_is_checked_and_followed(kind, name, value, wrong):
    settings = {"patch_size": 2} if kind is NaFlexViTImageClassifierPreprocessor else {}
    settings = settings or {"image_size": (4, 4)}
    if kind is Darkened:
        settings["by"] = 1.0
    changed, expected = kind(**settings), kind(**{**settings, name: value})
    image = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype="uint8")
    x = {"images": [image], "captions": ["a"]} if kind is of_texts else [image]
    if wrong is not None:
        before = changed(x)
        with pytest.raises(InputError):
            setattr(changed, name, wrong)
        keras.tree.map_structure(np.testing.assert_array_equal, changed(x), before)
    setattr(changed, name, value)
    keras.tree.map_structure(np.testing.assert_array_equal, changed(x), expected(x))
    assert changed.to_dict() == expected.to_dict()


def test_what_is_set_on_the_image_converter_changes_the_preprocessor():
    pre = ViTImageClassifierPreprocessor((4, 4))
    pre.image_converter.image_size = (2, 3)
    pre.image_converter.offset = [-1.0, 0.0, 1.0]
    part = pre.image_converter
    part.crop_to_aspect_ratio = True
    x = np.random.default_rng(0).integers(0, 256, (2, 6, 9, 3), dtype="uint8")
    assert pre.image_size == (2, 3) and pre.crop_to_aspect_ratio
    assert pre.mean == (0.5, 0.0, -0.5)
    again = ViTImageClassifierPreprocessor(image_converter=part)
    np.testing.assert_array_equal(pre(x), again(x))
    pre.image_converter = ViTImageConverter((5, 5), crop_to_aspect_ratio=False)
    assert pre.image_size == (5, 5) and not pre.crop_to_aspect_ratio
    masks = ViTImageSegmenterPreprocessor((4, 4))
    with pytest.raises(InputError, match="has settings that crop images"):
        masks.image_converter.crop_to_aspect_ratio = True
    assert not masks.crop_to_aspect_ratio


def converter(**settings):
    return ViTImageConverter((4, 4), 1 / 255, [0.1, 0.2, 0.3], **settings)


PRE, X = ViTImageClassifierPreprocessor, np.zeros((2, 6, 9, 3), "uint8")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PRE((4, 4))(X[..., :1]), r"shape \(2, 6, 9, 1\); give \(height, width, 3\)"),
        (lambda: PRE(interpolation="magic"), "interpolation is 'magic'; choose one of nearest"),
        (lambda: PRE((4, 4))(keras.Input((4, 4, 3))), "works on data, not inside a model"),
        (lambda: PRE(224), "image_size is 224; give \\(height, width\\), each at least 1"),
        (lambda: PRE((24.5, 24)), "image_size is \\(24.5, 24\\)"),
        (lambda: PRE(mean=0.5), "mean is 0.5; give a sequence of finite numbers"),
        (
            lambda: PRE(image_converter=ViTImageConverter(scale=0)),
            "scale of the image converter is 0",
        ),
        (lambda: PRE(std=(1, np.nan, 1)), "std is \\(1, nan, 1\\); give a sequence"),
        (lambda: PRE(dtype="bfloat16"), "preprocessors give float32, and the model casts it"),
        (
            lambda: converter(pad_to_aspect_ratio=True),
            "no preprocessor here has pad_to_aspect_ratio",
        ),
        (lambda: converter(data_format="channels_first"), "data_format is 'channels_first'"),
        (lambda: converter(interpolation="area"), "interpolation='area'"),
        (lambda: converter()(X[..., :1]), "offset has 3 values and the images 1 channels"),
        (
            lambda: PRE(image_converter=ViTImageConverter((4, 4), offset=[0.1, 0.2])),
            "scale or offset has 2 values for 3 channels",
        ),
        (lambda: converter()(X[0, :, :, 0]), r"an image has shape \(6, 9\)"),
    ],
)
def test_what_cannot_be_is_said(call, message):
    refused(message, call)


class Listed(ArraySource):
    """Images of different sizes."""

    def __init__(self, pictures):
        super().__init__(np.zeros((len(pictures), 1, 1, 3), "uint8"), np.arange(len(pictures)))
        self.pictures = pictures

    def batch(self, indices):
        return [self.pictures[i] for i in indices], self.labels[indices]


@pytest.mark.parametrize("cls", [ViTImageSegmenterPreprocessor, ViTObjectDetectorPreprocessor])
def test_images_with_labels_of_all_parts_are_not_cropped(cls):
    for settings in (
        {"crop_to_aspect_ratio": True},
        {"resize_size": 10},
        {"image_converter": ViTImageConverter((4, 6))},
    ):
        refused(f"{cls.__name__} has settings that crop images", cls, **settings)
    stretching = ViTImageConverter((5, 6), crop_to_aspect_ratio=False)
    assert cls(image_converter=stretching).image_size == (5, 6)


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
    changed = {**preprocessor.to_dict(), "interpolation": "lanczos", "antialias": True}
    other = ViTImageClassifierPreprocessor(**changed)(pictures)
    assert np.abs(other[:2] - expected[:2]).max() > 4 / 255 / 0.5


def test_a_preprocessor_is_a_keras_layer_that_its_config_makes_again(tmp_path):
    preprocessor = ViTImageClassifierPreprocessor((4, 6), (0.1,) * 3, (0.2,) * 3, "bicubic")
    x = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3), "uint8")
    preprocessor.save_to_preset(tmp_path / "own")
    serialized = keras.saving.serialize_keras_object(preprocessor)
    for again in (
        ViTImageClassifierPreprocessor.from_config(preprocessor.get_config()),
        keras.saving.deserialize_keras_object(json.loads(json.dumps(serialized))),
        ViTImageClassifierPreprocessor.from_preset(tmp_path / "own"),
        copy.deepcopy(preprocessor),
        pickle.loads(pickle.dumps(preprocessor)),
    ):
        assert isinstance(again, keras.layers.Layer)
        np.testing.assert_array_equal(again(x), preprocessor(x))
    changed = ViTImageClassifierPreprocessor.from_preset(tmp_path / "own", image_size=(3, 3))
    assert changed(x).shape == (2, 3, 3, 3)


def test_a_preprocessor_comes_from_a_model_or_a_name(tmp_path):
    own = ViTImageClassifierPreprocessor((16, 16), (0.1,) * 3, (0.2,) * 3)
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=2, preprocessor=own)
    model.save_to_preset(tmp_path / "model")
    found = ViTImageClassifierPreprocessor.from_preset(tmp_path / "model")
    assert found.to_dict() == own.to_dict()
    named = ViTImageClassifierPreprocessor.from_preset("vit_debug", mean=(0.0,) * 3)
    assert named.image_size == (16, 16) and named.mean == (0.0,) * 3
    with pytest.raises(InputError, match="holds a model, whose preprocessor is saved with it"):
        own.save_to_preset(tmp_path / "model")
    own.save_to_preset(tmp_path / "own")
    with pytest.raises(InputError, match="a ViTImageClassifierPreprocessor, not a ViTImageConv"):
        ViTImageConverter.from_preset(tmp_path / "own")
    (tmp_path / "own" / "preprocessor.json").write_text("[")
    refused("is not readable JSON", ViTImageClassifierPreprocessor.from_preset, tmp_path / "own")


def test_a_preprocessor_is_an_object_that_can_be_called():
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=2)
    for wrong, shown in (("vit", "'vit'"), (ViTImageClassifierPreprocessor, "ViTImageClassifierP")):
        with pytest.raises(InputError, match=f"preprocessor is {shown}.*; give one such as ViT"):
            model.preprocessor = wrong
    model.preprocessor = lambda x, y=None, sample_weight=None: x


def test_an_image_converter_has_the_arguments_of_keras_hub():
    x = np.random.default_rng(0).integers(0, 256, (2, 6, 9, 3), "uint8")
    stretching = converter(crop_to_aspect_ratio=False)
    cut = ViTImageConverter((4, 4), antialias=True)
    own = ViTImageClassifierPreprocessor(image_converter=stretching)
    np.testing.assert_allclose(own(x), stretching(x), atol=tolerance("pictures"))
    np.testing.assert_allclose(own.image_converter(x), stretching(x), atol=tolerance("pictures"))
    np.testing.assert_array_equal(cut(x), cut(x[:, :, 1:7]))
    assert cut.image_size == (4, 4) and ViTImageConverter()(x[0]).shape == (6, 9, 3)


@pytest.mark.needs("tensorflow")
@pytest.mark.each_backend
def test_tf_data_maps_a_preprocessor():
    import tensorflow as tf

    x = np.random.default_rng(0).integers(0, 256, (3, 9, 7, 3), "uint8")
    preprocessor = ViTImageClassifierPreprocessor((4, 6))
    data = tf.data.Dataset.from_tensor_slices((x, np.arange(3)))
    images, labels = data.map(preprocessor).batch(3).get_single_element()
    assert images.shape == (3, 4, 6, 3)
    np.testing.assert_array_equal(images, preprocessor(x))
    np.testing.assert_array_equal(labels, np.arange(3))
    masks = tf.data.Dataset.from_tensor_slices((x, x[..., 0]))
    _, masks = masks.map(ViTImageSegmenterPreprocessor((9, 7))).batch(3).get_single_element()
    np.testing.assert_array_equal(masks, x[..., 0])
    assert masks.dtype == "int32"
    alone = data.map(lambda x, y: x).batch(2).map(preprocessor)
    assert alone.element_spec.shape.as_list() == [None, 4, 6, 3]
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[[1.0], [2.0, 3.0]]]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"InputError: an image has shape \(1,\)"
    ):
        next(iter(ragged.map(preprocessor)))
    sparse = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(3)))
    refused("got a SparseTensor of unknown shape", sparse.map, preprocessor)


def test_a_file_is_read_without_walking_in_circles(monkeypatch, tmp_path):
    """Keras follows attributes, and `image_converter` knows its preprocessor."""
    size = (16, 16)
    model = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=2, preprocessor=ViTImageClassifierPreprocessor(size)
    )
    model.save(tmp_path / "it.keras")
    cls, made = ViTImageClassifierPreprocessor, []
    converter = cls.image_converter.fget
    monkeypatch.setattr(
        cls, "image_converter", property(lambda self: made.append(self) or converter(self))
    )
    keras.models.load_model(tmp_path / "it.keras")
    assert len(made) < 4
