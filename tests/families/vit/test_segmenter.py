"""Segmenters: loss and metric by NumPy, files, adapters, masks of any size, the linear head."""

import io

import keras
import numpy as np
import pytest
from PIL import ExifTags, Image

from arrays import assert_equal, to_numpy
from kmodels import models, training
from kmodels.core.errors import InputError
from kmodels.models.vit.segmentation import masks as resizing
from kmodels.presets import find
from refusals import refused
from tolerances import tolerance

SIZES = {
    "image_shape": (16, 24, 3), "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 24, "num_register_tokens": 2,
}  # fmt: skip
CLASSES, IGNORED = 5, 255
rng = np.random.default_rng(0)
PICTURES = rng.integers(0, 256, (6, 16, 24, 3), "uint8")
# What to learn: which third of the brightness a pixel's patch has; some pixels have no label.
BRIGHT = PICTURES.astype("float32").mean(-1).reshape(6, 4, 4, 6, 4).mean((2, 4))
LABELS = np.digitize(BRIGHT, [115.0, 130.0]).repeat(4, 1).repeat(4, 2)
LABELS[:, :3, :5] = IGNORED


QUERIES = {"num_queries": 8, "num_blocks": 1, "num_upscale_blocks": 1, "train_num_points": 48}


def made(kind=models.ViTImageSegmenter, **settings):
    backbone = models.ViTBackbone(**SIZES)
    preprocessor = models.ViTImageSegmenterPreprocessor((16, 24))
    return kind(backbone, CLASSES, preprocessor, **settings)


@pytest.fixture(scope="module")
def trained():
    """A segmenter after some steps of `fit`, with what they logged."""
    keras.utils.set_random_seed(0)
    model = made(dropout=0.1)
    model.compile(keras.optimizers.Adam(1e-2))
    history = model.fit(PICTURES, LABELS, batch_size=6, epochs=12, verbose=0).history
    return model, history


def numpy_loss(logits, labels):
    there = labels != IGNORED
    shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = np.take_along_axis(shares, np.where(there, labels, 0)[..., None], -1)[..., 0]
    return -(own * there), there


@pytest.mark.nightly("tensorflow")
@pytest.mark.each_backend
def test_loss_and_metric_are_those_of_numpy():
    logits = rng.normal(size=(3, 4, 5, CLASSES))
    labels = rng.integers(0, CLASSES, (3, 4, 5))
    labels[0, 1:] = IGNORED
    wanted, there = numpy_loss(logits, labels)
    loss = training.PixelCrossentropy(IGNORED)
    metric = training.MeanIoU(CLASSES, ignore_class=IGNORED)
    given = logits.astype("float32")
    at = {"atol": tolerance("losses"), "rtol": 0}
    np.testing.assert_allclose(to_numpy(loss(labels, given)), wanted.sum() / there.sum(), **at)
    keras_own = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=IGNORED)
    np.testing.assert_allclose(
        to_numpy(loss(labels, given)), to_numpy(keras_own(labels, given)), **at
    )
    assert abs(wanted.mean() - wanted.sum() / there.sum()) > 0.1
    rows = np.array([1.0, 0.0, 0.5], "float32")
    weights = rows[:, None, None] * there
    expected = (wanted * weights).sum() / there.sum()
    np.testing.assert_allclose(to_numpy(loss(labels[..., None], given, rows)), expected, **at)
    each = training.PixelCrossentropy(IGNORED, reduction=None)
    np.testing.assert_allclose(to_numpy(each(labels, given)), wanted, **at)
    total = training.PixelCrossentropy(IGNORED, reduction="sum")
    np.testing.assert_allclose(to_numpy(total(labels, given)), wanted.sum(), rtol=1e-6)
    assert to_numpy(loss(np.full_like(labels, IGNORED), given)) == 0.0
    for beyond in (-1, -100, CLASSES, 10**6):
        unknown = np.where(np.arange(labels.size).reshape(labels.shape) == 1, beyond, labels)
        np.testing.assert_array_equal(np.isnan(to_numpy(each(unknown, given))), unknown == beyond)
    by_weight = training.PixelCrossentropy(IGNORED, reduction="mean_with_sample_weight")
    expected = (wanted * weights).sum() / weights.sum()
    np.testing.assert_allclose(to_numpy(by_weight(labels, given, rows)), expected, **at)
    for call, message in (
        (lambda: loss(labels[:1], given), r"masks have shape \(1, 4, 5\)"),
        (lambda: loss(labels, given, rows[:2]), r"sample_weight has shape \(2,\) beside labels of"),
        (lambda: loss(labels, given, np.ones((4, 5))), r"sample_weight has shape \(4, 5\)"),
        (lambda: metric.update_state(labels, given, rows[:2]), r"sample_weight has shape \(2,\)"),
    ):
        refused(message, call)
    np.testing.assert_allclose(
        to_numpy(loss(labels, given, weights[..., None])),
        to_numpy(loss(labels, given, rows)),
        **at,
    )
    of_all = training.PixelCrossentropy(IGNORED, count_ignored=True)
    np.testing.assert_allclose(to_numpy(of_all(labels, given)), wanted.mean(), **at)
    saved = keras.saving.serialize_keras_object(of_all)
    assert keras.saving.deserialize_keras_object(saved).count_ignored
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert again.ignore_class == IGNORED
    everywhere = training.PixelCrossentropy(None)
    np.testing.assert_allclose(to_numpy(everywhere(labels[1:], given[1:])), wanted[1:].mean(), **at)

    said, weight = logits.argmax(-1), np.where(there, rows[:, None, None], 0.0)
    for part in (slice(0, 2), slice(2, 3)):
        metric.update_state(labels[part], given[part], rows[part])
    for kind, count in ((metric, weight), (training.MeanIoU(CLASSES, ignore_class=IGNORED), there)):
        if kind is not metric:
            kind.update_state(labels, given)
        shares = []
        for i in range(CLASSES):
            both = (count * ((labels == i) & (said == i))).sum()
            either = (count * ((labels == i) | (said == i))).sum()
            shares += [both / either] if either else []
        np.testing.assert_allclose(to_numpy(kind.result()), np.mean(shares), rtol=1e-6)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric))
    assert again.ignore_class == IGNORED and again.sparse_y_pred is False


@pytest.mark.nightly("tensorflow")
@pytest.mark.each_backend
def test_the_head_is_batch_norm_a_dense_layer_and_bilinear_resizing(trained):
    model, history = trained
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    x = to_numpy(model.preprocessor(PICTURES))
    tokens = to_numpy(model.backbone.predict(x, verbose=0)).astype("float64")
    assert tokens.shape[1] == 3 + 4 * 6
    held = {w.path: to_numpy(w) for w in model.weights}
    norm, dense = "gamma beta moving_mean moving_variance", "kernel bias"
    names = [f"batch_norm/{x}" for x in norm.split()] + [f"pixel_logits/{x}" for x in dense.split()]
    gamma, beta, mean, variance, kernel, bias = (
        next(value for path, value in held.items() if path.endswith(name)) for name in names
    )
    assert np.abs(mean).max() > 0.01 and np.abs(variance - 1).max() > 0.01
    y = (tokens[:, 3:] - mean) / np.sqrt(variance + 1e-5) * gamma + beta
    grid = (y @ kernel + bias).reshape(-1, 4, 6, CLASSES)
    wanted = np.stack([resizing.resized(g, (16, 24)) for g in grid])
    logits = model.predict(PICTURES, verbose=0)
    assert logits.shape == (6, 16, 24, CLASSES)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=tolerance("logits"))
    # `evaluate` measures the same.
    losses, there = numpy_loss(logits.astype("float64"), LABELS)
    results = model.evaluate(PICTURES, LABELS, return_dict=True, verbose=0)
    assert results["loss"] == pytest.approx(losses.sum() / there.sum(), abs=tolerance("losses"))
    assert 0 < results["mean_iou"] <= 1


@pytest.mark.parametrize(
    ("kind", "settings", "what"),
    [
        (models.ViTImageSegmenter, {}, "for pixels"),
        (models.EoMTImageSegmenter, QUERIES, "of queries"),
    ],
)
def test_masks_have_the_size_of_their_images_also_from_files(kind, settings, what, tmp_path):
    keras.utils.set_random_seed(0)
    model = made(kind, **settings)
    wanted = model.predict(PICTURES, verbose=0)
    found = model.segment(PICTURES)
    assert found.dtype == "int32" and (found == wanted.argmax(-1)).mean() > 0.999
    assert len(np.unique(found)) > 1
    np.testing.assert_array_equal(model.segment(PICTURES[0]), found[0])
    odd = [rng.integers(0, 256, (*size, 3), "uint8") for size in ((7, 31), (50, 20))]
    several = model.segment(odd, batch_size=2)
    assert [mask.shape for mask in several] == [(7, 31), (50, 20)]
    assert model.segment([]) == [] and model.segment(PICTURES[:0]).shape == (0, 16, 24)
    preprocessor, model.preprocessor = model.preprocessor, None
    np.testing.assert_array_equal(model.segment(preprocessor(PICTURES)), found)
    model.preprocessor = preprocessor
    model.save_to_preset(tmp_path / "model")
    assert find.class_of(tmp_path / "model") is kind
    again = kind.from_preset(tmp_path / "model")
    assert again.preprocessor.to_dict() == preprocessor.to_dict() and again.ignore_class == 255
    model.save(tmp_path / "model.keras")
    for one in (again, keras.saving.load_model(tmp_path / "model.keras")):
        np.testing.assert_allclose(one.predict(PICTURES, verbose=0), wanted, atol=1e-5)
        np.testing.assert_array_equal(one.segment(PICTURES), found)
    larger = again.resized((32, 24))
    assert larger.preprocessor.image_size == (32, 24)
    assert larger.segment(PICTURES).shape == (6, 16, 24)
    # A backbone goes from each kind of head to each other, with as many classes.
    classifier = models.ViTImageClassifier(model.backbone, CLASSES)
    classifier.save_to_preset(tmp_path / "classifier")
    with pytest.raises(InputError, match=f"classifier has no head {what}; give num_classes"):
        kind.from_preset(tmp_path / "classifier")
    for cls, source in (
        (kind, "classifier"),
        (models.ViTImageClassifier, "model"),
        (models.ViTImageSegmenter, "model"),
    ):
        more = settings if source == "classifier" else {}
        new = cls.from_preset(tmp_path / source, num_classes=CLASSES, **more)
        assert_equal(new.backbone.weights, model.backbone.weights)
    if kind is models.ViTImageSegmenter:
        other = kind.from_preset(tmp_path / "model", num_classes=3)
        assert other.output_dense.kernel.shape == (16, 3)
    else:
        other = kind.from_preset(tmp_path / "model", num_queries=3)
        assert other.predict_queries(PICTURES[:1])["masks_queries_logits"].shape == (1, 3, 8, 12)


def test_masks_are_resized_a_band_at_a_time(monkeypatch):
    grid = rng.normal(size=(4, 6, CLASSES)).astype("float32")
    whole = resizing.resized(grid, (33, 21)).argmax(-1)
    monkeypatch.setattr(resizing, "_MOST_NUMBERS", 300)
    np.testing.assert_array_equal(resizing.classes(grid, (33, 21)), whole)


def test_preprocessor_resizes_masks_to_the_nearest_pixel():
    make = models.ViTImageSegmenterPreprocessor((4, 6))
    mask = np.arange(8 * 12).reshape(8, 12) % 200
    images, masks = make([np.zeros((8, 12, 3), "uint8")] * 2, [mask, mask[..., None]])
    assert images.shape == (2, 4, 6, 3) and masks.dtype == "int32"
    np.testing.assert_array_equal(masks[0], mask[1::2, 1::2])
    np.testing.assert_array_equal(masks[0], masks[1])
    one = make(np.zeros((8, 12, 3), "uint8"), mask)
    assert one[1].shape == (4, 6)
    kept = models.ViTImageSegmenterPreprocessor((4, 6), resize_output_mask=False)
    assert kept(np.zeros((1, 8, 12, 3)), mask[None])[1].shape == (1, 8, 12)
    assert make.from_config(make.get_config()).to_dict() == make.to_dict()
    for spec, shape in (((None, 8, 12, 1), (None, 4, 6)), ((8, 12), (4, 6))):
        found = make.compute_output_spec(
            keras.KerasTensor((*shape[:-2], 8, 12, 3)), keras.KerasTensor(spec, "int32")
        )
        assert found[1].shape == shape
    segments = {"mask_labels": [mask[None] > 99, np.zeros((0, 8, 12))], "class_labels": [[3], []]}
    labels = make(np.zeros((2, 8, 12, 3)), segments)[1]
    np.testing.assert_array_equal(labels["mask_labels"][0, 0], masks[0] > 99)
    assert labels["class_labels"].tolist() == [[3], [-1]] and not labels["mask_labels"][1].any()
    with pytest.raises(InputError, match=r"images have \[1, 0\] masks and \[1, 1\] classes; give"):
        make(np.zeros((2, 8, 12, 3)), {**segments, "class_labels": [[3], [1]]})
    with pytest.raises(InputError, match="labels have the keys masks; give mask_labels and class"):
        make(np.zeros((2, 8, 12, 3)), {"masks": []})
    with pytest.raises(InputError, match=r"a mask has shape \(8, 12, 3\); give \(height, width\)"):
        make(np.zeros((8, 12, 3)), [np.zeros((8, 12, 3), int)])
    with pytest.raises(InputError, match="values of float64; give whole numbers"):
        make(np.zeros((1, 8, 12, 3)), mask[None] + 0.5)
    stretched = models.ViTImageConverter((5, 6), scale=1 / 255, crop_to_aspect_ratio=False)
    assert models.ViTImageSegmenterPreprocessor(image_converter=stretched).image_size == (5, 6)


def test_a_mask_is_turned_as_its_image():
    """As EXIF turns an image, and not the file of its mask."""
    make = models.ViTImageSegmenterPreprocessor((4, 4))
    exif, content = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(np.zeros((8, 12, 3), "uint8")).save(content, "JPEG", exif=exif)
    upright = np.zeros((12, 8), int)
    for images in ([Image.open(content)], [np.zeros((12, 8, 3), "uint8")]):
        assert make(images, [upright])[1].shape == (1, 4, 4)
        assert make(images, [upright[::2, ::2]])[1].shape == (1, 4, 4)
        refused("image 0 has 8x12 pixels and its mask 12x8; turn", make, images, [upright.T])


def test_what_cannot_be_is_said():
    with pytest.raises(InputError, match="num_classes is 1; give at least 2"):
        models.ViTImageSegmenter(models.ViTBackbone(**SIZES), 1)
    with pytest.raises(InputError, match="vit_debug has no head for pixels; give num_classes"):
        models.ViTImageSegmenter.from_preset("vit_debug")
    dropping = models.ViTBackbone(**SIZES, patch_drop_rate=0.5)
    with pytest.raises(
        InputError, match=r"patch_drop_rate=0\.5, and pixels of patches that are left"
    ):
        models.ViTImageSegmenter(dropping, 3)
    pooled = models.SigLIPVisionEncoder(**{**SIZES, "num_register_tokens": 0})
    with pytest.raises(InputError, match="SigLIPVisionEncoder gives no tokens; give a ViTBackbone"):
        models.ViTImageSegmenter(pooled, 3)


def test_a_warning_names_the_preprocessor_of_the_task(tmp_path):
    fields = {"patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    siglip = {"approximate_gelu": True, "position_interpolation": "bilinear_antialias"}
    backbone = models.ViTBackbone((16, 16, 3), use_class_token=False, **fields, **siglip)
    backbone.export_to_transformers(tmp_path / "none")
    for kind, given in (
        (models.ViTImageSegmenter, r"ViTImageSegmenterPreprocessor\(image_size, mean, std\)"),
        (models.ViTImageClassifier, r"ViTImageClassifierPreprocessor\(image_size, mean, std\)"),
        (
            models.NaFlexViTImageClassifier,
            r"NaFlexViTImageClassifierPreprocessor\(patch_size, max_num_patches, mean, std\)",
        ),
    ):
        with pytest.warns(UserWarning, match=f"no preprocessor; give preprocessor={given}, or"):
            kind.from_preset(tmp_path / "none", num_classes=3)
