"""keras-cv's layers beside each backend: images, labels, boxes, and what they cannot do."""

from importlib import import_module

import keras
import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.data import ArraySource, ImageLoader, as_dataset
from kmodels.interop.keras_cv import Augmentation
from kmodels.models import ViTBackbone, ViTImageClassifier
from refusals import refused
from tolerances import tolerance

pytestmark = pytest.mark.needs("keras_cv")
ONE, ALL = pytest.mark.across("torch"), pytest.mark.across("torch", "jax", "tensorflow")
RANGE = {"value_range": (0, 255)}
BOXES = {"bounding_box_format": "xyxy"}
JITTER = {"brightness_factor": 0.2, "contrast_factor": 0.2, "saturation_factor": 0.2}
JITTER["hue_factor"] = 0.1
CROP = {"crop_area_factor": (0.5, 1.0), "aspect_ratio_factor": (0.9, 1.1)}
# Every augmentation of keras-cv 0.9, and whether it handles boxes.
LAYERS = {
    "AugMix": (RANGE, False),
    "AutoContrast": (RANGE, True),
    "ChannelShuffle": ({}, True),
    "CutMix": ({}, False),
    "Equalization": (RANGE, True),
    "FourierMix": ({}, False),
    "Grayscale": ({"output_channels": 3}, True),
    "GridMask": ({}, True),
    "JitteredResize": ({"target_size": (24, 24), "scale_factor": (0.8, 1.2), **BOXES}, True),
    "MixUp": ({}, True),
    "Mosaic": (BOXES, True),
    "Posterization": ({"bits": 4, **RANGE}, True),
    "RandAugment": (RANGE, False),
    "RandomAspectRatio": ({"factor": (0.9, 1.1), **BOXES}, True),
    "RandomBrightness": ({"factor": 0.2, **RANGE}, True),
    "RandomChannelShift": ({"factor": 0.3, **RANGE}, True),
    "RandomColorDegeneration": ({"factor": 0.5}, True),
    "RandomColorJitter": ({**RANGE, **JITTER}, True),
    "RandomContrast": ({"factor": 0.3, **RANGE}, True),
    "RandomCrop": ({"height": 16, "width": 16, **BOXES}, True),
    "RandomCropAndResize": ({"target_size": (24, 24), **CROP, **BOXES}, True),
    "RandomCutout": ({"height_factor": 0.3, "width_factor": 0.3}, True),
    "RandomFlip": (BOXES, True),
    "RandomGaussianBlur": ({"kernel_size": 3, "factor": 0.5}, True),
    "RandomHue": ({"factor": 0.2, **RANGE}, True),
    "RandomJpegQuality": ({"factor": (50, 90)}, True),
    "RandomRotation": ({"factor": 0.1, **BOXES}, True),
    "RandomSaturation": ({"factor": (0.3, 0.7)}, True),
    "RandomSharpness": ({"factor": 0.5, **RANGE}, True),
    "RandomShear": ({"x_factor": 0.2, "y_factor": 0.2, **BOXES}, True),
    "RandomTranslation": ({"height_factor": 0.1, "width_factor": 0.1, **BOXES}, True),
    "RandomZoom": ({"height_factor": 0.1}, False),
    "Solarization": (RANGE, True),
}


# One for images alone, and one that mixes them with labels and boxes; the computation is
# TensorFlow's whatever the backend is.
KINDS = ("RandomFlip", "MixUp")


@pytest.fixture(scope="module")
def layers():
    return import_module("keras_cv").layers


def batch(labels="float32"):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (4, 24, 24, 3)).astype("float32")
    boxes = np.array([[[2, 3, 12, 14], [5, 5, 20, 20]]] * 4, "float32")
    classes = np.array([[1, 2]] * 4, "float32")
    boxes[1, 1], classes[1, 1] = -1, -1  # one image has one box alone
    one_hot = np.eye(4, dtype="float32")
    found = one_hot if labels == "float32" else np.arange(4, dtype=labels)
    return pictures, found, {"boxes": boxes, "classes": classes}


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=ALL if name in KINDS else ONE) for name in LAYERS]
)
def test_every_layer_on_pictures_labels_and_boxes(name, layers):
    settings, has_boxes = LAYERS[name]
    step = Augmentation(getattr(layers, name)(**settings), seed=1)
    pictures, labels, boxes = batch()
    both = {"labels": labels, "bounding_boxes": boxes}
    results = []
    # TensorFlow traces a layer for each form of its input, which takes all of the time.
    if not has_boxes or name in KINDS:
        results.append(step(pictures, labels))
    if has_boxes:
        found, y = step(pictures, both)
        assert y.keys() == both.keys()
        count = y["bounding_boxes"]["boxes"].shape[1]
        assert y["bounding_boxes"]["boxes"].shape == (4, count, 4) and count >= 2
        assert y["bounding_boxes"]["classes"].shape == (4, count)
        results.append((found, y["labels"]))
    else:
        refused("cannot augment images and labels and bounding_boxes", step, pictures, both)
    for found, mixed in results:
        assert isinstance(found, np.ndarray) and found.dtype == np.float32
        assert found.shape[0] == 4 and found.shape[-1] == 3 and np.isfinite(found).all()
        assert np.allclose(mixed.sum(-1), 1.0, atol=1e-5)


@ALL
def test_a_flip_is_numpys_and_moves_the_boxes(layers):
    pictures, _, boxes = batch()
    step = Augmentation(layers.RandomFlip("horizontal", rate=1.0, **BOXES))
    found, given, weight = step(pictures, boxes, np.ones(4, "float32"))
    assert np.array_equal(found, pictures[:, :, ::-1])
    difference = given["boxes"][0] - np.array([[12, 3, 22, 14], [4, 5, 19, 20]])
    assert np.abs(difference).max() <= tolerance("pictures")
    assert np.array_equal(given["boxes"][1, 1], [-1] * 4) and given["classes"][1, 1] == -1
    assert np.array_equal(weight, np.ones(4))


@ONE
def test_the_same_seed_gives_the_same_run(layers):
    pictures, labels, _ = batch()

    def run(seed):
        chosen = (layers.RandomFlip(), layers.RandomHue(0.5, (0, 255)), layers.MixUp())
        step = Augmentation(*chosen, seed=seed)
        return [step(pictures, labels)[0] for _ in range(2)]

    first, again, other = run(5), run(5), run(6)
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], first[1]) and not np.array_equal(first, other)


@ONE
def test_labels_keep_their_dtype_unless_they_would_be_mixed(layers):
    pictures, labels, _ = batch("int32")
    _, same = Augmentation(layers.RandomFlip())(pictures, labels)
    assert same.dtype == np.int32 and np.array_equal(same, labels)
    refused(r"one-hot|MixUp", Augmentation(layers.MixUp()), pictures, labels)


@ALL
def test_fit_with_a_loader_and_with_arrays(layers):
    pictures, labels, _ = batch("int32")
    sizes = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
    model = ViTImageClassifier(ViTBackbone(image_shape=(24, 24, 3), **sizes), 4)
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(True))
    seen = []
    watch = Augmentation(layers.RandomFlip("horizontal", rate=1.0))

    def step(*parts):
        seen.append(parts[0])
        return watch(*parts)

    model.fit(as_dataset(pictures / 255, labels, batch_size=2, preprocess=step), verbose=0)
    assert len(seen) >= 2  # Keras looks at one before it begins
    loader = ImageLoader(ArraySource(pictures.astype("uint8"), labels), 2, std=1 / 255)
    flipped = watch.over(loader)
    assert np.array_equal(flipped[1][0], loader[1][0][:, :, ::-1]) and len(flipped) == 2
    history = model.fit(flipped, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all() and loader.epoch >= 1


@ALL
def test_a_compiled_step_is_refused_in_one_line(layers):
    step = Augmentation(layers.RandomFlip())
    refused("cannot be part of a compiled step or of a model", step, keras.Input((24, 24, 3)))
    if keras.backend.backend() == "torch":
        return  # compiles nothing here

    def traced(x):
        step(x)
        return x

    with pytest.raises(InputError, match="cannot be part of a compiled step or of a model"):
        if keras.backend.backend() == "jax":
            import_module("jax").jit(traced)(np.zeros((1, 24, 24, 3), "float32"))
        else:
            compile_ = import_module("tensorflow").function
            compile_(traced, autograph=False)(np.zeros((1, 24, 24, 3), "float32"))


@ONE
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["RandomFlip"], "takes instances of layers"),
        ([], "got no layers"),
        ([keras.layers.Identity()], "labels with names; keras-cv supports labels"),
    ],
)
def test_what_is_no_layer_is_refused(layers, message):
    images, labels = np.zeros((1, 4, 4, 3)), {"names": np.zeros(1)}
    refused(message, lambda: Augmentation(*layers)(images, labels))
