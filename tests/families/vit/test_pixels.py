"""Images as the processors of transformers and timm make them, read and written."""

import json
import logging
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import (
    NaFlexViTImageClassifierPreprocessor,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageSegmenterPreprocessor,
)
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import huggingface_config
from kmodels.models.vit.weights import timm as weights_timm
from kmodels.models.vit.weights.huggingface_config import picture_form
from refusals import refused
from torchvision_cpu import define_torchvision_operators

SHAPES = ((48, 48), (37, 91), (90, 41), (33, 35), (61, 250), (200, 77))
SQUARE, CROP = {"height": 24, "width": 24}, {"height": 24, "width": 24}
OBLONG = {"height": 40, "width": 32}
# Kinds of processors with settings, the latter over those of the kind.
PROCESSORS = {
    "vit": ("ViT", {"size": SQUARE}),
    "not rescaled": ("ViT", {"size": SQUARE, "do_rescale": False}),
    "other factor": ("ViT", {"size": SQUARE, "rescale_factor": 1 / 127.5, "resample": 1}),
    "not normalised": ("ViT", {"size": SQUARE, "do_normalize": False, "resample": 0}),
    "deit": ("DeiT", {"size": OBLONG, "crop_size": CROP}),
    "beit": ("Beit", {"size": OBLONG, "crop_size": CROP, "do_center_crop": True}),
    "beit uncropped": ("Beit", {"size": SQUARE, "crop_size": CROP}),
    "dinov2": ("Bit", {"size": {"shortest_edge": 29}, "crop_size": CROP, "do_convert_rgb": True}),
    "clip": ("CLIP", {"size": {"shortest_edge": 24}, "crop_size": CROP}),
    "clip by numbers": ("CLIP", {"size": 31, "crop_size": 24, "resample": 2}),
    "crop that pads": ("CLIP", {"size": {"shortest_edge": 18}, "crop_size": CROP}),
    "a crop that is no square": ("CLIP", {"size": {"shortest_edge": 30}, "crop_size": OBLONG}),
    "a crop of the image itself": ("CLIP", {"do_resize": False, "crop_size": OBLONG}),
    "siglip": ("Siglip", {"size": SQUARE, "do_convert_rgb": None}),
    "dinov3": ("DINOv3ViT", {"size": SQUARE}),
    "one number for both sides": ("CLIP", {"size": 31, "crop_size": 24, "default_to_square": True}),
    "one number for the shorter side": (
        "Beit", {"size": 31, "crop_size": CROP, "do_center_crop": True, "default_to_square": False},
    ),
    "padded to its size": ("ViT", {"size": SQUARE, "do_pad": True, "pad_size": SQUARE}),
    "padded to the largest": ("Siglip", {"size": SQUARE, "do_pad": True}),
}  # fmt: skip


def pictures():
    rng = np.random.default_rng(0)
    for height, width in SHAPES:
        small = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), "uint8")
        yield np.kron(small, np.ones((4, 4, 1), "uint8"))[:height, :width]


def read(folder, described, size=(24, 24)):
    (folder / "preprocessor_config.json").write_text(json.dumps(described))
    config = ViTConfig(image_shape=(*size, 3), patch_size=8)
    return ViTImageClassifierPreprocessor(**(huggingface_config.preprocessor(folder, config) or {}))


def levels(preprocessor, image, expected):
    """The largest difference in levels of bytes."""
    gap = np.abs(preprocessor(image) - expected) * np.asarray(preprocessor.std) * 255
    return gap.max()


def pixels(processor, image):
    return np.moveaxis(np.asarray(processor(image, return_tensors="np")["pixel_values"][0]), 0, -1)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_those_of_transformers(tmp_path, caplog, case):
    define_torchvision_operators()
    transformers = import_module("transformers")
    kind, settings = PROCESSORS[case]
    ending = "ImageProcessor" if kind == "DINOv3ViT" else "ImageProcessorPil"
    theirs = getattr(transformers, kind + ending)(**settings)
    described = json.loads(theirs.to_json_string())
    fast = {**settings, "image_processor_type": f"{kind}ImageProcessorFast"}
    for given in (described, fast):
        size = (40, 32) if settings.get("crop_size") == OBLONG else (24, 24)
        with caplog.at_level(logging.WARNING, "kmodels"):
            ours = read(tmp_path, given, size)
        assert not caplog.records
        written = getattr(transformers, picture_form(ours)["image_processor_type"] + "Pil")
        written = written(**picture_form(ours))
        for image in pictures():
            assert levels(ours, image, pixels(theirs, image)) <= 1.01
            assert levels(ours, image, pixels(written, image)) < 0.01
    stretched = {
        **ours.to_dict(),
        "resize_size": None,
        "resize_mode": "stretch",
        "mean": (0.4,) * 3,
        "interpolation": "nearest",
    }
    other = ViTImageClassifierPreprocessor(**stretched)
    assert levels(other, image, pixels(theirs, image)) > 4


@pytest.mark.needs("timm")
@pytest.mark.parametrize("share", [0.9, 0.875, 1.0, None])
@pytest.mark.parametrize("mode", ["center", "squash", "border", None])
@pytest.mark.parametrize("size", [(24, 24), (48, 48), (32, 24), (16, 40)])
def test_pixels_are_those_of_timm(share, mode, size):
    define_torchvision_operators()
    data, image_of = import_module("timm.data"), import_module("PIL.Image").fromarray
    told = {"mean": [0.4] * 3, "std": [0.3] * 3, "interpolation": "bicubic"}
    told |= {"crop_pct": share, "crop_mode": mode, "input_size": [3, 24, 24]}
    config, given = ViTConfig(image_shape=(24, 24, 3), patch_size=8), {"image_shape": (*size, 3)}
    told["mean"] = [0.2, 0.4, 0.75]
    described = {"pretrained_cfg": told}
    file = weights_timm.TimmFile(Path("x"), described, given, "vit_tiny_patch16_224", None, {})
    ours = ViTImageClassifierPreprocessor(**(file.preprocessor(config) or {}))
    resolved = data.resolve_data_config({"input_size": (3, *size)}, pretrained_cfg=told)
    theirs = data.create_transform(**resolved, is_training=False)
    for image in pictures():
        expected = np.moveaxis(theirs(image_of(image)).numpy(), 0, -1)
        assert levels(ours, image, expected) < 0.01


@pytest.mark.needs("timm")
@pytest.mark.parametrize(
    ("whole", "mode"),
    [
        *((whole, "stretch") for whole in (None, 26, 28, 33, (30, 30))),
        *(((28, 28), "fit"), ((40, 30), "fit"), ((40, 30), "cover"), ((35, 26), "cover")),
    ],
)
def test_what_is_written_for_timm_gives_the_same_pixels(tmp_path, whole, mode):
    define_torchvision_operators()
    data, image_of = import_module("timm.data"), import_module("PIL.Image").fromarray
    size = (32, 24) if whole in ((40, 30), (35, 26)) else (24, 24)
    backbone = ViTBackbone((*size, 3), patch_size=8, num_layers=1, num_heads=2, hidden_dim=16)
    ours = ViTImageClassifierPreprocessor(
        size, resize_size=whole, rounds_center=True, resize_mode=mode
    )
    ViTImageClassifier(backbone, 2, preprocessor=ours).export_to_timm(tmp_path / "out")
    told = json.loads((tmp_path / "out" / "config.json").read_text())["pretrained_cfg"]
    resolved = data.resolve_data_config(pretrained_cfg=told)
    theirs = data.create_transform(**resolved, is_training=False)
    again = ViTImageClassifier.from_preset(tmp_path / "out").preprocessor
    for image in pictures():
        expected = np.moveaxis(theirs(image_of(image)).numpy(), 0, -1)
        assert levels(ours, image, expected) < 0.01
        np.testing.assert_array_equal(again(image), ours(image))


def test_images_that_are_not_resized(tmp_path, caplog):
    for kind in ("ViT", "Siglip"):
        described = {"image_processor_type": f"{kind}ImageProcessor", "do_resize": False}
        preprocessor = read(tmp_path, described)
        assert not caplog.records and preprocessor.resize_mode == "none"
        image = next(pictures())[:24, :24]
        assert levels(preprocessor, image, (image / 255 - 0.5) / 0.5) < 0.01
        assert picture_form(preprocessor)["do_resize"] is False
        refused("is 25 x 24 pixels and resize_mode is", preprocessor, next(pictures())[:25, :24])
        again = ViTImageClassifierPreprocessor.from_config(preprocessor.get_config())
        refused("give images of 24 x 24", again, [np.zeros((24, 30, 3), "uint8")])


MODES = [
    ({"resize_mode": "fill"}, "resize_mode is 'fill'; choose one of stretch, cover"),
    ({"resize_mode": "fit"}, "'fit' with resize_size=None; give \\(height, width\\)"),
    ({"resize_mode": "cover", "resize_size": 20}, "with resize_size=20; give \\(height"),
    ({"resize_mode": "crop", "resize_size": 20}, "with resize_size=20; give None"),
    ({"resize_mode": "none", "crop_to_aspect_ratio": True}, "without crop_to_aspect_ratio"),
]


@pytest.mark.parametrize(("arguments", "message"), MODES)
def test_modes_that_do_not_go_with_sizes(arguments, message):
    refused(message, ViTImageClassifierPreprocessor, **arguments)


def test_what_other_packages_have_no_counterpart_for(tmp_path):
    fit = ViTImageClassifierPreprocessor((24, 24), resize_size=(28, 28), resize_mode="fit")
    refused("ViTImageProcessor has no counterpart for resize_mode='fit'", picture_form, fit)
    backbone = ViTBackbone((24, 24, 3), patch_size=8, num_layers=1, num_heads=2, hidden_dim=16)
    cover = ViTImageClassifierPreprocessor((24, 24), resize_size=(28, 28), resize_mode="cover")
    square = ViTImageClassifier(backbone, 2, preprocessor=cover)
    refused("one number for a square", square.export_to_timm, tmp_path / "out")
    plain = ViTImageClassifierPreprocessor((24, 24), resize_mode="none")
    model = ViTImageClassifier(backbone, 2, preprocessor=plain)
    message = "timm has no counterpart for resize_mode='none'"
    refused(message, model.export_to_timm, tmp_path / "out")
    refused("has no counterpart for resize_size=None and resize_mode='none'", getattr, plain,
            "image_converter")  # fmt: skip


# Settings that may be in the file of any processor, one after the other.
ANY_SETTING = (
    *({name: False} for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")),
    *({"resample": number} for number in range(4)),
    *({"do_resize": False, name: True} for name in ("do_center_crop", "do_pad", "do_split_image")),
    *({name: True} for name in ("do_center_crop", "do_pad", "do_split_image")),
    {"do_pad": True, "size": {"shortest_edge": 24, "longest_edge": 24}},
    {"do_split_image": True, "size": {"shortest_edge": 24}},
    *({"rescale_factor": 1 / 127.5}, {"image_mean": 0.4}, {"image_std": [0.1, 0.2, 0.3]}),
    *({"max_num_patches": 64}, {"do_center_crop": False}, {}),
)
OWN_CLASS = {"Siglip2": NaFlexViTImageClassifierPreprocessor, "Eomt": ViTImageSegmenterPreprocessor}
SHORTER = {"size": {"shortest_edge": 24}, "crop_size": CROP}
SIZES = {"Siglip2": {}, "Bit": SHORTER, "CLIP": SHORTER}


@pytest.mark.parametrize("kind", huggingface_config.DEFAULTS)
def test_what_is_read_is_written_again(tmp_path, caplog, kind):
    cls = OWN_CLASS.get(kind, ViTImageClassifierPreprocessor)
    config = ViTConfig(image_shape=(24, 24, 3), patch_size=8)

    def arguments(described):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
        settings = huggingface_config.preprocessor(tmp_path, config)
        return cls(**cls.fitted(settings, config))

    followed = 0
    for changes in ANY_SETTING:
        sizes = SIZES.get(kind, {"size": SQUARE, "crop_size": CROP})
        caplog.clear()
        made = arguments({"image_processor_type": f"{kind}ImageProcessor", **sizes, **changes})
        if caplog.records:
            continue  # a setting that is not followed
        followed += 1
        again = arguments(picture_form(made)).to_dict()
        for name, value in made.to_dict().items():
            close = np.allclose if name in ("mean", "std") else np.array_equal
            assert close(again[name], value), (changes, name, value, again[name])
    assert followed > 12


SEGMENTER = {"image_processor_type": "EomtImageProcessor"}
IGNORED = [
    ({"do_pad": True, "pad_size": OBLONG}, "sets do_pad=True with pad_size={'height': 40"),
    ({"do_pad": True, "size": {"shortest_edge": 24}}, "middle is taken\\), do_pad=True"),
    ({"do_pad": True, "size": {"longest_edge": 24}}, "longest_edge.*do_pad=True"),
    ({"do_flip_channel_order": True}, "sets do_flip_channel_order"),
    ({"size": {"shortest_edge": 24}}, "without do_center_crop"),
    ({"size": {"longest_edge": 24}}, "longest_edge"),
    ({"resample": 4}, "sets resample=4"),
    *(
        ({"image_processor_type": f"{kind}ImageProcessor"}, f"type='{kind}ImageProcessor', which")
        for kind in ("EfficientNet", "ConvNext", "Levit", "Donut")
    ),
    ({"size": 24, "default_to_square": False}, "size=24 without do_center_crop"),
    ({"size": 24, "image_processor_type": "SiglipImageProcessor"}, "size=24 without do_center"),
    ({"size": {"height": 32, "width": 32}}, "makes images of 32 x 32 pixels.*24 x 24"),
    (
        {**SEGMENTER, "size": {"height": 32, "width": 32}},
        "'width': 32} with aspect_ratio='stretch'",
    ),
    ({**SEGMENTER, "size": 24}, "size=24 with aspect_ratio='stretch'"),
    ({**SEGMENTER, "size": 16, "do_pad": True}, "size=16 with aspect_ratio='pad'"),
    ({**SEGMENTER, "size": 24, "do_split_image": True}, "size=24 with aspect_ratio='split'"),
    ({**SEGMENTER, "ignore_index": 0, "do_reduce_labels": True}, "labels=True, ignore_index=0"),
    ({"image_processor_type": "Siglip2ImageProcessor", "patch_size": 14}, "sets patch_size=14"),
]


@pytest.mark.parametrize(("changes", "message"), IGNORED)
def test_what_is_not_followed_is_logged_by_name(tmp_path, caplog, changes, message):
    described = {"image_processor_type": "ViTImageProcessor", "size": SQUARE, **changes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    with caplog.at_level(logging.WARNING, "kmodels"):
        huggingface_config.preprocessor(tmp_path, ViTConfig((24, 24, 3), patch_size=8))
    assert len(caplog.records) == 1 and re.search(message, caplog.text)


def test_pixels_times_zero_are_refused(tmp_path):
    for factor in (0, -1.0):
        refused("rescale_factor is .*; give a number above 0", read, tmp_path,
                {"rescale_factor": factor})  # fmt: skip


@pytest.mark.needs("transformers")
def test_every_setting_of_transformers_processors_has_a_place():
    define_torchvision_operators()
    transformers = import_module("transformers")
    known = huggingface_config.READ | huggingface_config.IDLE
    for kind in huggingface_config.DEFAULTS:
        ending = "ImageProcessor" if kind == "DINOv3ViT" else "ImageProcessorPil"
        described = getattr(transformers, kind + ending)()
        theirs = json.loads(described.to_json_string())
        assert not theirs.keys() - known, kind
        ours = {**huggingface_config.USUAL, **huggingface_config.DEFAULTS[kind]}
        for name, value in ours.items():
            if theirs.get(name) is None or name in ("size", "crop_size"):
                continue
            assert np.allclose(theirs[name], value), (kind, name)


def test_a_crop_follows_the_size_of_the_model():
    arguments = {"image_size": (224, 224), "resize_size": 256}
    family = import_module("kmodels.models.vit.preprocessor")
    assert family.fit_crop(arguments, (518, 518))["resize_size"] == 592
    assert family.fit_crop(arguments, (224, 224)) == arguments
    refused("resize_size is 0", ViTImageClassifierPreprocessor, resize_size=0)
    with pytest.raises(InputError, match="no counterpart for resize_size=256"):
        _ = ViTImageClassifierPreprocessor(resize_size=256).image_converter
