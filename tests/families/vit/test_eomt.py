"""EoMT: loss, segments and shapes of images beside transformers; masks that are given up."""

import itertools
import json
import logging
import shutil
from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import read_npz, to_numpy
from family_table import row_of
from kmodels import models, training
from kmodels.core.errors import InputError
from kmodels.models.vit.segmentation import segments
from kmodels.models.vit.segmentation.mask_transformer import MaskProbabilities, QueryMasking
from kmodels.models.vit.segmentation.preprocessor import fitted, window_starts
from points_drawn import points
from refusals import refused
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


def made(more=(), way="stretch", **settings):
    sizes = {**SMALL, **dict(more)}
    preprocessor = models.ViTImageSegmenterPreprocessor(sizes["image_shape"][:2], aspect_ratio=way)
    backbone = models.ViTBackbone(**sizes)
    return models.EoMTImageSegmenter(backbone, CLASSES, preprocessor, **{**QUERIES, **settings})


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


@pytest.mark.parametrize("case", CASES)
def test_descriptions_are_those_of_transformers(references, tmp_path, case):
    row = row_of(f"vit_eomt/{case}", references)
    row.model.export_to_transformers(tmp_path / "out")
    folders = (tmp_path / "out", row.path)
    held, wanted = (json.loads((folder / "config.json").read_text()) for folder in folders)
    for name in ("dtype", "transformers_version", "initializer_range"):
        wanted.pop(name, None)
    assert {key: held.get(key) for key in wanted} == wanted
    again = models.EoMTImageSegmenter.from_preset(tmp_path / "out", preprocessor=None)
    assert again.settings == row.model.settings


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
    row = row_of(f"vit_eomt/{case}", references)
    expected, model = row.expected, row.model

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
    row = row_of(f"vit_eomt/{case}", references)
    expected, side = row.expected, row.expected["images"].shape[1]
    info = json.loads((row.path.parent / "segments.json").read_text())
    wanted = read_npz(row.path.parent / "segments.npz")
    for i, (size, content) in enumerate(zip(SIZES, info["content"], strict=True)):
        given = (expected["masks"][i], expected["classes"][i], (side, side), size)
        np.testing.assert_array_equal(segments.semantic(*given), wanted[f"semantic_{i}"])
        for kind, more in (("instances", {}), ("panoptic", OVERLAP)):
            found = getattr(segments, kind)(*given, **THRESHOLDS, **more, content=content)
            np.testing.assert_array_equal(found["segmentation"], wanted[f"{kind}_{i}"])
            for ours, theirs in zip(found["segments_info"], info[kind][i], strict=True):
                assert ours == {**theirs, "score": pytest.approx(theirs["score"], abs=2e-6)}
        nothing = segments.panoptic(*given, threshold=1.0)
        assert (nothing["segmentation"] == -1).all() and not nothing["segments_info"]


@pytest.mark.each_backend("nightly")
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
    for one in (
        model.segment_instances(IMAGES[0], threshold=0.1),
        model.segment_panoptic(IMAGES[:1], threshold=0.1)[0],
    ):
        assert one["segmentation"].shape == (16, 24) and one["segments_info"]


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


# === Images of other shapes than the model's: padded, or cut into windows ===


SIDE = 16  # of the reference model
SQUARE = {"image_shape": (16, 16, 3), "num_register_tokens": 0}
SHAPES = ((22, 16), (11, 30), (16, 16), (9, 40), (50, 17), (33, 34))
AREA = {"threshold": 0.3, "mask_threshold": 0.45, "overlap_mask_area_threshold": 0.3}
WAYS = {
    "pad": {"do_pad": True, "size": {"shortest_edge": SIDE, "longest_edge": SIDE}},
    "split": {"do_split_image": True, "size": {"shortest_edge": SIDE, "longest_edge": None}},
}


def preprocessor_of(way):
    return models.ViTImageSegmenterPreprocessor((SIDE, SIDE), aspect_ratio=way)


def pictures():
    """Smooth images, which differ from place to place."""
    rng, found = np.random.default_rng(0), []
    for height, width in SHAPES:
        rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        waves = [
            np.sin(rows / a + i) * np.cos(columns / b + i)
            for i, (a, b) in enumerate(rng.uniform(2, 6, (3, 2)))
        ]
        found.append((127 + 120 * np.stack(waves, -1)).astype("uint8"))
    return found


class Theirs:
    def __init__(self, references, folder, way, images=None):
        import_module("torchvision_cpu").define_torchvision_operators()
        self.torch, transformers = import_module("torch"), import_module("transformers")
        shutil.copytree(references / "vit_eomt" / "dinov2" / "model", folder)
        module = import_module("transformers.models.eomt.image_processing_pil_eomt")
        mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
        self.kind = module.EomtImageProcessorPil
        changes = WAYS.get(way, {"do_resize": False})
        self.processor = self.kind(image_mean=mean, image_std=std, **changes)
        self.processor.save_pretrained(folder)
        kind = transformers.EomtForUniversalSegmentation
        self.model = kind.from_pretrained(folder).eval()
        with self.torch.no_grad():  # so that queries differ in their classes and masks
            self.model.class_predictor.weight.mul_(6.0)
            self.model.mask_head.fc3.weight.mul_(4.0)
        self.model.save_pretrained(folder)
        self.given = self.processor(pictures() if images is None else images, return_tensors="pt")
        with self.torch.no_grad():
            self.outputs = self.model(**self.given)

    def scores(self):
        """What each class has of each pixel of the model's images."""
        masks = self.torch.nn.functional.interpolate(
            self.outputs.masks_queries_logits, (SIDE, SIDE), mode="bilinear"
        )
        shares = self.outputs.class_queries_logits.softmax(-1)[..., :-1]
        return self.torch.einsum("bqc,bqhw->bchw", shares, masks.sigmoid())


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("way", WAYS)
def test_segments_of_images_of_any_shape_are_those_of_transformers(references, tmp_path, way):
    theirs = Theirs(references, tmp_path / "model", way)
    model = models.EoMTImageSegmenter.from_preset(tmp_path / "model")
    assert model.preprocessor.aspect_ratio == way
    pixels = theirs.given["pixel_values"].numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(
        model.preprocessor(pictures()), pixels, rtol=0, atol=tolerance("pictures")
    )
    wanted = theirs.outputs
    if way == "split":
        wanted.patch_offsets = theirs.given["patch_offsets"]
        maps = theirs.processor.post_process_semantic_segmentation(wanted, list(SHAPES))
    else:  # transformers squeezes the padding into the image; only its panoptic side removes it
        sizes = theirs.processor.size
        maps = theirs.processor.unpad_image(theirs.scores(), list(SHAPES), sizes)
        maps = [one.argmax(0) for one in maps]
    found = model.segment(pictures())
    assert [one.shape for one in found] == list(SHAPES)
    same = [(ours == one.numpy()).mean() for ours, one in zip(found, maps, strict=True)]
    assert min(same) > 0.995, same
    assert len(np.unique(np.concatenate([one.ravel() for one in found]))) > 1
    np.testing.assert_array_equal(model.segment(pictures()[1]), found[1])
    stretched = models.ViTImageSegmenterPreprocessor(
        (SIDE, SIDE), model.preprocessor.mean, model.preprocessor.std
    )
    kept, model.preprocessor = model.preprocessor, stretched
    assert any(
        (a != b).mean() > 0.02 for a, b in zip(model.segment(pictures()), found, strict=True)
    )
    model.preprocessor = kept
    # transformers reads what we write of the processor.
    written = tmp_path / "out"
    model.export_to_transformers(written)
    again = theirs.kind.from_pretrained(written)
    for name in ("size", "do_pad", "do_split_image", "image_mean", "image_std", "resample"):
        assert getattr(again, name) == getattr(theirs.processor, name), name
    pixels = again(pictures(), return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(pixels, theirs.given["pixel_values"].numpy())
    assert models.EoMTImageSegmenter.from_preset(written).preprocessor.aspect_ratio == way
    # Others read the same directory, and stretch.
    linear = models.ViTImageSegmenter.from_preset(written, num_classes=3)
    assert linear.preprocessor.aspect_ratio == way
    stretching = models.ViTImageClassifierPreprocessor.from_preset(written)
    assert stretching(pictures()).shape == (len(SHAPES), SIDE, SIDE, 3)
    if way == "split":
        with pytest.raises(InputError, match="windows give classes of pixels alone; give one with"):
            model.segment_panoptic(pictures())
        return
    # transformers' functions look for the outputs of windows in what the model gives.
    panoptic = theirs.processor.post_process_panoptic_segmentation(wanted, list(SHAPES), **AREA)
    instances = theirs.processor.post_process_instance_segmentation(
        wanted, list(SHAPES), threshold=0.2
    )
    pairs = [
        *zip(model.segment_panoptic(pictures(), **AREA), panoptic, strict=True),
        *zip(model.segment_instances(pictures(), threshold=0.2), instances, strict=True),
    ]
    assert sum(len(one["segments_info"]) for one, _ in pairs) > 6
    for ours, one in pairs:
        assert (ours["segmentation"] == one["segmentation"].numpy()).mean() > 0.995
        kinds = [[part["label_id"] for part in x["segments_info"]] for x in (ours, one)]
        assert kinds[0] == kinds[1]


@pytest.mark.needs("transformers")
def test_a_processor_that_does_not_resize_is_followed(references, tmp_path, caplog):
    images = [image[:SIDE, :SIDE] for image in pictures() if min(image.shape[:2]) >= SIDE]
    theirs = Theirs(references, tmp_path / "model", "none", images)
    made = models.EoMTImageSegmenter.from_preset(tmp_path / "model")
    assert made.preprocessor.aspect_ratio == "none" and not caplog.records
    pixels = theirs.given["pixel_values"].numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(
        made.preprocessor(images), pixels, rtol=0, atol=tolerance("pictures")
    )
    assert [one.shape for one in made.segment(images)] == [(SIDE, SIDE)] * len(images)
    refused("give images of 16 x 16", made.segment, pictures())
    made.export_to_transformers(tmp_path / "out")
    again = theirs.kind.from_pretrained(tmp_path / "out")
    assert not (again.do_resize or again.do_pad or again.do_split_image)
    linear = models.ViTImageSegmenter.from_preset(tmp_path / "out", num_classes=3)
    assert linear.preprocessor.aspect_ratio == "none"
    described = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    (tmp_path / "out" / "preprocessor_config.json").write_text(
        json.dumps({**described, "do_pad": True})
    )
    with caplog.at_level(logging.WARNING, "kmodels"):
        models.EoMTImageSegmenter.from_preset(tmp_path / "out")
    assert "do_resize=False with aspect_ratio='pad'" in caplog.text


@pytest.mark.needs("transformers")
def test_sizes_are_those_of_transformers():
    theirs = import_module("transformers.image_transforms").get_size_with_aspect_ratio
    rng = np.random.default_rng(1)
    for height, width in rng.integers(1, 2000, (300, 2)).tolist():
        for side in (16, 512, 640):
            assert fitted((height, width), side, "pad") == theirs((height, width), side, side)
            assert fitted((height, width), side, "split") == theirs((height, width), side)


def test_windows_cover_an_image():
    for side, length in ((16, 16), (16, 17), (16, 33), (512, 700), (512, 4000)):
        starts = window_starts(length, side, "split")
        assert starts[0] == 0 and length - side <= starts[-1] + side - 1 < length
        assert all(0 < b - a <= side for a, b in itertools.pairwise(starts))
    # Steps of 341 pixels for windows of 512, the last at the end of the image.
    assert window_starts(700, 512, "slide") == [0, 188]
    assert window_starts(1200, 512, "slide") == [0, 341, 682, 688]
    assert window_starts(1194, 512, "slide") == [0, 341, 682]
    assert window_starts(512, 512, "slide") == [0]


@pytest.fixture
def segmenter():
    keras.utils.set_random_seed(0)
    return made(SQUARE, "pad")


def test_padding_is_of_no_class(segmenter):
    """A padded image trains as one in which the rest has no label."""
    image, mask = pictures()[1], np.random.default_rng(2).integers(0, 5, SHAPES[1])
    images, masks = segmenter.preprocessor([image], [mask])
    rows = round(11 * SIDE / 30)
    assert images.shape == (1, SIDE, SIDE, 3) and masks.shape == (1, SIDE, SIDE)
    assert (masks[0, rows:] == 255).all() and (masks[0, :rows] < 5).all()
    black = (0 - np.array(segmenter.preprocessor.mean)) / np.array(segmenter.preprocessor.std)
    np.testing.assert_allclose(images[0, rows:], np.broadcast_to(black, images[0, rows:].shape))
    held = {"mask_labels": [np.ones((1, *SHAPES[1]), int)], "class_labels": [np.array([2])]}
    segments = segmenter.preprocessor([image], held)[1]
    assert (
        not segments["mask_labels"][0, 0, rows:].any()
        and segments["mask_labels"][0, 0, :rows].all()
    )
    segmenter.compile(keras.optimizers.Adam(1e-3))
    steps = [segmenter.train_on_batch([image], [mask], return_dict=True) for _ in range(4)]
    assert np.isfinite([step["loss"] for step in steps]).all()


def test_the_way_is_kept_in_files(segmenter, tmp_path):
    segmenter.save_to_preset(tmp_path / "model")
    again = models.EoMTImageSegmenter.from_preset(tmp_path / "model")
    assert again.preprocessor.to_dict() == segmenter.preprocessor.to_dict()
    for ours, theirs in zip(again.segment(pictures()), segmenter.segment(pictures()), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    segmenter.preprocessor = preprocessor_of("split")
    found = segmenter.segment(pictures())
    assert [one.shape for one in found] == list(SHAPES)
    stacked = segmenter.segment(np.stack([pictures()[1]] * 2))
    np.testing.assert_array_equal(stacked, np.stack([found[1]] * 2))
    said = segmenter.predict_queries(pictures()[3])["class_queries_logits"]
    assert len(said) == len(window_starts(71, SIDE, "split")) and segmenter.segment([]) == []
    # A square image is the same in each way.
    segmenter.preprocessor = preprocessor_of("stretch")
    square = to_numpy(segmenter.segment(pictures()[2]))
    for way in WAYS:
        segmenter.preprocessor = preprocessor_of(way)
        np.testing.assert_array_equal(to_numpy(segmenter.segment(pictures()[2])), square)


@pytest.mark.parametrize("way", WAYS)
def test_the_linear_head_keeps_shapes_too(way):
    """An image that is twice as wide as the model's is two windows, or fills half of one."""
    keras.utils.set_random_seed(1)
    sides = {"pad": (SIDE // 2, SIDE), "split": (SIDE, 2 * SIDE)}
    image = np.random.default_rng(3).integers(0, 256, (*sides[way], 3), "uint8")
    backbone, made = models.ViTBackbone(**{**SMALL, **SQUARE}), preprocessor_of(way)
    model = models.ViTImageSegmenter(backbone, 5, made, use_batch_norm=False)
    kernel = np.random.default_rng(4).normal(size=(16, 5))
    model.output_dense.kernel.assign(kernel - kernel.mean(0))
    logits = to_numpy(model(made([image])))
    wanted = logits[0, : SIDE // 2] if way == "pad" else np.concatenate(list(logits), 1)
    assert len(np.unique(wanted.argmax(-1))) > 1
    found = model.segment([image])[0]
    assert (found == wanted.argmax(-1)).mean() > 0.99


@pytest.mark.parametrize("task", ["linear", "queries"])
def test_sliding_windows_are_averaged(task):
    """The evaluation of mmsegmentation and DINOv3: mean logits of windows, then resized."""
    keras.utils.set_random_seed(2)
    image = np.random.default_rng(5).integers(0, 256, (40, 75, 3), "uint8")
    way = preprocessor_of("slide")
    backbone = models.ViTBackbone(**{**SMALL, **SQUARE})
    if task == "linear":
        model = models.ViTImageSegmenter(backbone, 5, way, use_batch_norm=False)
        model.output_dense.kernel.assign(np.random.default_rng(6).normal(size=(16, 5)))
    else:
        model = models.EoMTImageSegmenter(backbone, CLASSES, way, **QUERIES)
    resized = way.resizing(image, (SIDE, int(SIDE * 75 / 40 + 0.5)))
    pixels = (resized / 255.0 - np.array(way.mean)) / np.array(way.std)
    total, count = (
        np.zeros((*resized.shape[:2], model.num_classes)),
        np.zeros((1, *resized.shape[:2], 1)),
    )
    step, width = SIDE * 2 // 3, resized.shape[1]
    for number in range(-(-(width - SIDE) // step) + 1):
        end = min(number * step + SIDE, width)
        part = pixels[None, :, end - SIDE : end].astype("float32")
        total[:, end - SIDE : end] += to_numpy(model(part))[0]
        count[0, :, end - SIDE : end] += 1
    assert count.max() > 1 and count.min() == 1
    wanted = keras.ops.image.resize(
        total[None] / count, (40, 75), "bilinear", data_format="channels_last"
    )
    found, wanted = model.segment([image])[0], to_numpy(wanted)[0].argmax(-1)
    assert len(np.unique(wanted)) > 1 and (found == wanted).mean() > 0.999
    model.preprocessor = preprocessor_of("split")
    assert (model.segment([image])[0] != found).any()


# === What is refused ===


def test_what_cannot_be_is_said(tmp_path):
    for fields, settings, message in (
        ({}, {"num_blocks": 3}, "num_blocks is 3, and the backbone has 2 blocks"),
        ({"patch_drop_rate": 0.5}, {}, "leave patch_drop_rate and token_merging at 0"),
        ({"final_norm": False}, {}, "has no norm behind its last block"),
        ({}, {"oversample_ratio": 0}, "oversample_ratio is 0; give a number at least 1"),
        (
            {},
            {"importance_sample_ratio": 2},
            "importance_sample_ratio is 2; give a number from 0 to 1",
        ),
        ({}, {"class_weight": -1}, "class_weight is -1; give a number at least 0"),
        ({}, {"way": "pad"}, r"image_size \(16, 24\); give a square one, or aspect_ra"),
        ({}, {"way": "crop"}, "aspect_ratio is 'crop'; choose stretch or pad or split"),
    ):
        refused(message, made, fields, **settings)
    for name in ("vit_debug", "eomt_large_patch16_640"):
        with pytest.raises(InputError, match=f"{name} has no head of queries; give num_classes"):
            models.EoMTImageSegmenter.from_preset(name)
    model = made()
    with pytest.raises(InputError, match="no counterpart for images that are not square"):
        model.export_to_transformers(tmp_path / "wide")
    with pytest.raises(InputError, match="positions of the class token; give position_over_prefix"):
        made({**SQUARE, "position_over_prefix": True}).export_to_transformers(tmp_path / "places")
    with pytest.raises(InputError, match=r"attn_mask_probs are \[2\.0\]; give numbers from 0 to 1"):
        model.attn_mask_probs = 2
    model.compile(run_eagerly=True)
    for labels, message in (
        (np.zeros((2, 5)), r"labels have shape \(2, 5\); give \(B, H, W\)"),
        ({"masks": 0}, "labels have the keys masks; give mask_labels and class"),
    ):
        with pytest.raises(InputError, match=message):
            model.criterion(labels, np.zeros((2, 8, 4, 4)), np.zeros((2, 8, CLASSES + 1)))
    with pytest.raises(InputError, match="no counterpart for aspect_ratio='slide'; give 'split'"):
        made({**SQUARE, "mlp_dim": 32}, "slide").export_to_transformers(tmp_path / "slide")
    windows = preprocessor_of("split")
    with pytest.raises(InputError, match="several images of one, which have no masks; train with"):
        windows([pictures()[0]], [np.zeros(SHAPES[0], int)])
    with pytest.raises(InputError, match="converter has no counterpart for aspect_ratio='split'"):
        _ = windows.image_converter
