"""Gemma 3 with images: config, model, preprocessor, files of other packages, task, presets."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data
from kmodels.data.images.any_picture import open_picture
from kmodels.models.blocks import encoder_rules, module_names
from kmodels.models.blocks import huggingface as decoder
from kmodels.models.blocks.encoder_rules import below
from kmodels.models.blocks.gguf.writing import projector_dtype
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.image_converter import DIGITS, HUB, each_channel
from kmodels.models.blocks.inputs import NAMES
from kmodels.models.blocks.keras_hub_mapping import Settings
from kmodels.models.blocks.sizes import without_images
from kmodels.models.gemma import gguf
from kmodels.models.gemma import huggingface as text
from kmodels.models.gemma.huggingface import transformers_form as form_of_text
from kmodels.models.gemma.keras_hub import GEMMA3
from kmodels.models.gemma.model import ORDER_3, Gemma3Backbone
from kmodels.models.gemma.presets import PRESETS as TEXT
from kmodels.models.gemma.tasks import Gemma3CausalLM
from kmodels.models.gemma.text import CHATS, Gemma3CausalLMPreprocessor, Gemma3Tokenizer
from kmodels.models.gemma_vision import gemma3_files
from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder, tokens_per_image
from kmodels.models.gemma_vision.gemma3_files import ENCODER
from kmodels.models.gemma_vision.model import (
    PLACES,
    ImageTextBackbone,
    ImageTextConfig,
    ImageTextFormat,
    Parts,
)
from kmodels.models.gemma_vision.preprocessor import (
    CHANNELS,
    IMAGES,
    PROCESSOR,
    RESAMPLE,
    ImageTextConverter,
    ImageTextLMPreprocessor,
    kernel_of,
    processor_files,
)
from kmodels.registry import Family
from kmodels.text import Example
from kmodels.weights import LazyArray, Rule, SourceCheckpoint
from kmodels.weights.gguf import open_gguf, setting

# === Config ===


@dataclass(frozen=True)
class Gemma3ImageTextConfig(ImageTextConfig):
    """Sizes of a Gemma 3 that reads images; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table. Other fields are those of `GemmaConfig`.
        vision_encoder: arguments of `Gemma3VisionEncoder` without `output_dim`, which is
            `hidden_dim`; "dtype" only if it differs from the text's.
        image_token_id: id of the token that an image fills; it may lie outside the vocabulary.

    Raises:
        InputError: for sizes that do not fit together, or a model that is not causal.
    """

    encoders = "Gemma3VisionEncoder, or take Gemma3Backbone for text alone"
    image_token_id: int = 262_144

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens_per_image(**(self.vision_encoder or {}))

    def encoder(self, **settings: Any) -> Gemma3VisionEncoder:
        """Returns the vision encoder that this config describes."""
        arguments = {**settings, **(self.vision_encoder or {})}
        return Gemma3VisionEncoder(**arguments, output_dim=self.hidden_dim)

    @property
    def num_vision_tokens_per_image(self) -> int:
        """Tokens that stand for an image in a text."""
        return tokens_per_image(**(self.vision_encoder or {}))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the images."""
        size = (self.vision_encoder or {})["image_size"]
        return size, size, 3


# === Model ===


# In transformers 5 and older versions; the tower of the published files is one level deeper.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
TOWER_PREFIXES = (
    "model.vision_tower.",
    "model.vision_tower.vision_model.",
    "vision_tower.vision_model.",
)


def peft_names(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    texts = module_names.names(model, TEXT_PREFIXES, heads=("lm_head", "language_model.lm_head"))
    blocks = encoder_rules.names()
    towers: list[Mapping[str, str]] = [
        {f"vision_encoder/{ours}": f"{tower}{theirs}" for ours, theirs in blocks.items()}
        for tower in TOWER_PREFIXES
    ]
    return [{**texts[0], **towers[0]}, *texts[1:], *towers[1:]]


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageTextBackbone(ImageTextBackbone, Gemma3Backbone):
    """A Gemma 3 that reads texts with images, without its output layer.

    Args:
        vision_encoder: a `Gemma3VisionEncoder` or keras-hub's, or its arguments. The model makes
            its own encoder from it, in the dtype of the text unless the arguments have a dtype.
        image_size: side of the images, equal to that of the encoder, or None.
        **fields: fields of `Gemma3ImageTextConfig`.

    Call:
        {"token_ids", "padding_mask", "images": (B, M, height, width, C) preprocessed floats,
        "vision_indices", "vision_mask"} -> hidden states (B, T, D), see `ImageTextBackbone`. The
        tokens of an image attend to each other.

    Raises:
        InputError: for sizes that do not fit together, unknown fields, or a call with more tokens
            of images than the images of a row fill.

    Source:
        Gemma Team 2025, arXiv:2503.19786; Transformers' `Gemma3ForConditionalGeneration`.
    """

    config_class = Gemma3ImageTextConfig
    family = "gemma_vision"
    takes_images = True
    takes = (*NAMES, "images", *PLACES)
    absent = ("padding_mask", "images", "vision_mask")
    image_inputs = ("images",)
    peft_names = staticmethod(peft_names)

    @in_order(*ORDER_3)
    def __init__(
        self,
        *,
        vision_encoder: Gemma3VisionEncoder | Mapping[str, Any],
        image_size: int | None = None,
        **fields: Any,
    ):
        super().__init__(vision_encoder=self.vision_settings(vision_encoder, image_size), **fields)

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Raises `InputError` for a row with more tokens of images than its images fill."""
        super().check_inputs(inputs)
        mask, images = inputs.get("vision_mask"), inputs.get("images")
        if not isinstance(mask, np.ndarray) or images is None:
            return
        each, count = self.config.num_vision_tokens_per_image, images.shape[1]
        most = int(mask.sum(axis=-1).max(initial=0))
        if most > count * each:
            raise InputError(
                f"a row has {most} tokens for images, and its {count} images have "
                f"{count * each}; give each image {each} tokens"
            )

    @classmethod
    def image_symbols(cls, config: Any, dtype: str) -> dict[str, Any]:
        """See `ImageTextBackbone.image_symbols`."""
        shape = (None, *config.image_shape)
        return {"images": keras.Input(shape, name="images", dtype=dtype, optional=True)}


# === Images and texts ===


CROPPED = "Here is the original image {} and here are some crops to help you see better {}"
CROPS = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
HALF = [0.5] * CHANNELS


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageConverter(ImageTextConverter):
    """Resizes images to squares and can add crops of oblong ones (pan and scan); keras-hub's name.

    Pixels are equal to those of transformers' `Gemma3ImageProcessorPil`: a uint8 image is rounded
    to bytes after resizing, before normalization. Unlike keras-hub's defaults, images are
    antialiased and not cropped, as in training.

    Args:
        image_size: (height, width) in pixels.
        scale: a number, or one per channel; None for 1. By default pixels go from -1 to 1.
        offset: a number, or one per channel; None for 0.
        crop_to_aspect_ratio: see `ImageConverter`.
        pad_to_aspect_ratio: must be False.
        interpolation: see `ImageConverter`.
        antialias: see `ImageConverter`.
        data_format: "channels_last" or None.
        do_pan_and_scan: adds crops to oblong images; transformers' name, as the next three.
        pan_and_scan_min_crop_size: smallest side of a crop in pixels; images with smaller crops get
            none.
        pan_and_scan_max_num_crops: largest number of crops of an image.
        pan_and_scan_min_ratio_to_activate: smallest ratio of the longer to the shorter side.
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Call:
        images (B, H, W, 3), one image (H, W, 3), or a list of images of any size and form, see
        `open_picture` -> float32 (B, height, width, 3), or (height, width, 3) for one image,
        without crops.

    Raises:
        InputError: as `ImageConverter`, without `image_size`, or for a number that is too small.
    """

    family = "gemma_vision"

    def __init__(
        self,
        image_size: Sequence[int] = (896, 896),
        scale: float | Sequence[float] | None = 1 / 127.5,
        offset: float | Sequence[float] | None = -1.0,
        crop_to_aspect_ratio: bool = False,
        pad_to_aspect_ratio: bool = False,
        interpolation: str = "bilinear",
        antialias: bool = True,
        data_format: str | None = None,
        do_pan_and_scan: bool = False,
        pan_and_scan_min_crop_size: int = 256,
        pan_and_scan_max_num_crops: int = 4,
        pan_and_scan_min_ratio_to_activate: float = 1.2,
        **kwargs: Any,
    ):
        super().__init__(
            image_size,
            scale,
            offset,
            crop_to_aspect_ratio,
            pad_to_aspect_ratio,
            interpolation,
            antialias,
            data_format=data_format,
            **kwargs,
        )
        if self.image_size is None or len(self.image_size) != 2 or min(self.image_size) < 1:
            raise InputError(f"image_size is {image_size}; give (height, width), each at least 1")
        check_whole("pan_and_scan_min_crop_size", pan_and_scan_min_crop_size)
        check_whole("pan_and_scan_max_num_crops", pan_and_scan_max_num_crops)
        self.size = self.image_size
        self.do_pan_and_scan = do_pan_and_scan
        self.pan_and_scan_min_crop_size = pan_and_scan_min_crop_size
        self.pan_and_scan_max_num_crops = pan_and_scan_max_num_crops
        self.pan_and_scan_min_ratio_to_activate = pan_and_scan_min_ratio_to_activate
        scales = each_channel(1.0 if scale is None else scale, CHANNELS)
        offsets = each_channel(0.0 if offset is None else offset, CHANNELS)
        # transformers computes with this rounded form, and models were trained with it.
        self.std = [round(1 / (255 * x), DIGITS) for x in scales]
        self.mean = [round(-x * s, DIGITS) for x, s in zip(offsets, self.std, strict=True)]

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns converted images without crops; with labels or weights a tuple."""
        several = isinstance(x, list | tuple) or len(getattr(x, "shape", ())) == 4
        images: Any = x if several else [x]
        pixels = [self._resized(open_picture(one)) for one in images]
        done = self.scaled(np.stack(pixels) if several else pixels[0])
        return keras.utils.pack_x_y_sample_weight(done, y, sample_weight)

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """Returns an image and its crops, resized and normalized.

        Args:
            image: (H, W, 3), uint8, or float32 with values from 0 to 255.

        Returns:
            float32 (1 + crops, height, width, 3), the whole image first.
        """
        parts = [image, *(self.crops(image) if self.do_pan_and_scan else [])]
        return self.scaled(np.stack([self._resized(part) for part in parts]))

    def crops(self, image: np.ndarray) -> list[np.ndarray]:
        """Returns the crops of an image (H, W, C), none if it is too square or too small."""
        height, width = image.shape[:2]
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter < self.pan_and_scan_min_ratio_to_activate:
            return []
        smallest = self.pan_and_scan_min_crop_size
        # Half is rounded up, as transformers does and Python's own round does not.
        count = max(2, min(longer // smallest, math.floor(longer / shorter + 0.5)))
        count = min(self.pan_and_scan_max_num_crops, count)
        side = math.ceil(longer / count)
        if min(side, shorter) < smallest:
            return []
        axis = 0 if height > width else 1
        starts = [start for start in range(0, side * count, side) if start < longer]
        return [image.take(range(s, min(s + side, longer)), axis) for s in starts]

    def scaled(self, images: np.ndarray) -> np.ndarray:
        """Returns images (..., 3) in [0, 255] times `scale` plus `offset`."""
        if images.dtype != np.uint8:
            return self._normalized(images)
        # There are 256 results, which are faster looked up than computed for each pixel.
        table = self._normalized(np.repeat(np.arange(256, dtype="uint8")[:, None], 3, 1))
        if (table == table[:, :1]).all():
            return table[:, 0][images]
        return np.stack([column[images[..., i]] for i, column in enumerate(table.T)], -1)

    def _normalized(self, images: np.ndarray) -> np.ndarray:
        share = (images.astype("float64") * (1 / 255)).astype("float32")
        return (share - np.asarray(self.mean, "float32")) / np.asarray(self.std, "float32")

    def _resized(self, image: np.ndarray) -> np.ndarray:
        pixels = self.resizing(image, self.size)
        # The kernels with negative parts leave the range of pixels.
        return pixels if pixels.dtype == np.uint8 else np.clip(pixels, 0.0, 255.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {**super().to_dict(), **{name: getattr(self, name) for name in CROPS}}

    @classmethod
    def of_hub(cls, converter: keras.layers.Layer) -> Self:
        """Returns the converter with the settings of one of keras-hub."""
        config = converter.get_config()
        arguments = {n: config[n] for n in HUB if n != "image_size" or config[n] is not None}
        return cls(**arguments)

    @classmethod
    def read_files(cls, path: Path) -> dict[str, Any]:
        """See `ImageTextConverter.read_files`."""
        whole, images = processor_files(path)
        settings: dict[str, Any] = {}
        if images:
            settings["image_converter"] = cls._settings_of(images)
        count = whole.get("image_seq_length", images.get("image_seq_length"))
        if count is not None:
            settings["num_vision_tokens_per_image"] = count
        return settings

    @classmethod
    def _settings_of(cls, images: Mapping[str, Any]) -> dict[str, Any]:
        kernel, absent = kernel_of(images, "bilinear")
        size = images.get("size") or {}
        if set(size) != {"height", "width"}:
            absent.append(f"a size of {', '.join(size) or 'nothing'} in place of height and width")
        if absent:
            raise InputError(f"{cls.__name__} does not support {', '.join(absent)} of {IMAGES}")
        normalizes = images.get("do_normalize") is not False
        mean = (images.get("image_mean") or HALF) if normalizes else [0.0] * CHANNELS
        std = (images.get("image_std") or HALF) if normalizes else [1.0] * CHANNELS
        return {
            "image_size": [size["height"], size["width"]],
            "scale": [1 / (255 * s) for s in std],
            "offset": [-m / s for m, s in zip(mean, std, strict=True)],
            "interpolation": kernel,
            # The defaults are those of transformers' processor.
            **{key: images[key] for key in CROPS if images.get(key) is not None},
        }


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageTextLMPreprocessor(ImageTextLMPreprocessor, Gemma3CausalLMPreprocessor):
    """Turns texts with images into inputs, labels and weights of a Gemma 3.

    Arguments are those of `ImageTextLMPreprocessor`. The tokenizer has <start_of_image>, the
    marker of an image, <image_soft_token> (or <img>) and <end_of_image>. The template "gemma"
    formats chats if the tokenizer has no chat template.

    Call:
        See `ImageTextLMPreprocessor`. Inputs of images are "images" (B, M, height, width, 3)
        float32, zeros after those of a row; "vision_indices" (B, M * num_vision_tokens_per_image)
        int32, the positions of the tokens that they fill, in order and followed by zeros; and
        "vision_mask" (B, T) int32, 1 at these positions. M is the largest number of images and
        crops of a row, possibly 0.
    """

    family = "gemma_vision"
    tokenizer_class = Gemma3Tokenizer
    converter_class = Gemma3ImageConverter
    reader = "Gemma 3"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma3CausalLMPreprocessor")
    chats = {"gemma": replace(CHATS["gemma"], image="<start_of_image>")}  # noqa: RUF012
    tokens = {  # noqa: RUF012
        "boi_token": ("<start_of_image>",),
        "image_token": ("<image_soft_token>", "<img>"),
        "eoi_token": ("<end_of_image>",),
    }

    def text_of_image(self, pixels: np.ndarray) -> str:
        """Returns the text of an image with its crops (1 + crops, height, width, 3)."""
        one, crops = f"\n\n{self.sequence(self.num_vision_tokens_per_image)}\n\n", len(pixels) - 1
        return CROPPED.format(one, " ".join([one] * crops)) if crops else one

    def pictures(
        self, token_ids: np.ndarray, rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        """See `ImageTextLMPreprocessor.pictures`."""
        each = self.num_vision_tokens_per_image
        pictures = [[one for example in row for one in example.images] for row in rows]
        most = max(map(len, pictures), default=0)
        images = np.zeros((len(rows), most, *self.image_converter.size, 3), "float32")
        indices = np.zeros((len(rows), most * each), "int32")
        mask = token_ids == self.image_token_id
        for row, row_images in enumerate(pictures):
            (places,) = np.nonzero(mask[row])
            if len(places) != len(row_images) * each:
                raise InputError(
                    f"row {row} has {len(row_images)} images or crops of {each} tokens each, which "
                    f"do not fit in {token_ids.shape[1]} tokens; give a larger sequence_length"
                )
            indices[row, : len(places)] = places
            if row_images:
                images[row, : len(row_images)] = row_images
        return {"images": images, "vision_indices": indices, "vision_mask": mask.astype("int32")}

    def pictures_spec(self, shape: Sequence[int | None]) -> dict[str, keras.KerasTensor]:
        """See `ImageTextLMPreprocessor.pictures_spec`."""
        whole = (*shape, *self.image_converter.size, 3)
        return {"images": keras.KerasTensor(whole, "float32")}

    def transformers_files(self) -> dict[str, dict[str, Any]]:
        """Returns preprocessor_config.json and processor_config.json for transformers.

        Older versions read the former. Newer versions read it for settings of images that
        processor_config.json does not have.

        Raises:
            InputError: for an image converter that transformers does not support.
        """
        resizing = self.image_converter.resizing
        if resizing.crop_to_aspect_ratio or not resizing.antialias:
            raise InputError(
                "transformers' Gemma3ImageProcessor has no counterpart for an image converter with "
                f"crop_to_aspect_ratio={resizing.crop_to_aspect_ratio} and "
                f"antialias={resizing.antialias}"
            )
        height, width = self.image_converter.size
        images = {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "image_seq_length": self.num_vision_tokens_per_image,
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "size": {"height": height, "width": width},
            "resample": RESAMPLE[self.image_converter.interpolation],
            "rescale_factor": 1 / 255,
            "image_mean": list(self.image_converter.mean),
            "image_std": list(self.image_converter.std),
            **{key: getattr(self.image_converter, key) for key in CROPS},
        }
        whole = {
            "processor_class": "Gemma3Processor",
            "image_seq_length": self.num_vision_tokens_per_image,
        }
        return {IMAGES: images, PROCESSOR: whole}


# === Hugging Face ===


# Prefixes of the three parts: in the published files, in those of transformers 5, and as its
# modules are named.
TEXTS = ("language_model.model.", "model.language_model.")
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
TOWERS = (f"{TOWER}vision_model.", f"model.{TOWER}vision_model.", TOWER, f"model.{TOWER}")
PROJECTORS = (PROJECTOR, f"model.{PROJECTOR}")
# Positions stored in older files beside the position embedding, and an unused head.
UNUSED = ("embeddings.position_ids", "head.")
TOKENS, IMAGE_TOKEN = "mm_tokens_per_image", "image_token_index"
DEFAULTS = {TOKENS: 256, IMAGE_TOKEN: 262_144}
MARKS = {"boi_token_index": 255_999, "eoi_token_index": 256_000}


def rules(
    config: Gemma3ImageTextConfig,
    language: str = TEXTS[0],
    tower: str = TOWERS[0],
    projector: str = PROJECTORS[0],
) -> list[Rule]:
    """Returns the rules of a config with the prefixes of a file."""
    encoder = config.encoder(name="vision_encoder")
    vision = gemma3_files.rules(encoder.vit_config, tower, projector)
    return [*text.rules(config, language), *below("vision_encoder", vision)]


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Gemma3ImageTextConfig` for a config.json."""
    settings = {**DEFAULTS, **description}
    encoder, wrong = gemma3_files.settings(description["vision_config"] or {})
    side, tokens = encoder["image_size"] // encoder["patch_size"], math.isqrt(settings[TOKENS])
    wrong[f"{TOKENS}={settings[TOKENS]}"] = tokens**2 != settings[TOKENS] or side % tokens != 0
    decoder.refuse(path, wrong)
    return {
        **text.backbone_fields(path, description),
        "vision_encoder": {**encoder, "pool_size": side // tokens},
        "image_token_id": settings[IMAGE_TOKEN],
    }


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns (config.json, {}, rules, {}): the processor's files are `transformers_files`."""
    config = getattr(model, "backbone", model).config
    written = form_of_text(model)[0]
    encoder = config.encoder(name="vision_encoder")
    form = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": written,
        "vision_config": gemma3_files.form(encoder),
        TOKENS: encoder.num_vision_tokens_per_image,
        IMAGE_TOKEN: config.image_token_id,
        **MARKS,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: written[name] for name in ("eos_token_id",) if name in written},
    }
    return form, {}, rules(config), {}


def parts(tensors: Mapping[str, LazyArray], config: Gemma3ImageTextConfig) -> Parts:
    """Returns the tensors in use, their rules, and no parts that are left out."""
    language = _prefix(tensors, TEXTS, "embed_tokens.")
    tower = _prefix(tensors, TOWERS, "embeddings.")
    projector = _prefix(tensors, PROJECTORS, "")
    unused = tuple(tower + name for name in UNUSED)
    used = {name: tensor for name, tensor in tensors.items() if not name.startswith(unused)}
    return used, rules(config, language, tower, projector), []


def _prefix(tensors: Iterable[str], prefixes: Sequence[str], start: str) -> str:
    """Returns the prefix of the file's names, or the first one."""
    there = (x for x in prefixes if any(name.startswith(x + start) for name in tensors))
    return next(there, prefixes[0])


HUGGING_FACE = ImageTextFormat("gemma3", Gemma3ImageTextConfig, fields, parts, Gemma3ImageConverter)


# === keras-hub ===


def _hub_fields(settings: Settings) -> dict[str, Any]:
    encoder = settings[ENCODER]["config"]
    arguments = {name: encoder[name] for name in gemma3_files.NAMES}
    if (dtype := _policy(encoder)) != _policy(settings):
        arguments["dtype"] = dtype
    return {**GEMMA3.fields(settings), ENCODER: arguments}


def _hub_encoder(config: Gemma3ImageTextConfig) -> tuple[str, dict[str, Any]]:
    encoder = config.encoder()
    arguments = {name: getattr(encoder, name) for name in (*gemma3_files.NAMES, "output_dim")}
    if "dtype" in (own := config.vision_encoder or {}):
        arguments["dtype"] = own["dtype"]
    return "Gemma3VisionEncoder", arguments


def _hub_lacks_in(settings: Settings, task: Settings) -> list[str]:
    window = settings["sliding_window_size"] if settings["use_sliding_window_attention"] else None
    encoder = gemma3_files.lacking_in_hub(settings[ENCODER]["config"], window)
    return [*GEMMA3.unsupported_in(settings, task), *encoder]


def _hub_lacks_out(config: Gemma3ImageTextConfig, settings: Settings) -> list[str]:
    local = any(config.is_local(i) for i in range(config.num_layers))
    window = config.sliding_window_size if local else None
    encoder = gemma3_files.lacking_in_hub(config.encoder().get_config(), window)
    return [*GEMMA3.unsupported_out(config, settings), *encoder]


def _policy(config: Settings) -> str:
    policy = config["dtype"]
    return policy["config"]["name"] if isinstance(policy, Mapping) else str(policy)


def _image_token(tokenizer: Any) -> dict[str, Any]:
    number = getattr(tokenizer, "image_placeholder_id", None)
    return {} if number is None else {"image_token_id": int(number)}


# === GGUF ===


BESIDE, SOFT_TOKEN = "mmproj*.gguf", "<image_soft_token>"


class GGUFImageTextFormat:
    """Two GGUF files, of the text and of the vision encoder; the path is that of the text."""

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns True for a GGUF file."""
        return gguf.FORMAT_3.matches(path, description)

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads the settings of the text's file and of the vision encoder's file next to it."""
        text = gguf.FORMAT_3.open_checkpoint(path, description, overrides, weights)
        projectors = sorted(path.parent.glob(BESIDE))
        if len(projectors) != 1:
            names = ", ".join(file.name for file in projectors) or "nothing"
            raise InputError(
                f"{path} holds the text alone, and {names} called {BESIDE} lies beside it; put the "
                "one projector of its checkpoint there"
            )
        mmproj = gemma3_files.open_mmproj(projectors[0], text.backbone["hidden_dim"], weights)
        backbone = {**text.backbone, ENCODER: mmproj.fields}
        tokens = setting(open_gguf(path), "tokenizer.ggml.tokens", [])
        if SOFT_TOKEN in tokens:
            backbone["image_token_id"] = tokens.index(SOFT_TOKEN)
        config = Gemma3ImageTextConfig(**backbone)
        preprocessor = text.preprocessor and {
            **text.preprocessor,
            "num_vision_tokens_per_image": config.num_vision_tokens_per_image,
            "image_converter": {
                "image_size": list(config.image_shape[:2]),
                "scale": [1 / (255 * x) for x in mmproj.std],
                "offset": [-m / x for m, x in zip(mmproj.mean, mmproj.std, strict=True)],
            },
        }
        return replace(
            text,
            backbone=backbone,
            preprocessor=preprocessor,
            tensors={**text.tensors, **mmproj.tensors},
            rules=[*text.rules, *gemma3_files.mmproj_rules(config.encoder(name=ENCODER))],
        )


# === Task ===


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageTextLM(Gemma3CausalLM):
    """Gemma 3 for text generation from texts with images; see `Gemma3CausalLM`.

    Example:
        model = kmodels.models.Gemma3ImageTextLM.from_preset("path/to/hf_directory")
        model.generate({"prompts": "<start_of_image> What is this?", "images": "cat.jpg"})
    """

    backbone_class = Gemma3ImageTextBackbone
    takes_images = True
    preprocessor_class = Gemma3ImageTextLMPreprocessor
    takes = Gemma3ImageTextBackbone.takes
    absent = Gemma3ImageTextBackbone.absent

    def check_mmproj(
        self, path: str | Path, dtype: str, text_only: bool, mmproj: str | Path | None
    ) -> None:
        """See `CausalLM.check_mmproj`; without `text_only` there must be an `mmproj`."""
        if (mmproj is None) != text_only:
            raise InputError(
                f"a GGUF file of {type(self).__name__} holds the text alone; give mmproj=FILE for "
                "the vision encoder, or text_only=True to leave it out"
            )
        if mmproj is not None:
            if Path(mmproj) == Path(path):
                raise InputError(f"mmproj is {mmproj}, where the text goes; give another name")
            gemma3_files.check_mmproj(self.backbone.vision_encoder, mmproj, dtype)

    def write_mmproj(self, path: str | Path, dtype: str) -> Path:
        """See `CausalLM.write_mmproj`."""
        return gemma3_files.write_mmproj(self, path, projector_dtype(dtype))

    def beside_transformer(self) -> tuple[dict[str, Any], list[Any]]:
        """Returns the processor's files for an export to transformers, and no rules."""
        return ({} if self.preprocessor is None else self.preprocessor.transformers_files()), []


# === Presets ===


# Gemma Team 2025 (arXiv:2503.19786), section 2.1: SigLIP's So400m tower for 896 pixels, 256 tokens.
SO400M: dict[str, Any] = {
    "image_size": 896,
    "patch_size": 14,
    "num_heads": 16,
    "hidden_dim": 1152,
    "num_layers": 27,
    "intermediate_dim": 4304,
    "pool_size": 4,
}
# The embedding table has 64 rows more than that of the text models, for the token of images.
SEEING = {"vision_encoder": SO400M, "vocabulary_size": 262_208}
PRESETS: dict[str, dict[str, Any]] = {
    "gemma3_4b": TEXT["gemma3_4b_text"] | SEEING,
    "gemma3_12b": TEXT["gemma3_12b_text"] | SEEING,
    "gemma3_27b": TEXT["gemma3_27b_text"] | SEEING,
    "gemma3_vision_debug": TEXT["gemma3_debug"]
    | {"image_token_id": 320}
    | {
        "vision_encoder": {
            **{"image_size": 16, "patch_size": 4, "pool_size": 2, "num_layers": 2},
            **{"num_heads": 2, "hidden_dim": 24, "intermediate_dim": 40},
        }
    },
}


# === Family ===


KERAS_HUB = replace(
    GEMMA3,
    ours=Gemma3ImageTextBackbone,
    our_task=Gemma3ImageTextLM,
    fields=_hub_fields,
    unsupported_in=_hub_lacks_in,
    unsupported_out=_hub_lacks_out,
    arguments=lambda config: {**GEMMA3.arguments(config), "image_size": config.image_shape[0]},
    table=lambda config: [
        *GEMMA3.table(config),
        *below(ENCODER, gemma3_files.hub_rules(config.encoder().vit_config)),
    ],
    belongs=lambda config, settings: True,
    ignored=(),
    part=ENCODER,
    make_part=_hub_encoder,
    from_tokenizer=_image_token,
)
FAMILY = Family(
    name="gemma_vision",
    backbone=Gemma3ImageTextBackbone,
    tasks=(Gemma3ImageTextLM,),
    presets=PRESETS,
    formats=(HUGGING_FACE, GGUFImageTextFormat()),
    sizes=without_images,
    transformers_form=transformers_form,
    keras_hub=(KERAS_HUB,),
)
