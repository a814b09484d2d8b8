"""EoMT: transformers' numbers, files, loss and segments; masks that are given up; training."""

import functools
import json

import keras
import numpy as np
import pytest

from arrays import assert_same_tensors, to_numpy
from kmodels import models, training
from kmodels.core.errors import InputError
from kmodels.models.vit.eomt import postprocess
from kmodels.models.vit.eomt.layers import MaskProbabilities, QueryMasking
from points_drawn import points
from tolerances import tolerance

CASES = ("dinov2", "gated", "dinov3", "dinov3_gated", "dinov3_plain")
SMALL = {
    "image_shape": (16, 24, 3), "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 24, "num_register_tokens": 1, "layer_scale": 1.0, "position_over_prefix": False,
}  # fmt: skip
QUERIES = {"num_queries": 8, "num_blocks": 1, "num_upscale_blocks": 1, "train_num_points": 48}
CLASSES, IGNORED = 5, 255
# What to learn: the color of each of six squares.
rng = np.random.default_rng(0)
LABELS = rng.integers(0, 3, (16, 2, 3)).repeat(8, 1).repeat(8, 2)
COLORS = np.array([[200, 30, 40], [30, 190, 60], [60, 40, 220]])
IMAGES = np.clip(COLORS[LABELS] + rng.normal(0, 9, (16, 16, 24, 3)), 0, 255).astype("uint8")
SIZES = [(22, 16), (11, 30)]
THRESHOLDS = {"threshold": 0.22}
OVERLAP = {"mask_threshold": 0.45, "overlap_mask_area_threshold": 0.4, "stuff_classes": [0, 2]}


def made(sizes=SMALL, **settings):
    preprocessor = models.ViTImageSegmenterPreprocessor(sizes["image_shape"][:2])
    backbone = models.ViTBackbone(**sizes)
    return models.EoMTImageSegmenter(backbone, CLASSES, preprocessor, **{**QUERIES, **settings})


@functools.cache
def expected_of(references, case):
    with np.load(references / "vit_eomt" / case / "expected.npz") as held:
        return dict(held)


@functools.cache
def model_of(references, case):
    path = references / "vit_eomt" / case / "model"
    return models.EoMTImageSegmenter.from_preset(path, preprocessor=None)


@pytest.fixture(scope="module")
def trained():
    """A segmenter after some steps of `fit`, with what they logged."""
    keras.utils.set_random_seed(0)
    model = made(annealing_steps=24)
    model.compile(keras.optimizers.Adam(5e-3))
    before = to_numpy(model.mask_transformer.queries.embedding)
    given = {"validation_data": (IMAGES[:8], LABELS[:8]), "batch_size": 8, "verbose": 0}
    history = model.fit(IMAGES, LABELS, epochs=12, **given).history
    return model, history, before


def test_every_reference_has_a_test(references):
    found = [folder.name for folder in (references / "vit_eomt").iterdir() if folder.is_dir()]
    assert sorted(found) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_queries_and_files_are_those_of_transformers(references, tmp_path, case):
    expected, model = expected_of(references, case), model_of(references, case)
    found = model.predict_queries(expected["images"])
    for name, theirs in (("masks_queries_logits", "masks"), ("class_queries_logits", "classes")):
        assert found[name].dtype == "float32"
        np.testing.assert_allclose(found[name], expected[theirs], rtol=0, atol=tolerance("logits"))
    model.export_to_transformers(tmp_path / "written")
    assert_same_tensors(tmp_path / "written", references / "vit_eomt" / case / "model")
    held, wanted = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "written", references / "vit_eomt" / case / "model")
    )
    for name in ("dtype", "transformers_version", "initializer_range"):
        wanted.pop(name, None)
    assert {key: held.get(key) for key in wanted} == wanted
    again = models.EoMTImageSegmenter.from_preset(tmp_path / "written", preprocessor=None)
    assert again.settings == model.settings and again.backbone.config == model.backbone.config


def padded_masks(labels):
    """Masks of the classes of each image, with room for one more."""
    classes = np.full((len(labels), CLASSES + 1), -1, "int32")
    masks = np.zeros((len(labels), CLASSES + 1, *labels.shape[1:]), "uint8")
    for row, (own, kept) in enumerate(zip(labels, classes, strict=True)):
        found = [c for c in range(CLASSES) if (own == c).any()][::-1]
        kept[: len(found)] = found
        masks[row, : len(found)] = np.stack([own == c for c in found])
    return {"mask_labels": masks, "class_labels": classes}


@pytest.mark.parametrize("case", ["dinov2", "dinov3"])
def test_the_loss_is_that_of_transformers(references, case, monkeypatch):
    """Of the same points; as masks of labels in one model, and as masks in the other."""
    expected, model = expected_of(references, case), model_of(references, case)

    def drawn(shape, *_, **__):
        own = points(shape[-2]) if shape[-1] == 2 else np.zeros(shape[-2:], "float32")
        return keras.ops.broadcast_to(keras.ops.convert_to_tensor(own), shape)

    monkeypatch.setattr(keras.random, "uniform", drawn)
    labels = expected["labels"]
    given = labels if case == "dinov2" else padded_masks(labels)
    model.compile(metrics=[training.MeanIoU(CLASSES, ignore_class=IGNORED)])
    found = model.evaluate(expected["images"], given, return_dict=True, verbose=0)
    assert found["loss"] == pytest.approx(float(expected["loss"]), abs=tolerance("losses"))
    said = to_numpy(model(expected["images"])).argmax(-1)
    metric = training.MeanIoU(CLASSES, ignore_class=IGNORED, sparse_y_pred=True)
    metric.update_state(labels, said)
    assert found["mean_iou"] == pytest.approx(float(to_numpy(metric.result())), abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_segments_are_those_of_transformers(references, case):
    folder = references / "vit_eomt" / case
    expected, info = (
        expected_of(references, case),
        json.loads((folder / "segments.json").read_text()),
    )
    side = expected["images"].shape[1]
    with np.load(folder / "segments.npz") as held:
        wanted = dict(held)
    merged = 0
    for i, (size, content) in enumerate(zip(SIZES, info["content"], strict=True)):
        given = (expected["masks"][i], expected["classes"][i], (side, side), size)
        np.testing.assert_array_equal(postprocess.semantic(*given), wanted[f"semantic_{i}"])
        for kind, more in (("instances", {}), ("panoptic", OVERLAP)):
            found = getattr(postprocess, kind)(*given, **THRESHOLDS, **more, content=content)
            np.testing.assert_array_equal(found["segmentation"], wanted[f"{kind}_{i}"])
            for ours, theirs in zip(found["segments_info"], info[kind][i], strict=True):
                assert ours == {**theirs, "score": pytest.approx(theirs["score"], abs=2e-6)}
        apart = postprocess.panoptic(*given, **{**THRESHOLDS, **OVERLAP, "stuff_classes": None})
        merged += len(apart["segments_info"]) > len(info["panoptic"][i])
        nothing = postprocess.panoptic(*given, threshold=1.0)
        assert (nothing["segmentation"] == -1).all() and not nothing["segments_info"]


def test_scenes_are_learned_and_masks_given_up(trained):
    model, history, before = trained
    assert np.mean(history["loss"][-3:]) < 0.8 * history["loss"][0]
    assert history["val_mean_iou"][-1] > 0.7
    assert np.abs(to_numpy(model.mask_transformer.queries.embedding) - before).max() > 1e-3
    np.testing.assert_array_equal(model.attn_mask_probs, [0.0])
    # Without masks a block sees all, which changes what it says; the last steps were without.
    plain = model.predict(IMAGES, verbose=0)
    model.attn_mask_probs = 1.0
    masked = model.predict(IMAGES, verbose=0)
    assert np.abs(plain - masked).max() > 1e-3
    model.attn_mask_probs = [0.0]
    np.testing.assert_allclose(model.predict(IMAGES, verbose=0), plain, atol=1e-6)
    # Evaluations draw the same points.
    given = {"batch_size": 8, "verbose": 0, "return_dict": True}
    found = [model.evaluate(IMAGES, LABELS, **given) for _ in range(2)]
    assert found[0] == found[1]


def test_segments_have_the_size_of_their_images(trained, tmp_path):
    model, _, _ = trained
    wanted = model.predict(IMAGES, verbose=0).argmax(-1)
    found = model.segment(IMAGES)
    assert found.dtype == "int32" and (found == wanted).mean() > 0.999
    np.testing.assert_array_equal(model.segment(IMAGES[0]), found[0])
    several = model.segment([IMAGES[0][:7], np.repeat(IMAGES[1], 2, 0)])
    assert [mask.shape for mask in several] == [(7, 24), (32, 24)]
    assert model.segment([]) == [] and model.segment(IMAGES[:0]).shape == (0, 16, 24)
    for segments in (
        model.segment_instances(IMAGES[0], threshold=0.1),
        model.segment_panoptic(IMAGES[:1], threshold=0.1)[0],
    ):
        assert segments["segmentation"].shape == (16, 24) and segments["segments_info"]
    model.save_to_preset(tmp_path / "model")
    again = models.EoMTImageSegmenter.from_preset(tmp_path / "model")
    np.testing.assert_allclose(again.predict(IMAGES, verbose=0).argmax(-1), wanted)
    from kmodels.presets import find

    assert find.class_of(tmp_path / "model") is models.EoMTImageSegmenter
    # Another number of queries or classes is new, the backbone stays.
    other = models.EoMTImageSegmenter.from_preset(tmp_path / "model", num_queries=3)
    assert other.predict_queries(IMAGES[:1])["masks_queries_logits"].shape == (1, 3, 8, 12)
    linear = models.ViTImageSegmenter.from_preset(tmp_path / "model", num_classes=CLASSES)
    for ours, theirs in zip(linear.backbone.weights, model.backbone.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
    larger = again.resized((32, 24))
    assert larger.segment(IMAGES[:1]).shape == (1, 16, 24)


def test_what_queries_see():
    logits = rng.normal(size=(2, 3, 2, 4)).astype("float32")
    layer = QueryMasking(1, 2, seed=1)
    shares = np.array([0.0, 1.0], "float32")
    seen = to_numpy(layer(logits, shares))
    assert seen.shape == (2, 13, 13) and seen[:, 3:].all() and seen[:, :, :5].all()
    np.testing.assert_array_equal(seen[:, :3, 5:], logits.reshape(2, 3, 8) > 0)
    assert to_numpy(layer(logits, np.zeros(2, "float32"))).all()
    assert to_numpy(layer(logits, np.zeros(2, "float32"), training=True)).all()
    np.testing.assert_array_equal(to_numpy(layer(logits, shares, training=True)), seen)
    many = np.full((200, 3, 2, 4), -1.0, "float32")
    free = to_numpy(layer(many, np.full(2, 0.7, "float32"), training=True))[:, :3, 5:]
    assert (free.all(-1) == free.any(-1)).all()  # a query is left alone as a whole
    assert abs(free.mean() - 0.3) < 0.06
    # Four blocks: each takes a sixth of the steps, after a sixth, by a power of 0.9.
    falling = MaskProbabilities(4, annealing_steps=60)
    falling.build(None)
    found = np.stack([to_numpy(falling.after(step)) for step in (0, 10, 15, 20, 35, 50, 60)])
    half = 0.5**0.9
    wanted = [[1, 1, 1, 1], [1, 1, 1, 1], [half, 1, 1, 1], [0, 1, 1, 1], [0, 0, half, 1],
              [0, 0, 0, 0], [0, 0, 0, 0]]  # fmt: skip
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_what_cannot_be_is_said(tmp_path):
    backbone = models.ViTBackbone(**SMALL)
    with pytest.raises(InputError, match="num_blocks is 3, and the backbone has 2 blocks"):
        models.EoMTImageSegmenter(backbone, 3, num_blocks=3)
    with pytest.raises(InputError, match="leave patch_drop_rate and token_merging at 0"):
        made({**SMALL, "patch_drop_rate": 0.5})
    with pytest.raises(InputError, match="has no norm behind its last block"):
        made({**SMALL, "final_norm": False})
    with pytest.raises(InputError, match="vit_debug has no head of queries; give num_classes"):
        models.EoMTImageSegmenter.from_preset("vit_debug")
    with pytest.raises(
        InputError, match="eomt_large_patch16_640 has no head of queries; give num_classes"
    ):
        models.EoMTImageSegmenter.from_preset("eomt_large_patch16_640")
    with pytest.raises(InputError, match="oversample_ratio is 0; give at least 1"):
        made(oversample_ratio=0)
    with pytest.raises(InputError, match="importance_sample_ratio is 2; give 0 to 1"):
        made(importance_sample_ratio=2)
    with pytest.raises(InputError, match="class_weight is -1; give 0 or more"):
        made(class_weight=-1)
    model = made()
    with pytest.raises(InputError, match="no counterpart for images that are not square"):
        model.export_to_transformers(tmp_path / "wide")
    square = {**SMALL, "image_shape": (16, 16, 3), "position_over_prefix": True}
    with pytest.raises(InputError, match="positions of the class token; give position_over_prefix"):
        made(square).export_to_transformers(tmp_path / "positions")
    with pytest.raises(InputError, match=r"attn_mask_probs are \[2\.0\]; give numbers from 0 to 1"):
        model.attn_mask_probs = 2
    model.compile(run_eagerly=True)
    with pytest.raises(InputError, match=r"labels have shape \(2, 5\); give \(B, H, W\)"):
        model.criterion(np.zeros((2, 5)), np.zeros((2, 8, 4, 4)), np.zeros((2, 8, CLASSES + 1)))
    with pytest.raises(InputError, match="labels have the keys masks; give mask_labels and class"):
        model.criterion({"masks": 0}, np.zeros((2, 8, 4, 4)), np.zeros((2, 8, CLASSES + 1)))
