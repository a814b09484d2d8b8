"""The towers of CLIP (Radford et al. 2021): the text tower, and the ViT by keras-hub's name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import keras
import tokenizers

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import DTypeLike, Tensor
from kmodels.layers import Dense
from kmodels.layers.placement import of_family
from kmodels.models.blocks.encoder_block import EncoderBlock
from kmodels.models.blocks.encoder_config import GELUS, TextEncoderConfig, check_gelu, config_field
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.image_converter import ImageConverter
from kmodels.models.blocks.image_prompts import PromptsAndImages
from kmodels.models.blocks.inputs import OptionalInputs, Reordered
from kmodels.models.blocks.sizes import encoder
from kmodels.models.blocks.text_encoder import TextEncoderBackbone
from kmodels.models.blocks.text_encoder_files import Setting, TextTowerFormat, peft_names
from kmodels.models.blocks.tokenizer import BytePairTokenizer
from kmodels.models.vit.model import ViTBackbone
from kmodels.ops._wide import wide
from kmodels.registry import Family
from kmodels.task import Task
from kmodels.text import Tokenizer
from kmodels.text import settings as described
from kmodels.text.byte_level import END, START, build_words, read, words_decoder

# === Config ===


@dataclass(frozen=True)
class CLIPTextConfig(TextEncoderConfig):
    """Sizes of a CLIP text tower; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table. Other fields are those of `TextEncoderConfig`.
        end_token_id: id of the end token, at whose first position a text is pooled; None for the
            highest id of the text, which in CLIP's own vocabulary is the end token.

    Raises:
        InputError: for sizes that do not fit together.
    """

    causal: ClassVar[bool] = True
    intermediate_activation: str = "quick_gelu"
    end_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_token_id is not None:
            check_whole("end_token_id", self.end_token_id, 0)


# === Model ===


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextBlock(EncoderBlock):
    """`EncoderBlock` of a `CLIPTextConfig`."""

    config_class = CLIPTextConfig


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextEncoder(TextEncoderBackbone):
    """CLIP's text tower without its projection; arguments and calls are `TextEncoderBackbone`'s.

    Attention is causal, so the hidden state of the end token depends on the whole text and
    represents it. `intermediate_activation` is "quick_gelu" by default, and `max_sequence_length`
    77.

    Source:
        Radford et al., arXiv:2103.00020; Transformers' `modeling_clip`.
    """

    config_class = CLIPTextConfig
    block_class = CLIPTextBlock
    family = "clip"
    peft_names = staticmethod(peft_names)

    def pool(self, hidden: Tensor, token_ids: Tensor) -> Any:
        """Returns the hidden states of the end tokens: (B, T, D), (B, T) -> (B, D)."""
        end = self.config.end_token_id
        if end is not None:
            token_ids = keras.ops.cast(keras.ops.equal(token_ids, end), "int32")
        # argmax returns the first of equal numbers: padding may be the end token too.
        place = keras.ops.argmax(token_ids, axis=1)
        return Reordered()(hidden, keras.ops.expand_dims(place, 1))[:, 0]


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPVisionEncoder(ViTBackbone):
    """CLIP's vision tower without its projection (Radford et al. 2021).

    Args:
        intermediate_dim: width of the MLP, the `mlp_dim` of `ViTConfig`.
        intermediate_activation: "quick_gelu", "gelu" or "gelu_approximate".
        intermediate_output_index: None; `intermediates` returns the output of each block.
        **fields: of `ViTBackbone` and `ViTConfig`; `patch_size` is 32 by default.

    Raises:
        InputError: for another activation, or an `intermediate_output_index`.
    """

    named_inputs = True
    intermediate_dim = config_field("mlp_dim")

    @in_order(
        *("patch_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim"),
        *("intermediate_activation", "intermediate_output_index", "image_shape", "data_format"),
        *("dtype", "name"),
    )
    def __init__(
        self,
        intermediate_dim: int = 3072,
        intermediate_activation: str = "quick_gelu",
        intermediate_output_index: None = None,
        **fields: Any,
    ):
        check_gelu(intermediate_activation)
        if intermediate_output_index is not None:
            raise InputError(
                f"intermediate_output_index is {intermediate_output_index}; leave it out, and take "
                "the output of a block from intermediates(images)"
            )
        defaults: dict[str, Any] = {
            "patch_size": 32,
            "mlp_dim": intermediate_dim,
            "approximate_gelu": GELUS[intermediate_activation],
            "layer_norm_epsilon": 1e-5,
            "use_patch_bias": False,
            "pre_norm": True,
            "position_interpolation": "bicubic",
        }
        super().__init__(**{**defaults, **fields})

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True for presets of CLIP."""
        return name.startswith("clip_")


# === Text ===


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTokenizer(BytePairTokenizer):
    """`BytePairTokenizer` of lowercased texts, between <|startoftext|> and <|endoftext|>.

    Args:
        vocabulary: vocabulary, or its file, or a `tokenizers.Tokenizer`.
        merges: merges or their file; None with a `tokenizers.Tokenizer`.
        pad_with_end_token: pads rows with the end token instead of the token with id 0. The files
            of a checkpoint take precedence, and default to the end token.
        **kwargs: arguments of `LayerTokenizer`.
    """

    roles = {"start": START, "end": END}  # noqa: RUF012
    control_tokens = (START, END)
    build_core = staticmethod(build_words)
    unknown_token = END
    # Texts begin at the first position of a row.
    idle_at = {"padding_side": ("right",)}  # noqa: RUF012

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | Mapping[str, int] | str | Path,
        merges: Sequence[str] | str | Path | None = None,
        pad_with_end_token: bool = False,
        **kwargs: Any,
    ):
        pad = described.names(kwargs.get("settings") or {}).get("pad", END)
        if not isinstance(vocabulary, tokenizers.Tokenizer):
            vocabulary = read(vocabulary, merges, self.control_tokens, self.build_core)
            pad = END if pad_with_end_token else vocabulary.id_to_token(0)
        vocabulary.decoder = words_decoder()
        # End tokens in config.json are for pooling: there is no generation that they could stop.
        super().__init__(vocabulary, **{"pad": pad, **kwargs, "stop": ()})


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPPreprocessor(PromptsAndImages):
    """`PromptsAndImages` of CLIP, by default for rows of 77 tokens.

    Args:
        tokenizer: a `CLIPTokenizer`, another `kmodels.text.Tokenizer`, its `to_dict`, or a path.
        image_converter: a `CLIPImageConverter`, or None for text only.
        sequence_length: tokens of a row.
        add_start_token: adds the start token to each text.
        add_end_token: adds the end token to each text.
        to_lower: must be True, keras-hub's default: the tokenizer lowercases all texts.
        **kwargs: arguments of `keras.layers.Layer`.

    Raises:
        InputError: as `PromptsAndImages`, or for `to_lower=False`.
    """

    family = "clip"
    tokenizer_class = CLIPTokenizer
    reader = "CLIP's text tower"

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: ImageConverter | Mapping[str, Any] | None = None,
        sequence_length: int = 77,
        add_start_token: bool = True,
        add_end_token: bool = True,
        to_lower: bool = True,
        **kwargs: Any,
    ):
        if not to_lower:
            raise InputError(
                f"to_lower is {to_lower}, but CLIP's tokenizer lowercases all texts; leave it out"
            )
        ends = (add_start_token, add_end_token)
        super().__init__(tokenizer, image_converter, sequence_length, *ends, **kwargs)


# === Embedder ===


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextModelWithProjection(OptionalInputs, Task):
    """CLIP's text tower with its projection: one vector for each text, comparable with images'.

    Args:
        backbone: a `CLIPTextEncoder`.
        projection_dim: width of the projection, which has no bias; None for no projection.
        preprocessor: a `CLIPPreprocessor`, or None if the data are token ids.
        logit_scale: logarithm of the factor of the cosine similarities.
        head_dtype: policy of the projection; by default the dtype of the backbone's variables.
        name: name of the model.
        **kwargs: of `keras.Model`.

    Call:
        inputs of the backbone -> (B, projection_dim), or without projection (B, D); float32.
    """

    backbone_class = CLIPTextEncoder
    preprocessor_class = CLIPPreprocessor

    @of_family
    def __init__(
        self,
        backbone: CLIPTextEncoder,
        projection_dim: int | None = None,
        preprocessor: CLIPPreprocessor | None = None,
        logit_scale: float = math.log(1 / 0.07),
        head_dtype: DTypeLike = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        policy = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)

        # === Graph ===
        inputs = backbone.input
        hidden = backbone(inputs)
        if isinstance(hidden, dict):
            hidden = hidden["sequence_output"]
        x = backbone.pool(hidden, inputs["token_ids"])
        if projection_dim is not None:
            check_whole("projection_dim", projection_dim)
            x = Dense(projection_dim, use_bias=False, name="text_projection", dtype=policy)(x)
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=keras.ops.cast(x, wide(x)),
            name=name,
            **kwargs,
        )

        # === Config ===
        self.logit_scale = float(logit_scale)
        self.settings = {"projection_dim": projection_dim, "logit_scale": self.logit_scale}
        self.head_dtype = policy

    @property
    def gives_logits(self) -> bool:
        """False: the outputs are vectors, not logits."""
        return False

    def logits_per_image(self, image_embeds: Tensor, text_embeds: Tensor) -> Any:
        """Returns the logits of each image with each text.

        Args:
            image_embeds: (B, P), outputs of an image tower with a projection.
            text_embeds: (N, P), outputs of this model.

        Returns:
            (B, N): cosine similarities times exp(logit_scale).
        """
        images, texts = (keras.ops.normalize(x, axis=-1) for x in (image_embeds, text_embeds))
        return keras.ops.matmul(images, keras.ops.transpose(texts)) * math.exp(self.logit_scale)


# === Hugging Face ===

# transformers treats this end token as a mistake of old configs, and pools at the highest id.
WRONG_END = 2


def _read_end(path: Path, end: object) -> int | None:
    if not isinstance(end, int):
        raise InputError(f"{path}: eos_token_id is {end!r}; the model supports one number")
    return None if end == WRONG_END else end


def _write_end(end: int | None) -> int:
    if end == WRONG_END:
        raise InputError(
            f"transformers pools at the highest id where end_token_id is {WRONG_END}; give None"
        )
    return WRONG_END if end is None else end


FORMAT = TextTowerFormat(
    kinds=("clip_text_model", "clip"),
    architectures=("CLIPTextModel", "CLIPTextModelWithProjection"),
    defaults={
        **{"vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048},
        **{"num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77},
        **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0},
        **{"eos_token_id": 49_407, "projection_dim": 512},
    },
    others=("vision_model.", "visual_projection.", "logit_scale"),
    settings={"end_token_id": Setting("eos_token_id", _read_end, _write_end)},
)

# === Presets ===


def _size(layers: int, heads: int, activation: str = "gelu", head_dim: int = 64) -> dict[str, Any]:
    width = heads * head_dim
    return {
        **{"vocabulary_size": 49_408, "embedding_dim": width, "hidden_dim": width},
        **{"num_layers": layers, "num_heads": heads, "intermediate_dim": 4 * width},
        **{"intermediate_activation": activation, "task_projection_dim": width},
    }


PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2021, arXiv:2103.00020 table 20: the text towers of ViT-B and ViT-L.
    "clip_text_base": _size(12, 8, "quick_gelu"),
    "clip_text_large": _size(12, 12, "quick_gelu"),
    # OpenCLIP (Cherti et al. 2023, arXiv:2212.07143): the text towers of ViT-H and ViT-bigG.
    "clip_text_huge": _size(24, 16),
    "clip_text_bigg": _size(32, 20),
    # Below 100,000 parameters.
    "clip_text_debug": _size(2, 2, "quick_gelu", 16) | {"vocabulary_size": 320},
}

# === Family ===

FAMILY = Family(
    name="clip",
    backbone=CLIPTextEncoder,
    tasks=(CLIPTextModelWithProjection,),
    presets=PRESETS,
    formats=(FORMAT,),
    sizes=encoder,
    transformers_form=FORMAT.transformers_form,
    parts={"projection_dim": ("text_projection/",)},
    # Rows are by default as long as the position embedding.
    fit_preprocessor=lambda settings, config: {
        "sequence_length": config.max_sequence_length,
        **settings,
    },
)
