"""Describe the patches of images of any aspect ratio as transformers does."""

from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.vit.naflex.preprocessor import NaFlexViTImageClassifierPreprocessor
from kmodels.models.vit.weights.huggingface_config import INTERPOLATION


def patch_form(preprocessor: NaFlexViTImageClassifierPreprocessor) -> dict[str, Any]:
    """Returns preprocessor_config.json for what makes patches of images of any aspect ratio.

    Args:
        preprocessor: a `NaFlexViTImageClassifierPreprocessor`.

    Raises:
        InputError: for one that keeps small images as they are, which transformers enlarges.
    """
    if not preprocessor.enlarge:
        raise InputError(
            "transformers' Siglip2ImageProcessor enlarges small images; the preprocessor has "
            "enlarge=False: give one with enlarge=True"
        )
    numbers = {name: number for number, name in INTERPOLATION.items()}
    return {
        "image_processor_type": "Siglip2ImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "patch_size": preprocessor.patch_size,
        "max_num_patches": preprocessor.max_num_patches,
        "resample": numbers[preprocessor.interpolation],
        "image_mean": list(preprocessor.mean),
        "image_std": list(preprocessor.std),
    }
