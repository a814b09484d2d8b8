"""EoMT on images of other shapes than its own: padded, or cut into windows, as in transformers."""

import itertools
import shutil
from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import (
    EoMTImageSegmenter,
    ViTBackbone,
    ViTImageClassifierPreprocessor,
    ViTImageSegmenter,
    ViTImageSegmenterPreprocessor,
)
from kmodels.models.vit.segmentation.aspect_ratio import fitted, window_starts
from tolerances import tolerance

SIDE = 16  # of the reference model
SIZES = ((22, 16), (11, 30), (16, 16), (9, 40), (50, 17), (33, 34))
THRESHOLDS = {"threshold": 0.3, "mask_threshold": 0.45, "overlap_mask_area_threshold": 0.3}
WAYS = {
    "pad": {"do_pad": True, "size": {"shortest_edge": SIDE, "longest_edge": SIDE}},
    "split": {"do_split_image": True, "size": {"shortest_edge": SIDE, "longest_edge": None}},
}
SMALL = {
    "image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 32, "layer_scale": 1.0, "position_over_prefix": False,
}  # fmt: skip
QUERIES = {"num_queries": 6, "num_blocks": 1, "num_upscale_blocks": 1, "train_num_points": 32}


def pictures():
    """Smooth images, which differ from place to place."""
    rng, found = np.random.default_rng(0), []
    for height, width in SIZES:
        rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        waves = [
            np.sin(rows / a + i) * np.cos(columns / b + i)
            for i, (a, b) in enumerate(rng.uniform(2, 6, (3, 2)))
        ]
        found.append((127 + 120 * np.stack(waves, -1)).astype("uint8"))
    return found


class Theirs:
    """transformers' model and processor of a directory, and what they make of the pictures."""

    def __init__(self, references, folder, way):
        import_module("torchvision_cpu").define_torchvision_operators()
        self.torch, transformers = import_module("torch"), import_module("transformers")
        shutil.copytree(references / "vit_eomt" / "dinov2" / "model", folder)
        module = import_module("transformers.models.eomt.image_processing_pil_eomt")
        mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
        self.kind = module.EomtImageProcessorPil
        self.processor = self.kind(image_mean=mean, image_std=std, **WAYS[way])
        self.processor.save_pretrained(folder)
        kind = transformers.EomtForUniversalSegmentation
        self.model = kind.from_pretrained(folder).eval()
        with self.torch.no_grad():  # so that queries differ in their classes and masks
            self.model.class_predictor.weight.mul_(6.0)
            self.model.mask_head.fc3.weight.mul_(4.0)
        self.model.save_pretrained(folder)
        self.given = self.processor(pictures(), return_tensors="pt")
        with self.torch.no_grad():
            self.outputs = self.model(**self.given)

    def scores(self):
        """What each class has of each pixel of the model's images."""
        masks = self.torch.nn.functional.interpolate(
            self.outputs.masks_queries_logits, (SIDE, SIDE), mode="bilinear"
        )
        shares = self.outputs.class_queries_logits.softmax(-1)[..., :-1]
        return self.torch.einsum("bqc,bqhw->bchw", shares, masks.sigmoid())


@pytest.fixture(params=WAYS)
def both(request, references, tmp_path):
    """The way, transformers' side, and our model of the same directory."""
    theirs = Theirs(references, tmp_path / "model", request.param)
    return request.param, theirs, EoMTImageSegmenter.from_preset(tmp_path / "model")


@pytest.mark.needs("transformers")
def test_segments_of_images_of_any_shape_are_those_of_transformers(both, tmp_path):
    way, theirs, model = both
    assert model.preprocessor.aspect_ratio == way
    pixels = theirs.given["pixel_values"].numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(
        model.preprocessor(pictures()), pixels, rtol=0, atol=tolerance("pictures")
    )
    wanted = theirs.outputs
    if way == "split":
        wanted.patch_offsets = theirs.given["patch_offsets"]
        maps = theirs.processor.post_process_semantic_segmentation(wanted, list(SIZES))
    else:  # transformers squeezes the padding into the image; only its panoptic side removes it
        sizes = theirs.processor.size
        maps = theirs.processor.unpad_image(theirs.scores(), list(SIZES), sizes)
        maps = [one.argmax(0) for one in maps]
    found = model.segment(pictures())
    assert [one.shape for one in found] == list(SIZES)
    same = [(ours == one.numpy()).mean() for ours, one in zip(found, maps, strict=True)]
    assert min(same) > 0.995, same
    assert len(np.unique(np.concatenate([one.ravel() for one in found]))) > 1
    np.testing.assert_array_equal(model.segment(pictures()[1]), found[1])
    stretched = ViTImageSegmenterPreprocessor(
        (SIDE, SIDE), model.preprocessor.mean, model.preprocessor.std
    )
    kept, model.preprocessor = model.preprocessor, stretched
    assert any(
        (a != b).mean() > 0.02 for a, b in zip(model.segment(pictures()), found, strict=True)
    )
    model.preprocessor = kept
    if way == "split":
        with pytest.raises(InputError, match="windows give classes of pixels alone; give one with"):
            model.segment_panoptic(pictures())
        return
    # transformers' functions look for the outputs of windows in what the model gives.
    panoptic = theirs.processor.post_process_panoptic_segmentation(
        wanted, list(SIZES), **THRESHOLDS
    )
    instances = theirs.processor.post_process_instance_segmentation(
        wanted, list(SIZES), threshold=0.2
    )
    pairs = [
        *zip(model.segment_panoptic(pictures(), **THRESHOLDS), panoptic, strict=True),
        *zip(model.segment_instances(pictures(), threshold=0.2), instances, strict=True),
    ]
    assert sum(len(one["segments_info"]) for one, _ in pairs) > 6
    for ours, one in pairs:
        assert (ours["segmentation"] == one["segmentation"].numpy()).mean() > 0.995
        kinds = [[part["label_id"] for part in x["segments_info"]] for x in (ours, one)]
        assert kinds[0] == kinds[1]


@pytest.mark.needs("transformers")
def test_transformers_reads_what_we_write_of_the_processor(both, tmp_path):
    way, theirs, model = both
    model.export_to_transformers(tmp_path / "out")
    again = theirs.kind.from_pretrained(tmp_path / "out")
    for name in ("size", "do_pad", "do_split_image", "image_mean", "image_std", "resample"):
        assert getattr(again, name) == getattr(theirs.processor, name), name
    pixels = again(pictures(), return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(pixels, theirs.given["pixel_values"].numpy())
    assert EoMTImageSegmenter.from_preset(tmp_path / "out").preprocessor.aspect_ratio == way
    # Others read the same directory, and stretch.
    linear = ViTImageSegmenter.from_preset(tmp_path / "out", num_classes=3)
    assert linear.preprocessor.aspect_ratio == way
    made = ViTImageClassifierPreprocessor.from_preset(tmp_path / "out")
    assert made(pictures()).shape == (len(SIZES), SIDE, SIDE, 3)


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
        starts = window_starts(length, side)
        assert starts[0] == 0 and length - side <= starts[-1] + side - 1 < length
        assert all(0 < b - a <= side for a, b in itertools.pairwise(starts))


@pytest.fixture
def segmenter():
    keras.utils.set_random_seed(0)
    made = ViTImageSegmenterPreprocessor((SIDE, SIDE), aspect_ratio="pad")
    return EoMTImageSegmenter(ViTBackbone(**SMALL), 5, made, **QUERIES)


def test_padding_is_of_no_class(segmenter):
    """A padded image trains as one in which the rest has no label."""
    image, mask = pictures()[1], np.random.default_rng(2).integers(0, 5, SIZES[1])
    images, masks = segmenter.preprocessor([image], [mask])
    rows = round(11 * SIDE / 30)
    assert images.shape == (1, SIDE, SIDE, 3) and masks.shape == (1, SIDE, SIDE)
    assert (masks[0, rows:] == 255).all() and (masks[0, :rows] < 5).all()
    black = (0 - np.array(segmenter.preprocessor.mean)) / np.array(segmenter.preprocessor.std)
    np.testing.assert_allclose(images[0, rows:], np.broadcast_to(black, images[0, rows:].shape))
    held = {"mask_labels": [np.ones((1, *SIZES[1]), int)], "class_labels": [np.array([2])]}
    segments = segmenter.preprocessor([image], held)[1]
    assert (
        not segments["mask_labels"][0, 0, rows:].any()
        and segments["mask_labels"][0, 0, :rows].all()
    )
    segmenter.compile(keras.optimizers.Adam(1e-3))
    losses = [segmenter.train_on_batch(images, masks, return_dict=True)["loss"] for _ in range(4)]
    assert np.isfinite(losses).all()


def test_the_way_is_kept_in_files(segmenter, tmp_path):
    segmenter.save_to_preset(tmp_path / "model")
    again = EoMTImageSegmenter.from_preset(tmp_path / "model")
    assert again.preprocessor.to_dict() == segmenter.preprocessor.to_dict()
    for ours, theirs in zip(again.segment(pictures()), segmenter.segment(pictures()), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    segmenter.preprocessor = ViTImageSegmenterPreprocessor((SIDE, SIDE), aspect_ratio="split")
    found = segmenter.segment(pictures())
    assert [one.shape for one in found] == list(SIZES)
    stacked = segmenter.segment(np.stack([pictures()[1]] * 2))
    np.testing.assert_array_equal(stacked, np.stack([found[1]] * 2))
    said = segmenter.predict_queries(pictures()[3])["class_queries_logits"]
    assert len(said) == len(window_starts(71, SIDE)) and segmenter.segment([]) == []


@pytest.mark.parametrize("way", WAYS)
def test_the_linear_head_keeps_shapes_too(way):
    """An image that is twice as wide as the model's is two windows, or fills half of one."""
    keras.utils.set_random_seed(1)
    sides = {"pad": (SIDE // 2, SIDE), "split": (SIDE, 2 * SIDE)}
    image = np.random.default_rng(3).integers(0, 256, (*sides[way], 3), "uint8")
    made = ViTImageSegmenterPreprocessor((SIDE, SIDE), aspect_ratio=way)
    model = ViTImageSegmenter(ViTBackbone(**SMALL), 5, made, use_batch_norm=False)
    kernel = np.random.default_rng(4).normal(size=(16, 5))
    model.output_dense.kernel.assign(kernel - kernel.mean(0))
    logits = to_numpy(model(made([image])))
    wanted = logits[0, : SIDE // 2] if way == "pad" else np.concatenate(list(logits), 1)
    assert len(np.unique(wanted.argmax(-1))) > 1
    found = model.segment([image])[0]
    assert (found == wanted.argmax(-1)).mean() > 0.99


def test_a_square_image_is_the_same_in_each_way(segmenter):
    square = pictures()[2]
    maps = []
    for way in ("stretch", "pad", "split"):
        segmenter.preprocessor = ViTImageSegmenterPreprocessor((SIDE, SIDE), aspect_ratio=way)
        maps.append(to_numpy(segmenter.segment(square)))
    np.testing.assert_array_equal(maps[0], maps[1])
    np.testing.assert_array_equal(maps[0], maps[2])


def test_messages():
    with pytest.raises(InputError, match="aspect_ratio is 'crop'; choose stretch or pad or split"):
        ViTImageSegmenterPreprocessor((16, 16), aspect_ratio="crop")
    with pytest.raises(InputError, match=r"image_size \(16, 24\); give a square one, or aspect_ra"):
        ViTImageSegmenterPreprocessor((16, 24), aspect_ratio="pad")
    windows = ViTImageSegmenterPreprocessor((16, 16), aspect_ratio="split")
    with pytest.raises(InputError, match="several images of one, which have no masks; train with"):
        windows([pictures()[0]], [np.zeros(SIZES[0], int)])
    with pytest.raises(InputError, match="converter has no counterpart for aspect_ratio='split'"):
        _ = windows.image_converter
