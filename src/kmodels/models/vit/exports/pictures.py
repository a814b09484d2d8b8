"""Describe a preprocessor of images as transformers does."""

import logging
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.vit.exports.patches import patch_form
from kmodels.models.vit.weights.huggingface_config import INTERPOLATION

log = logging.getLogger("kmodels")


def picture_form(preprocessor: Any) -> dict[str, Any]:
    """Returns preprocessor_config.json for a preprocessor of images; {} without one.

    Args:
        preprocessor: a `ViTImageClassifierPreprocessor`, or None.

    Raises:
        InputError: for one that transformers cannot express.
    """
    if preprocessor is None:
        return {}
    if hasattr(preprocessor, "max_num_patches"):
        return patch_form(preprocessor)
    preprocessor.check_plain("transformers' ViTImageProcessor")
    mode = preprocessor.resize_mode
    if mode in ("cover", "fit"):
        raise InputError(
            f"transformers' ViTImageProcessor has no counterpart for resize_mode={mode!r}; give "
            "'stretch', or the shorter side as resize_size"
        )
    if getattr(preprocessor, "rounds_center", False):
        log.warning(
            "transformers cuts the middle of an image out one pixel further left or up than timm "
            "where half a pixel is left; give rounds_center=False for what it gives"
        )
    numbers = {name: number for number, name in INTERPOLATION.items()}
    height, width = preprocessor.image_size
    way = getattr(preprocessor, "aspect_ratio", "stretch")
    whole = preprocessor.resize_size if way == "stretch" else None
    kind: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": height, "width": width},
        "do_center_crop": False,
    }
    if whole is not None or mode == "crop":
        # Of the processors that stretch and of those that keep the shape, one that crops.
        stretches = isinstance(whole, tuple)
        kind = {
            "image_processor_type": f"{'DeiT' if stretches else 'CLIP'}ImageProcessor",
            "size": (
                {"height": whole[0], "width": whole[1]}
                if stretches
                else {"shortest_edge": whole or min(height, width)}
            ),
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
        }
    if way != "stretch":
        kind = {
            "image_processor_type": "EomtImageProcessor",
            "size": {"shortest_edge": height, "longest_edge": height if way == "pad" else None},
            "do_pad": way == "pad",
            "do_split_image": way == "split",
        }
    return {
        **kind,
        "do_resize": mode not in ("crop", "none"),
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": numbers[preprocessor.interpolation],
        "image_mean": list(preprocessor.mean),
        "image_std": list(preprocessor.std),
    }
