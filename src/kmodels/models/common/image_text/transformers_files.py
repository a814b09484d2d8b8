"""preprocessor_config.json and processor_config.json of transformers, read and written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmodels.core.errors import InputError
from kmodels.core.schema import read_json
from kmodels.models.common.preprocessing import SETTINGS_FILE
from kmodels.text import Tokenizer
from kmodels.text.settings import token_text

if TYPE_CHECKING:
    from kmodels.models.common.image_text.pan_and_scan import PanAndScanConverter

CONFIG, PROCESSOR, IMAGES = "config.json", "processor_config.json", "preprocessor_config.json"
CROPS = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
# Where a tokenizer_config.json may have the tokens of images, besides at its top.
NESTED = ("extra_special_tokens", "model_specific_special_tokens")
RESAMPLE = {"nearest": 0, "lanczos3": 1, "bilinear": 2, "bicubic": 3}
CHANNELS = 3
HALF = [0.5] * CHANNELS


def read(path: Path, converter: str) -> dict[str, Any]:
    """Returns the arguments of a preprocessor that a directory of transformers holds.

    Args:
        path: the directory; one that holds none of the files, or those of kmodels, has no
            arguments.
        converter: name of the image converter, for errors.

    Raises:
        InputError: for a setting that the converter lacks, or a damaged file.
    """
    whole, images = said(path)
    found: dict[str, Any] = {}
    if images:
        found["image_converter"] = _converter(images, converter)
    count = whole.get("image_seq_length", images.get("image_seq_length"))
    if count is not None:
        found["num_vision_tokens_per_image"] = count
    return found


def converter_settings(
    path: Path, read: Callable[[Path, str], Mapping[str, Any]], converter: str
) -> dict[str, Any] | None:
    """Returns the arguments of an image converter that a directory holds; None if it has none.

    Args:
        path: the directory, of kmodels or transformers.
        read: makes arguments of transformers' files, as `read` here.
        converter: name of the image converter, for errors.
    """
    model, own = (
        read_json(path / name) if (path / name).is_file() else {}
        for name in (CONFIG, SETTINGS_FILE)
    )
    for held in (model.get("preprocessor"), own.get("config")):
        if isinstance(held, Mapping) and "image_converter" in held:
            return dict(held["image_converter"])
    return read(path, converter).get("image_converter")


def said(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns what the files of a directory say of a processor, and of its images.

    Args:
        path: the directory; one that holds none of the files, or those of kmodels, says nothing.
    """
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    if "preprocessor" in config or (path / SETTINGS_FILE).is_file():
        return {}, {}
    whole, images = (
        read_json(path / name) if (path / name).is_file() else {} for name in (PROCESSOR, IMAGES)
    )
    # Since version 5 one file holds both, and counts before what an older version left.
    nested = whole.get("image_processor")
    return whole, nested if isinstance(nested, Mapping) else images


def kernel_of(images: Mapping[str, Any], usual: str) -> tuple[str | None, list[str]]:
    """Returns the kernel that images are resized with, and what no converter here supports.

    Args:
        images: what the files say of images.
        usual: the kernel where they do not say it.
    """
    absent = [key for key in ("do_resize", "do_rescale") if images.get(key) is False]
    number = images.get("resample", RESAMPLE[usual])
    kernel = next((key for key, value in RESAMPLE.items() if value == number), None)
    if kernel is None:
        absent.append(f"resample {number}")
    if abs(images.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        absent.append(f"rescale_factor {images['rescale_factor']}")
    return kernel, absent


def _converter(images: Mapping[str, Any], name: str) -> dict[str, Any]:
    kernel, absent = kernel_of(images, "bilinear")
    size = images.get("size") or {}
    if set(size) != {"height", "width"}:
        absent.append(f"a size of {', '.join(size) or 'nothing'} in place of height and width")
    if absent:
        raise InputError(f"{name} does not support {', '.join(absent)} of {IMAGES}")
    normalizes = images.get("do_normalize") is not False
    mean = (images.get("image_mean") or HALF) if normalizes else [0.0] * CHANNELS
    std = (images.get("image_std") or HALF) if normalizes else [1.0] * CHANNELS
    return {
        "image_size": [size["height"], size["width"]],
        "scale": [1 / (255 * s) for s in std],
        "offset": [-m / s for m, s in zip(mean, std, strict=True)],
        "interpolation": kernel,
        # What is not said is said by the processor, whose numbers are the converter's own.
        **{key: images[key] for key in CROPS if images.get(key) is not None},
    }


def describe(
    converter: "PanAndScanConverter", num_vision_tokens_per_image: int, name: str
) -> dict[str, dict[str, Any]]:
    """Returns what transformers' files say of a preprocessor, by the names of the files.

    Both spellings are there: preprocessor_config.json is what older versions read, and newer ones
    read where processor_config.json does not hold the settings of images.

    Args:
        converter: the image converter.
        num_vision_tokens_per_image: tokens that an image fills.
        name: what transformers' classes begin with, such as "Gemma3".

    Raises:
        InputError: for a converter that transformers cannot express.
    """
    resizing = converter.resizing
    if resizing.crop_to_aspect_ratio or not resizing.antialias:
        raise InputError(
            f"transformers' {name}ImageProcessor has no counterpart for an image converter with "
            f"crop_to_aspect_ratio={resizing.crop_to_aspect_ratio} and "
            f"antialias={resizing.antialias}"
        )
    height, width = converter.size
    images = {
        "image_processor_type": f"{name}ImageProcessor",
        "processor_class": f"{name}Processor",
        "image_seq_length": num_vision_tokens_per_image,
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "size": {"height": height, "width": width},
        "resample": RESAMPLE[converter.interpolation],
        "rescale_factor": 1 / 255,
        "image_mean": list(converter.mean),
        "image_std": list(converter.std),
        **{key: getattr(converter, key) for key in CROPS},
    }
    whole = {
        "processor_class": f"{name}Processor",
        "image_seq_length": num_vision_tokens_per_image,
    }
    return {IMAGES: images, PROCESSOR: whole}


def image_tokens(tokenizer: Tokenizer, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the texts of a tokenizer's tokens for images, by transformers' names for them.

    Args:
        tokenizer: whose settings may name them.
        usual: texts of each that count where the settings name none.

    Raises:
        InputError: for a token that the vocabulary lacks.
    """
    held = tokenizer.settings
    named = [held, *(held[key] for key in NESTED if isinstance(held.get(key), Mapping))]
    found = {}
    for name, texts in usual.items():
        given = [token_text(settings.get(name)) for settings in named]
        there = (
            text
            for text in (*given, *texts)
            if text is not None and tokenizer.core.token_to_id(text) is not None
        )
        text = next(there, None)
        if text is None:
            raise InputError(
                f"the vocabulary has no {' or '.join(texts)}, which images need; use the tokenizer "
                "of a checkpoint with images"
            )
        found[name] = text
    return found
