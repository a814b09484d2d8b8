"""Gemma 4 with images of any aspect ratio: config, model, preprocessor, files, task, presets."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data, DTypeLike
from kmodels.data.images.any_picture import open_picture
from kmodels.models.blocks import huggingface as decoder
from kmodels.models.blocks import module_names
from kmodels.models.blocks.encoder_rules import below
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.inputs import NAMES
from kmodels.models.blocks.sizes import without_images
from kmodels.models.gemma import huggingface as text
from kmodels.models.gemma.huggingface import transformers_form as form_of_text
from kmodels.models.gemma.model import ORDER_4, Gemma4Backbone
from kmodels.models.gemma.presets import PRESETS as TEXT
from kmodels.models.gemma.tasks import Gemma4CausalLM
from kmodels.models.gemma.text import (
    CHATS,
    PROMPT_ORDER_4,
    Gemma4CausalLMPreprocessor,
    Gemma4Tokenizer,
    without_sound,
)
from kmodels.models.gemma_vision.gemma4_encoder import (
    BOUNDS,
    Gemma4VisionEmbedder,
    Gemma4VisionEncoder,
    PatchFeatures,
)
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
from kmodels.text import Example, Tokenizer
from kmodels.weights import LazyArray, Rule, transpose

# === Config ===


@dataclass(frozen=True)
class Gemma4ImageTextConfig(ImageTextConfig):
    """Sizes of a Gemma 4 that reads images; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table. Other fields are those of `GemmaConfig`.
        vision_encoder: arguments without `output_dim`, which is `hidden_dim`, of
            `Gemma4VisionEncoder`, or of `Gemma4VisionEmbedder`, which has no "num_layers"; "dtype"
            only if it differs from the text's.
        image_token_id: id of the token that a piece of an image fills.
        use_vision_bidirectional_attention: tokens of an image attend to each other in local layers,
            within the window; in global layers attention is causal.

    Raises:
        InputError: for sizes that do not fit together, or a model that is not causal.
    """

    advice = ", or set use_vision_bidirectional_attention"
    encoders = (
        "Gemma4VisionEncoder or of Gemma4VisionEmbedder, or take GemmaBackbone for text alone"
    )
    derived = ("output_dim", "name", "trainable", "image_size")
    image_token_id: int = 258_880
    use_vision_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.encoder()

    def encoder(self, name: str | None = None, dtype: DTypeLike = None) -> PatchFeatures:
        """Returns the layer that this config describes; its own dtype takes precedence."""
        arguments = {"name": name, "dtype": dtype, **(self.vision_encoder or {})}
        kind = Gemma4VisionEncoder if "num_layers" in arguments else Gemma4VisionEmbedder
        return kind(**arguments, output_dim=self.hidden_dim)

    @property
    def patch_width(self) -> int:
        """Numbers of each patch that comes in."""
        return self.encoder().side ** 2 * CHANNELS

    def looks_ahead(self, layer: int) -> bool:
        """See `DecoderConfig.looks_ahead`."""
        return self.use_vision_bidirectional_attention and self.is_local(layer)


# === Model ===

# Names of the parts in transformers' files: of the text, of the tower's blocks and their linear
# layers, and of the embedder of Gemma 4 12B, which has no tower.
LANGUAGE, TOWER, PROJECTOR = "model.language_model.", "model.vision_tower.", "model.embed_vision."
BLOCK, EMBEDDER = f"{TOWER}encoder.layers.{{i}}.", "model.vision_embedder."
LAYERS = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": "mlp.down_proj",
}
PEFT_TOWER = {
    "patch_embedding": "model.vision_tower.patch_embedder.input_proj",
    "input_projection": "model.embed_vision.embedding_projection",
    **{f"block_{{i}}/{ours}": f"{BLOCK}{theirs}.linear" for ours, theirs in LAYERS.items()},
}
PEFT_EMBEDDER = {
    "patch_embedding": "model.embed_vision.patch_dense",
    "input_projection": "model.embed_vision.multimodal_embedder.embedding_projection",
}


def peft_names(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    encoder = getattr(model, "backbone", model).vision_encoder
    texts = module_names.names(model, (LANGUAGE,), heads=("lm_head",))
    vision = PEFT_TOWER if isinstance(encoder, Gemma4VisionEncoder) else PEFT_EMBEDDER
    names = {f"vision_encoder/{ours}": theirs for ours, theirs in vision.items()}
    return [{**texts[0], **names}, *texts[1:]]


PIXELS = ("pixel_values", "pixel_position_ids")


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextBackbone(ImageTextBackbone, Gemma4Backbone):
    """A Gemma 4 that reads texts with images of any shape, without its output layer.

    Args:
        vision_encoder: a `Gemma4VisionEncoder` or, for the model without an encoder, a
            `Gemma4VisionEmbedder`, or the arguments of one. The model makes its own from it, in the
            dtype of the text unless the arguments have a dtype.
        **fields: fields of `Gemma4ImageTextConfig`.

    Call:
        {"token_ids", "padding_mask", "pixel_values": (B, M, P, C) floats from 0 to 1,
        "pixel_position_ids": (B, M, P, 2) int, column and row of each patch, -1 for padding,
        "vision_indices", "vision_mask"} -> hidden states (B, T, D), see `ImageTextBackbone`.

    Raises:
        InputError: for sizes that do not fit together, unknown fields, or a call with pixels
            without positions or more tokens of images than the images of a row fill.

    Source:
        Transformers' `Gemma4UnifiedForConditionalGeneration` with the attention masks of its
        `create_masks_for_generate`; its plain `forward` has an older rule.
    """

    config_class = Gemma4ImageTextConfig
    family = "gemma4_vision"
    takes_images = True
    takes = (*NAMES, *PIXELS, *PLACES)
    absent = ("padding_mask", *PIXELS, "vision_mask")
    image_inputs = PIXELS
    peft_names = staticmethod(peft_names)

    @in_order(*ORDER_4)
    def __init__(self, *, vision_encoder: PatchFeatures | Mapping[str, Any], **fields: Any):
        super().__init__(vision_encoder=self.vision_settings(vision_encoder), **fields)

    @classmethod
    def image_symbols(cls, config: Any, dtype: str) -> dict[str, Any]:
        """See `ImageTextBackbone.image_symbols`."""
        shapes = {"pixel_values": config.patch_width, "pixel_position_ids": 2}
        dtypes = (dtype, "int32")
        return {
            name: keras.Input((None, None, width), name=name, dtype=kind, optional=True)
            for (name, width), kind in zip(shapes.items(), dtypes, strict=True)
        }

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Raises `InputError` for pixels without positions, or more tokens than images fill."""
        super().check_inputs(inputs)
        names = [name for name in PIXELS if inputs.get(name) is not None]
        if len(names) == 1:
            raise InputError(f"the model got {names[0]} alone; give {' and '.join(PIXELS)}")
        wanted = self.config.patch_width
        if names and (width := inputs["pixel_values"].shape[-1]) != wanted:
            raise InputError(
                f"pixel_values have patches of {width} numbers, and the model takes {wanted}; give "
                "the image converter its patch_size, pooling_kernel_size and merge_patches"
            )
        mask, places = inputs.get("vision_mask"), inputs.get("pixel_position_ids")
        if not isinstance(mask, np.ndarray) or not isinstance(places, np.ndarray):
            return
        there = (places >= 0).all(-1).reshape(len(places), -1).sum(-1)
        have, need = there // self.config.encoder().patches_per_feature, mask.sum(axis=-1)
        if (short := np.flatnonzero(need > have)).size:
            row = int(short[0])
            raise InputError(
                f"row {row} has {int(need[row])} tokens for images, and its images have "
                f"{int(have[row])} pieces; give as many"
            )


# === Images and texts ===


SIZES = ("patch_size", "max_soft_tokens", "pooling_kernel_size")
# Values of max_soft_tokens that transformers' processors allow.
COUNTS = (70, 140, 280, 560, 1120)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageConverter(ImageTextConverter):
    """Resizes images in their aspect ratio and cuts them into patches; keras-hub's name.

    The sides of an image become multiples of `patch_size * pooling_kernel_size`, as large as
    `max_soft_tokens` pieces of this side allow. Pixels are equal to those of transformers'
    `Gemma4ImageProcessorPil`: a uint8 image is rounded to bytes after resizing, then scaled to
    [0, 1].

    Args:
        patch_size: side of the square patches, in pixels.
        max_soft_tokens: largest number of pieces of an image, each of which fills a token; 70, 140,
            280, 560 or 1120 in the checkpoints.
        pooling_kernel_size: patches along each side of a piece.
        merge_patches: makes each piece one patch; True for Gemma 4 12B, which has no encoder.
        interpolation: see `ImageConverter`.
        image_size: not used, as in keras-hub: the size follows from the image.
        scale: 1 / 255 or None.
        offset: 0 or None.
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Call:
        images (B, H, W, 3), one image (H, W, 3), or a list of images of any size and form, see
        `open_picture` -> {"pixel_values": float32 (B, P, side * side * 3), "pixel_position_ids":
        int32 (B, P, 2)}, column and row of each patch, padded with zeros and -1; without the first
        axis for one image.

    Raises:
        InputError: for numbers that are too small.
    """

    family = "gemma4_vision"

    def __init__(
        self,
        patch_size: int = 16,
        max_soft_tokens: int = 280,
        pooling_kernel_size: int = 3,
        merge_patches: bool = False,
        interpolation: str = "bicubic",
        *,
        image_size: object = None,
        scale: float | Sequence[float] | None = None,
        offset: float | Sequence[float] | None = None,
        **kwargs: Any,
    ):
        if not np.allclose((1 / 255 if scale is None else scale), 1 / 255) or np.any(offset or 0):
            raise InputError(
                f"scale is {scale} and offset {offset}; pixels go from 0 to 1: leave both out"
            )
        super().__init__(
            None, 1 / 255, None, False, interpolation=interpolation, antialias=True, **kwargs
        )
        check_whole("patch_size", patch_size)
        check_whole("max_soft_tokens", max_soft_tokens)
        check_whole("pooling_kernel_size", pooling_kernel_size)
        self.patch_size = patch_size
        self.max_soft_tokens = max_soft_tokens
        self.pooling_kernel_size = pooling_kernel_size
        self.merge_patches = merge_patches
        self.piece = patch_size * pooling_kernel_size
        self.side = self.piece if merge_patches else patch_size
        self.max_patches = max_soft_tokens * (self.piece // self.side) ** 2

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size (height, width) to which an image is resized, in pixels."""
        piece, most = self.piece, self.max_soft_tokens
        factor = math.sqrt(most * piece**2 / (height * width))
        rows, columns = (math.floor(factor * side / piece) for side in (height, width))
        if not rows:
            rows, columns = 1, min(max(width // height, 1), most)
        elif not columns:
            rows, columns = min(max(height // width, 1), most), 1
        return rows * piece, columns * piece

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """Returns an image resized and scaled to [0, 1], before it is cut.

        Args:
            image: (H, W, 3), uint8, or float32 with values from 0 to 255.

        Returns:
            float32 (1, height, width, 3), from 0 to 1.
        """
        pixels = self.resizing(image, self.size_of(*image.shape[:2]))
        # Kernels with negative lobes leave the range of pixels.
        pixels = pixels if pixels.dtype == np.uint8 else np.clip(pixels, 0.0, 255.0)
        return (pixels.astype("float64") * (1 / 255)).astype("float32")[None]

    def pieces(self, pixels: np.ndarray) -> int:
        """Returns the number of tokens of a result of `pixels`."""
        return pixels.shape[-3] * pixels.shape[-2] // self.piece**2

    def cut(self, image: np.ndarray, pixels: np.ndarray, places: np.ndarray) -> None:
        """Writes the patches of an image and their positions.

        Args:
            image: (height, width, 3), an image of `pixels`.
            pixels: (P, C), zeros.
            places: (P, 2), filled with -1.
        """
        side = self.side
        rows, columns = image.shape[0] // side, image.shape[1] // side
        patches = image.reshape(rows, side, columns, side, CHANNELS).transpose(0, 2, 1, 3, 4)
        pixels[: rows * columns] = patches.reshape(rows * columns, -1)
        numbers = np.arange(rows * columns)
        places[: rows * columns] = np.stack([numbers % columns, numbers // columns], -1)

    def empty(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns padding alone: patches (*shape, P, C) float32, positions (*shape, P, 2) int32."""
        whole = (*shape, self.max_patches)
        pixels = np.zeros((*whole, self.side**2 * CHANNELS), "float32")
        return pixels, np.full((*whole, 2), -1, "int32")

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns patches and positions of images; with labels or weights a tuple."""
        several = isinstance(x, list | tuple) or len(getattr(x, "shape", ())) == 4
        images: Any = x if several else [x]
        pixels, places = self.empty(len(images))
        for number, one in enumerate(images):
            self.cut(self.pixels(open_picture(one))[0], pixels[number], places[number])
        inputs = {"pixel_values": pixels, "pixel_position_ids": places}
        if not several:
            inputs = {name: array[0] for name, array in inputs.items()}
        return keras.utils.pack_x_y_sample_weight(inputs, y, sample_weight)

    def compute_output_spec(
        self, x: keras.KerasTensor, y: Data = None, sample_weight: Data = None
    ) -> Any:
        """Returns shapes and dtypes that `call` gives."""
        specs = {
            name: keras.KerasTensor((*x.shape[:-3], *array.shape), array.dtype.name)
            for name, array in zip(
                ("pixel_values", "pixel_position_ids"), self.empty(), strict=True
            )
        }
        return keras.utils.pack_x_y_sample_weight(specs, y, sample_weight)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {name: getattr(self, name) for name in (*SIZES, "merge_patches", "interpolation")}

    @classmethod
    def of_hub(cls, converter: keras.layers.Layer) -> Self:
        """Returns the converter with the settings of one of keras-hub."""
        return cls(**{name: getattr(converter, name) for name in SIZES})

    @classmethod
    def read_files(cls, path: Path) -> dict[str, Any]:
        """See `ImageTextConverter.read_files`."""
        _, images = processor_files(path)
        if not images:
            return {}
        kernel, absent = kernel_of(images, "bicubic")
        if images.get("do_normalize"):
            mean, std = images.get("image_mean") or [0.0], images.get("image_std") or [1.0]
            if any(mean) or any(x != 1.0 for x in std):
                absent.append("do_normalize")
        if absent:
            raise InputError(f"{cls.__name__} does not support {', '.join(absent)} of {IMAGES}")
        kind = str(images.get("image_processor_type", ""))
        sizes = {name: images[name] for name in SIZES if images.get(name) is not None}
        return {
            "image_converter": {
                **sizes,
                "interpolation": kernel,
                "merge_patches": "Unified" in kind,
            }
        }


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextLMPreprocessor(ImageTextLMPreprocessor, Gemma4CausalLMPreprocessor):
    """Turns texts with images into inputs, labels and weights of a Gemma 4.

    Arguments are those of `ImageTextLMPreprocessor` in keras-hub's order; those of audio and video
    must be None. The number of tokens of an image follows from its shape, so
    `num_vision_tokens_per_image` is not used. The tokenizer has <|image|>, the marker of an image,
    <|image> and <image|>. The template "gemma4" formats chats if the tokenizer has no chat
    template.

    Call:
        See `ImageTextLMPreprocessor`. Inputs of images are "pixel_values" (B, M, P, C) float32 and
        "pixel_position_ids" (B, M, P, 2) int32, padded with zeros and -1; "vision_indices"
        (B, M * max_soft_tokens) int32, the positions of the tokens that they fill, in order and
        followed by zeros; and "vision_mask" (B, T) int32, 1 at these positions. M is the largest
        number of images of a row, possibly 0.
    """

    family = "gemma4_vision"
    tokenizer_class = Gemma4Tokenizer
    converter_class = Gemma4ImageConverter
    reader = "Gemma 4"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma4CausalLMPreprocessor")
    chats = {"gemma4": replace(CHATS["gemma4"], image="<|image|>")}  # noqa: RUF012
    tokens = {  # noqa: RUF012
        "boi_token": ("<|image>",),
        "image_token": ("<|image|>",),
        "eoi_token": ("<image|>",),
    }

    @in_order(*PROMPT_ORDER_4)
    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: Gemma4ImageConverter | Mapping[str, Any] | None = None,
        num_vision_tokens_per_image: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(tokenizer, image_converter, **without_sound(type(self).__name__, kwargs))
        most = self.image_converter.max_soft_tokens
        if num_vision_tokens_per_image not in (None, most):
            warnings.warn(
                f"num_vision_tokens_per_image={num_vision_tokens_per_image} is not used: an image "
                f"takes the tokens of its shape, at most the converter's max_soft_tokens={most}",
                stacklevel=2,
            )
        self.num_vision_tokens_per_image = most

    @property
    def marker(self) -> str:
        """Text that marks the position of an image."""
        return self.image_tokens["image_token"]

    def text_of_image(self, pixels: np.ndarray) -> str:
        """Returns the text of an image (1, height, width, 3)."""
        return self.sequence(self.image_converter.pieces(pixels))

    def pictures(
        self, token_ids: np.ndarray, rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        """See `ImageTextLMPreprocessor.pictures`."""
        pictures = [[one for example in row for one in example.images] for row in rows]
        most = max(map(len, pictures), default=0)
        pixels, places = self.image_converter.empty(len(rows), most)
        indices = np.zeros((len(rows), most * self.image_converter.max_soft_tokens), "int32")
        mask = token_ids == self.image_token_id
        for row, images in enumerate(pictures):
            (there,) = np.nonzero(mask[row])
            if len(there) != (wanted := sum(map(self.image_converter.pieces, images))):
                raise InputError(
                    f"row {row} has {len(images)} images of {wanted} tokens together, which do not "
                    f"fit in {token_ids.shape[1]} tokens; give a larger sequence_length"
                )
            indices[row, : len(there)] = there
            for number, picture in enumerate(images):
                self.image_converter.cut(picture, pixels[row, number], places[row, number])
        named = {"pixel_values": pixels, "pixel_position_ids": places}
        return {**named, "vision_indices": indices, "vision_mask": mask.astype("int32")}

    def pictures_spec(self, shape: Sequence[int | None]) -> dict[str, keras.KerasTensor]:
        """See `ImageTextLMPreprocessor.pictures_spec`."""
        spec = self.image_converter.compute_output_spec
        return spec(keras.KerasTensor((*shape, None, None, 3)))

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        settings.pop("num_vision_tokens_per_image")
        return settings

    def transformers_files(self) -> dict[str, Mapping[str, Any]]:
        """Returns preprocessor_config.json and processor_config.json for transformers.

        Raises:
            InputError: for an image converter that transformers does not support.
        """
        converter = self.image_converter
        name = "Gemma4Unified" if converter.merge_patches else "Gemma4"
        if converter.max_soft_tokens not in COUNTS:
            raise InputError(
                f"max_soft_tokens is {converter.max_soft_tokens}; transformers' "
                f"{name}ImageProcessor takes one of {', '.join(map(str, COUNTS))}"
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


# === Hugging Face ===


# Arguments of the layer, with the settings of the same meaning and their usual values.
TOWER_SETTINGS: dict[str, tuple[str, Any]] = {
    "patch_size": ("patch_size", 16),
    "num_heads": ("num_attention_heads", 12),
    "hidden_dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 16),
    "intermediate_dim": ("intermediate_size", 3072),
    "head_dim": ("head_dim", 64),
    "num_key_value_heads": ("num_key_value_heads", 12),
    "pool_size": ("pooling_kernel_size", 3),
    "position_embedding_size": ("position_embedding_size", 10_240),
    "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
    "dropout": ("attention_dropout", 0.0),
    "use_clipped_linears": ("use_clipped_linears", False),
    "standardize": ("standardize", False),
}
ROPE = {"rope_type": "axial", "rope_theta": 100.0}
# The published files have the older name.
AXIAL = ("axial", "default")
TOWER_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
}
EMBEDDER_SETTINGS: dict[str, tuple[str, Any]] = {
    "patch_size": ("patch_size", 16),
    "pool_size": ("pooling_kernel_size", 3),
    "hidden_dim": ("mm_embed_dim", 3840),
    "position_embedding_size": ("mm_posemb_size", 1120),
    "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
}
EMBEDDER_NORMS = {
    "patch_ln1": "patch_norm",
    "patch_ln2": "patch_embedding_norm",
    "pos_norm": "position_norm",
}


def _tower_rules(encoder: Gemma4VisionEncoder) -> list[Rule]:
    front = f"{TOWER}patch_embedder."
    table = [
        Rule(f"{front}input_proj.weight", "patch_embedding/kernel", transpose),
        Rule(f"{front}position_embedding_table", "position_embeddings"),
        Rule(f"{PROJECTOR}embedding_projection.weight", "input_projection/kernel", transpose),
    ]
    for theirs, ours in TOWER_NORMS.items():
        table.append(Rule(f"{BLOCK}{theirs}.weight", f"block_{{i}}/{ours}/scale"))
    for ours, theirs in LAYERS.items():
        place = f"block_{{i}}/{ours}"
        table.append(Rule(f"{BLOCK}{theirs}.linear.weight", f"{place}/kernel", transpose))
        if encoder.use_clipped_linears:
            table += [Rule(f"{BLOCK}{theirs}.{name}", f"{place}/{name}") for name in BOUNDS]
    if encoder.standardize:
        table += [Rule(f"{TOWER}{name}", name) for name in ("std_bias", "std_scale")]
    return table


def _read_tower(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    rope = {**ROPE, **(vision.get("rope_parameters") or {})}
    activation = vision.get("hidden_activation", "gelu_pytorch_tanh")
    dropout = vision.get("attention_dropout") or 0.0
    return {"rope_max_wavelength": rope["rope_theta"], "dropout": dropout}, {
        f"hidden_activation={activation!r} of the vision tower": activation != "gelu_pytorch_tanh",
        "attention_bias of the vision tower": vision.get("attention_bias"),
        f"rope_type={rope['rope_type']!r} of the vision tower": rope["rope_type"] not in AXIAL,
    }


def _write_tower(encoder: Gemma4VisionEncoder) -> dict[str, Any]:
    rope = {**ROPE, "rope_theta": encoder.rope_max_wavelength}
    return {"hidden_activation": "gelu_pytorch_tanh", "rope_parameters": rope}


def _embedder_rules(encoder: Gemma4VisionEmbedder) -> list[Rule]:
    table = [
        Rule(f"{EMBEDDER}{theirs}.{theirs_end}", f"{ours}/{end}")
        for theirs, ours in EMBEDDER_NORMS.items()
        for theirs_end, end in (("weight", "scale"), ("bias", "bias"))
    ]
    return [
        *table,
        Rule(f"{EMBEDDER}patch_dense.weight", "patch_embedding/kernel", transpose),
        Rule(f"{EMBEDDER}patch_dense.bias", "patch_embedding/bias"),
        Rule(f"{EMBEDDER}pos_embedding", "position_embeddings"),
        Rule(f"{PROJECTOR}embedding_projection.weight", "input_projection/kernel", transpose),
    ]


def _read_embedder(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    inner = vision.get("mm_embed_dim", EMBEDDER_SETTINGS["hidden_dim"][1])
    width = vision.get("output_proj_dims", inner)
    return {}, {f"output_proj_dims={width}, which is to be mm_embed_dim": width != inner}


class Kind(NamedTuple):
    """A Gemma 4 with images in transformers' files.

    Attributes:
        architecture: transformers' class.
        sees: default of `use_bidirectional_attention`.
        vision: `model_type` of the vision_config.
        settings: arguments of the encoder to the settings of the same meaning and their defaults.
        read: takes a vision_config; returns further arguments, and by each unsupported feature
            whether it is used.
        write: takes an encoder; returns further settings.
        rules: takes an encoder; returns its rules, with the names of the published files.
    """

    architecture: str
    sees: str | None
    vision: str
    settings: Mapping[str, tuple[str, Any]]
    read: Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, object]]]
    write: Callable[[Any], dict[str, Any]]
    rules: Callable[[Any], list[Rule]]


# By `model_type`.
KINDS = {
    "gemma4": Kind(
        "Gemma4ForConditionalGeneration",
        None,
        "gemma4_vision",
        TOWER_SETTINGS,
        _read_tower,
        _write_tower,
        _tower_rules,
    ),
    "gemma4_unified": Kind(
        "Gemma4UnifiedForConditionalGeneration",
        "vision",
        "gemma4_unified_vision",
        EMBEDDER_SETTINGS,
        _read_embedder,
        lambda encoder: {"output_proj_dims": encoder.hidden_dim},
        _embedder_rules,
    ),
}
AUDIO = ("audio_tower", "embed_audio")
IMAGE_TOKEN, SEES = "image_token_id", "use_bidirectional_attention"


def kind_of(config: Gemma4ImageTextConfig) -> str:
    """Returns the `model_type` of a config."""
    has_tower = isinstance(config.encoder(), Gemma4VisionEncoder)
    return "gemma4" if has_tower else "gemma4_unified"


def rules(config: Gemma4ImageTextConfig) -> list[Rule]:
    """Returns the rules of a config, with transformers' names."""
    vision = KINDS[kind_of(config)].rules(config.encoder())
    return [*text.rules(config, LANGUAGE), *below("vision_encoder", vision)]


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Gemma4ImageTextConfig` for a config.json."""
    kind, vision = KINDS[description["model_type"]], description["vision_config"]
    encoder = {ours: vision.get(theirs, usual) for ours, (theirs, usual) in kind.settings.items()}
    more, wrong = kind.read(vision)
    named = vision.get("model_type", kind.vision)
    wrong = {f"model_type={named!r} of the vision_config": named != kind.vision, **wrong}
    decoder.refuse(path, wrong)
    sees = (description.get("text_config") or {}).get(SEES, kind.sees)
    return {
        **text.backbone_fields(path, description),
        "vision_encoder": {**encoder, **more},
        "image_token_id": description.get(IMAGE_TOKEN, Gemma4ImageTextConfig.image_token_id),
        "use_vision_bidirectional_attention": sees == "vision",
    }


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns (config.json, {}, rules, {}): the processor's files are `transformers_files`."""
    config = getattr(model, "backbone", model).config
    kind, encoder = KINDS[name := kind_of(config)], config.encoder()
    sees = "vision" if config.use_vision_bidirectional_attention else None
    written = {**form_of_text(model)[0], "model_type": f"{name}_text", SEES: sees}
    form = {
        "architectures": [kind.architecture],
        "model_type": name,
        "text_config": written,
        "vision_config": {
            "model_type": kind.vision,
            **{theirs: getattr(encoder, ours) for ours, (theirs, _) in kind.settings.items()},
            **kind.write(encoder),
        },
        "audio_config": None,
        IMAGE_TOKEN: config.image_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: written[name] for name in ("eos_token_id",) if name in written},
    }
    return form, {}, rules(config), {}


def parts(tensors: Mapping[str, LazyArray], config: Gemma4ImageTextConfig) -> Parts:
    """Returns the tensors in use, their rules, and the names of parts for audio."""
    audio = {name: part for name in tensors for part in AUDIO if f"{part}." in name}
    # Only of the text: a tower has layers with such names too.
    unused = tuple(decoder.unused(config))
    used = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in audio and not ("language_model." in name and name.endswith(unused))
    }
    return used, rules(config), [part for part in AUDIO if part in audio.values()]


FORMATS = tuple(
    ImageTextFormat(kind, Gemma4ImageTextConfig, fields, parts, Gemma4ImageConverter)
    for kind in KINDS
)


# === Task ===


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextLM(Gemma4CausalLM):
    """Gemma 4 for text generation from texts with images; see `Gemma4CausalLM`.

    Example:
        model = kmodels.models.Gemma4ImageTextLM.from_preset("path/to/hf_directory")
        model.generate({"prompts": "<|image|> What is this?", "images": "cat.jpg"})
    """

    backbone_class = Gemma4ImageTextBackbone
    takes_images = True
    preprocessor_class = Gemma4ImageTextLMPreprocessor
    takes = Gemma4ImageTextBackbone.takes
    absent = Gemma4ImageTextBackbone.absent

    def beside_transformer(self) -> tuple[dict[str, Mapping[str, Any]], list[Any]]:
        """Returns the processor's files for an export to transformers, and no rules."""
        return ({} if self.preprocessor is None else self.preprocessor.transformers_files()), []

    def check_mmproj(
        self, path: str | Path, dtype: str, text_only: bool, mmproj: str | Path | None
    ) -> None:
        """Raises `InputError` unless the GGUF file is for the text only."""
        if not text_only or mmproj is not None:
            raise InputError(
                "a GGUF file holds the text of a Gemma 4 alone, and its vision half has no file of "
                "llama.cpp here; give text_only=True, and leave mmproj out"
            )


# === Presets ===


_SEES = {"use_vision_bidirectional_attention": True}


def _tower(width: int, layers: int, heads: int, mlp: int, head: int, large: bool) -> dict[str, Any]:
    return {
        "vision_encoder": {
            **{"patch_size": 16, "num_heads": heads, "hidden_dim": width, "num_layers": layers},
            **{"intermediate_dim": mlp, "head_dim": head, "position_embedding_size": 10_240},
            **{"use_clipped_linears": not large, "standardize": large},
        }
    }


# The sizes with which transformers converts the published checkpoints (its
# `convert_gemma4_weights.py`), and the defaults of its `Gemma4UnifiedVisionConfig`.
_SMALL = _tower(768, 16, 12, 3072, 64, large=False)
_LARGE = _tower(1152, 27, 16, 4304, 72, large=True) | _SEES
_DEBUG = TEXT["gemma4_debug"] | {"image_token_id": 310}
PRESETS: dict[str, dict[str, Any]] = {
    "gemma4_e2b": TEXT["gemma4_e2b"] | _SMALL,
    "gemma4_e4b": TEXT["gemma4_e4b"] | _SMALL,
    "gemma4_12b": TEXT["gemma4_12b"] | _SEES | {"vision_encoder": {"hidden_dim": 3840}},
    "gemma4_26b_a4b": TEXT["gemma4_26b_a4b"] | _LARGE,
    "gemma4_31b": TEXT["gemma4_31b"] | _LARGE,
    "gemma4_vision_debug": _DEBUG
    | {
        "vision_encoder": {
            **{"patch_size": 2, "num_heads": 2, "hidden_dim": 24, "num_layers": 2, "head_dim": 8},
            **{"intermediate_dim": 40, "pool_size": 2, "position_embedding_size": 140},
        }
    },
    "gemma4_unified_debug": _DEBUG
    | _SEES
    | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
    | {
        "vision_encoder": {
            **{"hidden_dim": 24, "patch_size": 2, "pool_size": 2, "position_embedding_size": 70}
        }
    },
}


# === Family ===


def fit_preprocessor(settings: dict[str, Any], config: Gemma4ImageTextConfig) -> dict[str, Any]:
    """Returns arguments whose image converter cuts patches of the size that the model takes."""
    encoder = config.encoder()
    sizes = {
        "patch_size": encoder.patch_size,
        "pooling_kernel_size": encoder.pool_size,
        "merge_patches": encoder.side != encoder.patch_size,
    }
    return {**settings, "image_converter": {**(settings.get("image_converter") or {}), **sizes}}


FAMILY = Family(
    name="gemma4_vision",
    backbone=Gemma4ImageTextBackbone,
    tasks=(Gemma4ImageTextLM,),
    presets=PRESETS,
    formats=FORMATS,
    sizes=without_images,
    transformers_form=transformers_form,
    fit_preprocessor=fit_preprocessor,
)
