"""Describe a preprocessor of images as transformers does."""

from typing import Any

from kmodels.models.vit.exports.patches import patch_form
from kmodels.models.vit.weights.huggingface_config import INTERPOLATION


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
    numbers = {name: number for number, name in INTERPOLATION.items()}
    height, width = preprocessor.image_size
    way = getattr(preprocessor, "aspect_ratio", "stretch")
    kind: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": height, "width": width},
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
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": numbers[preprocessor.interpolation],
        "image_mean": list(preprocessor.mean),
        "image_std": list(preprocessor.std),
    }
