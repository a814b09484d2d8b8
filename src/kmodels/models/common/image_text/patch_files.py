"""transformers' files of a processor of images of any shape, read and written."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmodels.core.errors import InputError
from kmodels.models.common.image_text.transformers_files import (
    IMAGES,
    PROCESSOR,
    RESAMPLE,
    kernel_of,
    said,
)

if TYPE_CHECKING:
    from kmodels.models.common.image_text.patch_converter import PatchConverter

SIZES = ("patch_size", "max_soft_tokens", "pooling_kernel_size")
# What transformers' processors of this kind allow.
COUNTS = (70, 140, 280, 560, 1120)
MERGES = "Unified"


def read(path: Path, converter: str) -> dict[str, Any]:
    """Returns the arguments of a preprocessor that a directory of transformers holds.

    Args:
        path: the directory; one that holds none of the files, or those of kmodels, has no
            arguments.
        converter: name of the image converter, for errors.

    Raises:
        InputError: for a setting that the converter lacks, or a damaged file.
    """
    _, images = said(path)
    if not images:
        return {}
    kernel, absent = kernel_of(images, "bicubic")
    if images.get("do_normalize"):
        mean, std = images.get("image_mean") or [0.0], images.get("image_std") or [1.0]
        if any(mean) or any(x != 1.0 for x in std):
            absent.append("do_normalize")
    if absent:
        raise InputError(f"{converter} does not support {', '.join(absent)} of {IMAGES}")
    kind = str(images.get("image_processor_type", ""))
    held = {name: images[name] for name in SIZES if images.get(name) is not None}
    return {
        "image_converter": {**held, "interpolation": kernel, "merge_patches": MERGES in kind},
    }


def describe(converter: "PatchConverter", name: str) -> dict[str, Mapping[str, Any]]:
    """Returns what transformers' files say of a preprocessor, by the names of the files.

    Args:
        converter: the image converter.
        name: what transformers' classes begin with, such as "Gemma4".

    Raises:
        InputError: for a converter that transformers cannot express.
    """
    if converter.max_soft_tokens not in COUNTS:
        raise InputError(
            f"max_soft_tokens is {converter.max_soft_tokens}; transformers' {name}ImageProcessor "
            f"takes one of {', '.join(map(str, COUNTS))}"
        )
    images = {
        "image_processor_type": f"{name}ImageProcessor",
        "processor_class": f"{name}Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": False,
        "resample": RESAMPLE[converter.interpolation],
        "rescale_factor": 1 / 255,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        **{size: getattr(converter, size) for size in SIZES},
    }
    whole = {
        "processor_class": f"{name}Processor",
        "image_seq_length": converter.max_soft_tokens,
        "image_processor": images,
    }
    return {IMAGES: images, PROCESSOR: whole}
