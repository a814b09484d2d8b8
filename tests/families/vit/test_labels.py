"""What the outputs of a classifier mean: kinds of labels, names of classes, files of images."""

import functools
import io
import json
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import kmodels
from arrays import to_numpy
from kmodels.models import (
    EoMTImageSegmenter,
    NaFlexViTBackbone,
    NaFlexViTImageClassifier,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageSegmenter,
    ViTObjectDetector,
    ViTObjectDetectorPreprocessor,
)
from kmodels.training import PixelCrossentropy
from pool import pool
from refusals import refused
from tolerances import tolerance

NAMES = ["cat", "dog", "ox"]
REGRESSION, MULTI_LABEL = "regression", "multi_label_classification"
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 16, 16, 3)).astype("float32")
PIXELS = (32 * IMAGES + 128).clip(0, 255).astype("uint8")
BITS = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
NUMBERS = RNG.normal(size=(4, 3)).astype("float32")


def squared(logits, y):
    return np.mean((logits - y.reshape(logits.shape)) ** 2)


def binary(logits, y):
    y = y.reshape(logits.shape)
    return np.mean(np.logaddexp(0, logits) - logits * y)


def cross_entropy(logits, y):
    shifted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.mean(shifted[np.arange(len(y)), y])


# Settings of the model, labels, and the loss by its formula in transformers.
LOSSES = {
    "numbers": ({"num_classes": 3, "problem_type": REGRESSION}, NUMBERS, squared),
    "one number": ({"num_classes": 1, "problem_type": REGRESSION}, NUMBERS[:, 0], squared),
    "several classes": ({"num_classes": 3, "problem_type": MULTI_LABEL}, BITS, binary),
    "yes or no": ({"num_classes": 1, "problem_type": MULTI_LABEL}, BITS[:, 0], binary),
    "one class": ({"num_classes": 3, "problem_type": None}, BITS[:, 0], cross_entropy),
}


@pytest.mark.each_time("numbers", "several classes", on=("jax", "tensorflow"))
@pytest.mark.each_backend
@pytest.mark.parametrize("name", LOSSES)
def test_the_default_loss_follows_the_kind_of_problem(name):
    settings, y, loss = LOSSES[name]
    with pool("vit_debug", preprocessor=None, num_layers=1, **settings) as model:
        logits = to_numpy(model(IMAGES)).astype("float64")
        found = model.fit(IMAGES, y, epochs=3, verbose=0).history
        np.testing.assert_allclose(found["loss"][0], loss(logits, y), rtol=tolerance("first_loss"))
        assert len(found) == 2, "one metric beside the loss"
        assert found["loss"][-1] < found["loss"][0]


def classifier(num_classes=3, **settings):
    return ViTImageClassifier.from_preset("vit_debug", num_classes=num_classes, **settings)


FIT = {"num_classes": 3, "x": IMAGES, "verbose": 0}
REFUSED = {
    "one class": (r"num_classes is 1.*problem_type='regression'", {"num_classes": 1}, BITS[:, 0]),
    "bits for classes": (r"labels have shape \(4, 3\).*multi_label", {}, BITS),
    "classes for bits": (r"labels have shape \(4,\)", {"problem_type": MULTI_LABEL}, BITS[:, 0]),
    "too few bits": (r"labels have shape \(4, 2\)", {"problem_type": MULTI_LABEL}, BITS[:, :2]),
    "a bit of two": ("a label is 2; give 0 to 1", {"problem_type": MULTI_LABEL}, 2 * BITS),
    "no number of a bit": (
        "a label is nan; give 0 to 1", {"problem_type": MULTI_LABEL}, BITS + np.nan),
    "a part of a class": ("a label is 1.5; give 0 to 2", {}, np.array([0, 1.5, 2, 0])),
    "no class at all": ("a label is nan; give 0 to 2", {}, np.array([0, 1, 2, np.nan])),
    "names": ("y has the dtype <U3; give numbers", {}, np.array(["cat", "dog", "dog", "cat"])),
    "too few numbers": (
        r"labels have shape \(4, 2\).*gives 3 numbers", {"problem_type": REGRESSION}, BITS[:, :2]),
    "no number": ("a label is inf; give finite", {"problem_type": REGRESSION}, NUMBERS + np.inf),
    "regression of shares": (
        "no activation", {"problem_type": REGRESSION, "activation": "softmax"}, NUMBERS),
    "one of several": (
        "independent", {"problem_type": MULTI_LABEL, "activation": "softmax"}, BITS),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_labels_that_do_not_fit_are_one_line(name):
    message, settings, y = REFUSED[name]
    model = classifier(**settings)
    refused(message, model.fit, IMAGES, y, verbose=0)


# === Labels of pixels and objects ===

SMALL = {"preprocessor": None, "num_layers": 1}
QUERIES = {"num_queries": 4, "num_blocks": 1, "num_upscale_blocks": 0, "train_num_points": 8}
BOXES = {"num_queries": 4, "num_decoder_layers": 1, "decoder_dim": 16, "num_decoder_heads": 2}
TASKS = {
    "pixels": (ViTImageSegmenter, {}),
    "masks": (EoMTImageSegmenter, QUERIES),
    "boxes": (ViTObjectDetector, BOXES),
}


def task(name, **settings):
    cls, own = TASKS[name]
    model = cls.from_preset("vit_debug", num_classes=3, **{**SMALL, **own, **settings})
    model.compile(**({} if name == "boxes" else {"metrics": None}))
    return model


# A model that refuses stays as it was, so one of each kind refuses everything.
one = functools.cache(task)


def pixels(*labels):
    """Masks of labels, of which the first pixels have these."""
    masks = np.zeros((4, 16, 16), "int32")
    masks.flat[: len(labels)] = labels
    return masks


def objects(name, classes, box=(0.5, 0.5, 0.2, 0.4)):
    """Objects of these classes in each image, as boxes or as masks."""
    kinds = np.tile(np.array(classes, "int32"), (4, 1))
    if name == "boxes":
        boxes = np.tile(np.array(box, "float32"), (*kinds.shape, 1))
        return {"boxes": boxes, "class_labels": kinds}
    masks = np.ones((*kinds.shape, 16, 16), "uint8")
    return {"mask_labels": masks, "class_labels": kinds}


def other(y, **changes):
    return {**y, **changes}


HALVES = np.full((4, 1), 0.5)
OUTSIDE = {
    "half a class": ("pixels", pixels() + 0.5, "a label is 0.5; give 0 to 2, or 255 for one that"),
    "NaN for a class": ("pixels", pixels() * np.nan, "a label is nan; give 0 to 2"),
    "masks of another size": (
        "pixels",
        pixels()[:, ::2],
        r"masks have shape \(4, 8, 16\) and predictions \(None, 16, 16, 3\)",
    ),
    "one-hot masks": ("pixels", np.eye(3)[pixels()], r"masks have shape \(4, 16, 16, 3\)"),
    "a class an image": ("masks", pixels()[:, 0, 0], r"masks have shape \(4,\)"),
    "segments of pixels": ("pixels", objects("masks", [0]), "labels have the keys mask_labels, cl"),
    "masks of bytes": (
        "masks",
        other(objects("masks", [0]), mask_labels=np.full((4, 1, 16, 16), 255)),
        "mask_labels have values from 255 to 255; give 0 and 1",
    ),
    "masks of a size": (
        "masks",
        other(objects("masks", [0]), mask_labels=np.ones((4, 1, 8, 8))),
        r"mask_labels have shape \(4, 1, 8, 8\); give \(B, T, 16, 16\)",
    ),
    "half a class of boxes": (
        "boxes",
        other(objects("boxes", [1]), class_labels=HALVES),
        "a label is 0.5; give 0 to 2, or -1 for",
    ),
    "a box of a negative size": ("boxes", objects("boxes", [1], (0.5, 0.5, -0.1, 0.1)), "a box is"),
    "fewer classes than boxes": (
        "boxes",
        other(objects("boxes", [1, 1]), class_labels=np.ones((4, 1))),
        r"boxes have shape \(4, 2, 4\) and class_labels \(4, 1\); give \(B, T, 4\) and \(B, T\)",
    ),
    "no labels of boxes": ("boxes", None, "labels are NoneType; give a dictionary of boxes"),
    "no labels of masks": ("masks", None, r"there are no labels; give \(B, H, W\)"),
    "no labels of pixels": ("pixels", None, "the loss needs labels, and there are none; give y"),
    "a class beyond": ("pixels", pixels(9), "a label is 9; give 0 to 2, or 255 for one that"),
    "a negative class": ("pixels", pixels(1, -3), "a label is -3; give 0 to 2, or 255 for one"),
    "a map of targets": (
        "masks",
        pixels(255, -1, 3),
        "a label is 3; give 0 to 2, or 255 or -1 for",
    ),
    "classes of masks": ("masks", objects("masks", [0, 3]), "a label is 3; give 0 to 2, or -1 for"),
    "no masks": (
        "masks",
        objects("masks", []),
        r"class_labels has shape \(4, 0\); give at least one",
    ),
    "classes of boxes": ("boxes", objects("boxes", [-2]), "a label is -2; give 0 to 2, or -1 for"),
    "boxes in pixels": ("boxes", objects("boxes", [1], (8, 8, 4, 4)), r"a box is \[8.0, 8.0, 4.0"),
    "boxes of NaN": ("boxes", objects("boxes", [1], (np.nan,) * 4), r"a box is \[nan, nan, nan"),
}


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
@pytest.mark.parametrize("case", OUTSIDE)
def test_classes_and_boxes_that_cannot_be_are_one_line(case, method):
    name, y, message = OUTSIDE[case]
    model = one(name)
    before = model.get_weights()
    refused(message, getattr(model, method), IMAGES, y)
    assert all(map(np.array_equal, before, model.get_weights()))


def test_pixels_without_a_class_are_those_that_the_loss_leaves_out():
    model = task("pixels", ignore_class=7)
    assert np.isfinite(model.evaluate(IMAGES, pixels(7, 1), verbose=0))
    refused("a label is 255; give 0 to 2, or 7 for", model.evaluate, IMAGES, pixels(255))
    model.compile(loss=PixelCrossentropy(None))
    refused("a label is 7; give 0 to 2$", model.evaluate, IMAGES, pixels(7))
    model.compile(loss="mse")  # of numbers of any kind
    assert np.isfinite(model.evaluate(IMAGES, np.full((4, 16, 16, 3), 9.0, "float32"), verbose=0))


def test_a_plain_model_has_the_labels_of_its_loss_checked():
    model = keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Dense(3)])
    model.compile(loss=PixelCrossentropy(255))
    assert np.isfinite(kmodels.evaluate(model, IMAGES, pixels(255, 2), verbose=0))
    for label in (3, -1):
        message = f"a label is {label}; give 0 to 2, or 255 for one that"
        refused(message, kmodels.fit, model, IMAGES, pixels(label), verbose=0)


@pytest.mark.nightly("jax")  # which compiles a step for each number
@pytest.mark.each_backend
@pytest.mark.parametrize("name", ["masks", "boxes"])
def test_batches_may_have_other_numbers_of_objects(name):
    model = task(name)
    # The last has more than there are queries.
    labels = [objects(name, classes) for classes in ([0], [0, -1], [0, 1, 2, 0, 1])]
    losses = [model.evaluate(IMAGES, y, verbose=0) for y in labels[:2]]
    with pytest.warns(UserWarning, match="more objects than the 4 queries of the model"):
        losses.append(model.evaluate(IMAGES, labels[2], verbose=0))
    assert np.isfinite(losses).all() and losses[2] != losses[0]
    if name == "boxes":  # the loss of masks is at points that are drawn for each
        np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance("first_loss"))


def test_a_detector_takes_the_labels_of_transformers_processors():
    given = [
        {"boxes": np.full((n, 4), 0.4), "class_labels": np.arange(n) % 3, "image_id": np.array([n])}
        for n in (0, 1, 2, 4)
    ]
    crowded = [{**one, "iscrowd": np.arange(len(one["boxes"])) % 2} for one in given]
    preprocessor = ViTObjectDetectorPreprocessor((16, 16))
    _, found = preprocessor(PIXELS, given)
    assert (found["class_labels"] >= 0).sum(1).tolist() == [0, 1, 2, 4]
    assert found["class_labels"][3].tolist() == [0, 1, 2, 0]
    _, found = preprocessor(PIXELS, crowded)
    single = [row[row >= 0].tolist() for row in found["class_labels"]]
    assert single == [[], [0], [0], [0, 2]]
    model = task("boxes", preprocessor=preprocessor)
    assert np.isfinite(model.fit(PIXELS, given, batch_size=2, verbose=0).history["loss"]).all()
    refused("labels are boxes, masks", preprocessor, PIXELS[:1], [{"boxes": [], "masks": []}])
    half = {"boxes": [[0.5] * 4], "class_labels": [0.5]}
    refused("image 0 has class 0.5; give whole numbers", preprocessor, PIXELS[:1], [half])


@pytest.mark.parametrize("name", ["masks", "boxes"])
def test_objects_of_images_are_a_list_or_lists_by_name(name):
    # All images with one object, too: a list is one of images, not of inputs.
    for numbers in ((0, 1, 2, 4), (1, 1, 1, 1)):
        each = [{key: x[0] for key, x in objects(name, np.arange(n) % 3).items()} for n in numbers]
        by_name = {key: [one[key] for one in each] for key in each[0]}
        model = task(name, preprocessor=TASKS[name][0].preprocessor_class((16, 16)))
        model.compile(**({} if name == "boxes" else {"metrics": None}))
        losses = [model.evaluate(PIXELS, y, batch_size=2, verbose=0) for y in (each, by_name)]
        assert losses[0] == losses[1] and np.isfinite(losses).all()


@pytest.mark.each_backend
def test_images_and_weights_that_cannot_be_are_one_line():
    model = task("pixels")
    # TensorFlow's steps have no shapes to check once they have had several.
    model.evaluate(IMAGES, pixels(), batch_size=3, verbose=0)
    refused(
        r"the inputs have shape \(4, 8, 16, 3\) and the model takes \(None, 16, 16, 3\)",
        model.evaluate,
        IMAGES[:, ::2],
        pixels(),
    )
    weights = {"class_weight": {0: 2.0}, "verbose": 0}
    refused("class_weight needs one label per sample", model.fit, IMAGES, pixels(), **weights)


# === Settings and names ===


def test_settings_that_do_not_fit_are_one_line():
    refused("problem_type is 'both'; choose", classifier, problem_type="both")
    refused("2 names and num_classes is 3", classifier, class_names=NAMES[:2])
    refused("class_names is 'cat'; give a sequence of texts", classifier, class_names="cat")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    refused("over one class is always 0", classifier(1).compile, loss=loss)


def test_names_of_classes_go_where_the_model_goes(tmp_path):
    model = classifier(class_names=NAMES, problem_type=MULTI_LABEL)
    model.preprocessor = ViTImageClassifierPreprocessor((16, 16))
    model.save_to_preset(tmp_path / "own")
    model.export_to_transformers(tmp_path / "transformers")
    model.export_to_timm(tmp_path / "timm")
    model.save(tmp_path / "model.keras")
    for folder in ("own", "transformers", "timm"):
        again = ViTImageClassifier.from_preset(tmp_path / folder)
        assert again.class_names == NAMES, folder
        assert again.problem_type == (None if folder == "timm" else MULTI_LABEL), folder
        other = ViTImageClassifier.from_preset(tmp_path / folder, num_classes=2)
        assert other.class_names is None, "a head with other classes"
    assert keras.models.load_model(tmp_path / "model.keras").class_names == NAMES
    described = json.loads((tmp_path / "transformers/config.json").read_text())
    assert described["id2label"] == dict(zip("012", NAMES, strict=True))
    assert described["label2id"] == dict(zip(NAMES, range(3), strict=True))
    assert described["problem_type"] == MULTI_LABEL
    assert json.loads((tmp_path / "timm/config.json").read_text())["label_names"] == NAMES
    assert model.with_head(3).class_names == NAMES and model.with_head(4).class_names is None


@pytest.mark.needs("transformers")
def test_transformers_reads_names_and_the_kind_of_problem(tmp_path):
    from transformers import AutoModelForImageClassification

    classifier(class_names=NAMES, problem_type=MULTI_LABEL).export_to_transformers(tmp_path)
    config = AutoModelForImageClassification.from_pretrained(tmp_path).config
    assert config.id2label == dict(enumerate(NAMES)) and config.problem_type == MULTI_LABEL


# What a config.json says of a head with three outputs, or with one, and what the model has then.
DESCRIBED = {
    "transformers' default names": (
        3, {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}}, None, None),
    "a regression": (1, {"problem_type": None, "id2label": {"0": "LABEL_0"}}, None, REGRESSION),
    "several classes": (3, {"problem_type": MULTI_LABEL}, None, MULTI_LABEL),
    "too few names": (3, {"id2label": {"0": "cat", "1": "dog"}}, None, None),
    "names that are none": (3, {"id2label": {"0": 1, "1": 2, "2": 3}}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_of_outputs_is_followed_or_left_out_with_a_warning(tmp_path, caplog, name):
    number, changes, names, problem = DESCRIBED[name]
    classifier(number, problem_type=REGRESSION).export_to_transformers(tmp_path)
    file = tmp_path / "config.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps({**described, "problem_type": None, **changes}))
    with caplog.at_level("WARNING", logger="kmodels"):
        model = ViTImageClassifier.from_preset(tmp_path, preprocessor=None)
    assert (model.class_names, model.problem_type) == (names, problem)
    left_out = name in ("too few names", "names that are none")
    assert ("the names of the classes" in caplog.text) == left_out


def test_an_unknown_kind_of_problem_is_one_line(tmp_path):
    classifier().export_to_transformers(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "problem_type": "ranking"}))
    refused("problem_type is 'ranking'", ViTImageClassifier.from_preset, tmp_path)


# === Files of images ===


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images of several sizes and modes, one of them turned by its EXIF orientation."""
    folder = tmp_path_factory.mktemp("images")
    made = []
    for i, (height, width) in enumerate([(40, 50), (16, 16), (30, 90)]):
        pixels = RNG.integers(0, 255, (height, width, 3), "uint8")
        made.append(folder / f"{i}.png")
        Image.fromarray(pixels).save(made[-1])
    turned = Image.Exif()
    turned[274] = 6
    made.append(folder / "turned.png")
    Image.fromarray(RNG.integers(0, 255, (20, 40, 3), "uint8")).save(made[-1], exif=turned)
    return made


def arrays_of(files):
    pixels = [np.asarray(Image.open(file)) for file in files]
    return [*pixels[:-1], np.rot90(pixels[-1], -1)]


FORMS = {
    "paths": lambda files: files,
    "texts": lambda files: [str(file) for file in files],
    "Pillow": lambda files: [Image.open(file) for file in files],
    "all of them": lambda files: [
        files[0], str(files[1]), Image.open(files[2]), arrays_of(files)[3]],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_predict_takes_files_and_images_of_pillow(files, form):
    with pool("vit_debug", num_classes=3) as model:
        model.preprocessor = ViTImageClassifierPreprocessor((16, 16))
        expected = model.predict(arrays_of(files), verbose=0)
        given = FORMS[form](files)
        np.testing.assert_array_equal(model.predict(given, verbose=0), expected)
        alone = model.predict(given[2], verbose=0)
        assert alone.shape == (1, 3)
        np.testing.assert_allclose(alone[0], expected[2], atol=tolerance("logits"), rtol=0)


@pytest.mark.parametrize("x", [["a.png"], np.array(["a.png"])])
def test_a_model_without_a_preprocessor_takes_no_files(x):
    with pool("vit_debug", num_classes=3) as model:
        message = "x has the dtype .*; give numbers, or the model a preprocessor"
        refused(message, model.predict, x, verbose=0)


def test_predict_names_a_file_that_is_no_image(tmp_path):
    file = tmp_path / "notes.png"
    file.write_text("no image")
    with pool("vit_debug", num_classes=3) as model:
        model.preprocessor = ViTImageClassifierPreprocessor((16, 16))
        refused("notes.png", model.predict, file, verbose=0)
        refused("absent.png", model.predict, str(tmp_path / "absent.png"), verbose=0)
        refused("an address of the web", model.predict, "http://a/b.png", verbose=0)


@pytest.mark.parametrize(
    ("cls", "settings"), [(ViTImageSegmenter, {}), (EoMTImageSegmenter, {"num_blocks": 1})]
)
def test_segmenters_have_names_and_take_files(tmp_path, files, cls, settings):
    model = cls.from_preset("vit_debug", num_classes=3, class_names=NAMES, **settings)
    model.save_to_preset(tmp_path / "it")
    model = cls.from_preset(tmp_path / "it")
    assert model.class_names == NAMES
    model.preprocessor = cls.preprocessor_class((16, 16))
    expected = model.segment(arrays_of(files))
    for form in ("texts", "Pillow"):
        for mask, wanted in zip(model.segment(FORMS[form](files)), expected, strict=True):
            np.testing.assert_array_equal(mask, wanted)
    np.testing.assert_array_equal(model.segment(files[0]), expected[0])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ({"image": IMAGES}, r"images are a dict; give \(B, H, W, C\)"),
        (io.BytesIO(), "images are a BytesIO"),
        (np.zeros((2, 0, 16, 3), "uint8"), r"an image has shape \(0, 16\)"),
        ([np.zeros(3)], r"an image has shape \(3,\); give \(height, width, C\)"),
    ],
)
@pytest.mark.parametrize("name", ["pixels", "boxes"])
def test_what_is_no_image_is_one_line(images, message, name):
    model = task(name)
    refused(message, model.detect if name == "boxes" else model.segment, images)


def test_naflex_takes_files(files):
    sizes = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    backbone = NaFlexViTBackbone(**{"image_shape": (16, 16, 3), **sizes})
    model = NaFlexViTImageClassifier(backbone, 3, class_names=NAMES)
    model.preprocessor = type(model).preprocessor_class(patch_size=8, max_num_patches=16)
    expected = model.predict(arrays_of(files), verbose=0)
    np.testing.assert_array_equal(model.predict(list(map(Path, files)), verbose=0), expected)


# === Names for outputs ===


def test_decode_predictions_names_the_most_probable_classes():
    model = classifier(class_names=NAMES)
    logits = np.array([[0.0, 2.0, 1.0], [3.0, 3.0, -1.0]])
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    first, second = model.decode_predictions(logits, top=2)
    assert [name for name, _ in first] == ["dog", "ox"]
    assert [name for name, _ in second] == ["cat", "dog"], "of equals the first"
    np.testing.assert_allclose([share for _, share in first], shares[0, [1, 2]], rtol=1e-6)
    assert len(model.decode_predictions(logits)[0]) == 3
    apart = classifier(class_names=NAMES, problem_type=MULTI_LABEL).decode_predictions(logits)
    np.testing.assert_allclose(apart[0][0][1], 1 / (1 + np.exp(-2.0)), rtol=1e-6)
    assert classifier(activation="softmax").decode_predictions(shares, 1)[0][0] == (
        "1", pytest.approx(shares[0, 1]))  # fmt: skip
    refused(r"shape \(2, 2\); give \(images, 3\)", model.decode_predictions, logits[:, :2])
    numbers = classifier(problem_type=REGRESSION)
    refused("no scores of classes", numbers.decode_predictions, logits)
