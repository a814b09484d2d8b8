"""Qwen 3, dense (Qwen Team 2025): config, model, text, tasks, files, presets.

Differences from Gemma 3: norms multiply by their scale alone, the gate of the MLP is SiLU,
embeddings are not scaled, attention and MLP have no post-norm, and large sizes have an untied
output layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import check_whole
from kmodels.models.blocks import huggingface as decoder
from kmodels.models.blocks.causal_lm import CausalLM
from kmodels.models.blocks.config import BlockConfig, DecoderConfig, check_positive
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.decoder_block import DecoderBlock
from kmodels.models.blocks.embedder.preprocessor import HubEmbedderPreprocessor
from kmodels.models.blocks.embedder.task import PARTS, HubEmbedder
from kmodels.models.blocks.gguf import reading, tensors
from kmodels.models.blocks.gguf.writing import (
    GGUFExport,
    GGUFForm,
    settings,
    without_place_in_yarn,
    yarn_settings,
)
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
from kmodels.models.blocks.rope import Yarn, check_alone
from kmodels.models.blocks.sizes import sizes
from kmodels.models.blocks.tokenizer import BytePairTokenizer
from kmodels.registry import Family
from kmodels.text import Turns
from kmodels.text.gguf import BYTES
from kmodels.weights import Rule

# === Config ===


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a dense Qwen 3 backbone; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table. Other fields are those of `DecoderConfig`.
        rope_max_wavelength: base of the rotary embedding, 1,000,000 in the published models.
        rope_scaling_factor: divides the positions.
        rope_yarn: arguments of `Yarn`, such as {"factor": 4.0, "original_max_position_embeddings":
            32768}, for contexts longer than in training; rope_scaling_factor must then be 1.
        sliding_window_size: number of keys that a query attends to, its own included; None for
            full causal attention.
        attention_bias: biases in all four projections of the attention, as in transformers; the
            published models have none.

    Raises:
        InputError: for sizes that do not fit together.
    """

    rope_max_wavelength: float = 10_000.0
    rope_scaling_factor: float = 1.0
    sliding_window_size: int | None = None
    attention_bias: bool = False
    rope_yarn: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window_size is not None:
            check_whole("sliding_window_size", self.sliding_window_size)
        check_positive(self, "rope_max_wavelength", "rope_scaling_factor")
        if self.yarn is not None:
            check_alone("rope_yarn", {"rope_scaling_factor": self.rope_scaling_factor})

    @property
    def yarn(self) -> Yarn | None:
        """The settings of YaRN, or None."""
        return None if self.rope_yarn is None else Yarn.of(self.rope_yarn)

    @property
    def published_length(self) -> int:
        """`max_sequence_length` of the published models."""
        return 40_960

    def block(self, index: int) -> BlockConfig:
        """Returns the settings of a block; all blocks are the same."""
        yarn, scaling = self.yarn, self.rope_scaling_factor
        return self.plain_block(
            query_scale=self.head_dim**-0.5 * (yarn.query_scale if yarn else 1.0),
            rope_wavelength=self.rope_max_wavelength,
            rope_scaling=(
                yarn.divisors(self.head_dim, self.rope_max_wavelength) if yarn else scaling
            ),
            window=self.sliding_window_size,
            use_query_key_norm=True,
            use_bias=self.attention_bias,
            use_output_bias=self.attention_bias,
        )


# === Model ===


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3Block(DecoderBlock):
    """`DecoderBlock` of a `Qwen3Config`."""

    config_class = Qwen3Config


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3Backbone(DecoderBackbone):
    """A dense Qwen 3 without its output layer; arguments are in keras-hub's order.

    Args:
        *args: see `DecoderBackbone`.
        **kwargs: the other fields of `Qwen3Config`.

    Call:
        {"token_ids", "padding_mask"}, each (B, T) int -> hidden states (B, T, D).

    Source:
        Qwen Team, arXiv:2505.09388; Transformers' `modeling_qwen3`.
    """

    config_class = Qwen3Config
    block_class = Qwen3Block
    family = "qwen3"

    __init__ = in_order(
        *("vocabulary_size", "num_layers", "num_query_heads", "num_key_value_heads", "head_dim"),
        *("hidden_dim", "intermediate_dim", "rope_max_wavelength", "rope_scaling_factor"),
        *("layer_norm_epsilon", "dropout", "tie_word_embeddings", "sliding_window_size", "dtype"),
    )(DecoderBackbone.__init__)


# === Text ===

BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# ChatML, as in the chat template of the checkpoints.
CHATS = {
    "qwen3": Turns(
        user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
        model=END,
        between="\n",
        tokens=(BEGIN, END),
    )
}


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3Tokenizer(BytePairTokenizer):
    """`BytePairTokenizer` with <|im_end|> as end token and <|endoftext|> as padding."""

    roles = {"end": END, "pad": PAD}  # noqa: RUF012
    control_tokens = (PAD, BEGIN, END)


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3CausalLMPreprocessor(CausalLMPreprocessor):
    """`CausalLMPreprocessor` of Qwen 3, which has no start token.

    The template "qwen3" is the chat format of the checkpoints, without thinking.
    """

    family = "qwen3"
    tokenizer_class = Qwen3Tokenizer
    chats = CHATS
    reader = "Qwen 3"


# === Hugging Face ===

# transformers' configs omit settings that equal these defaults.
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "head_dim": 128},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 32_768},
    **{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
}


def rules(config: Qwen3Config, prefix: str = "model.") -> list[Rule]:
    """Returns the rules of a config; `prefix` is empty for a model without its output layer."""
    return decoder.rules(config, decoder.NORMS | decoder.HEAD_NORMS, prefix)


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Qwen3Config` for a config.json.

    Raises:
        InputError: lists the settings that are not supported.
    """
    text = {**DEFAULTS, **description}
    window, local = _window(text)
    wrong = {
        f"an activation {text['hidden_act']!r}": text["hidden_act"] != "silu",
        "windows in some layers alone": len(local) == 2,
        f"layers with a window and sliding_window={text['sliding_window']!r}, "
        f"use_sliding_window={text['use_sliding_window']!r}": True in local and not window,
    }
    decoder.refuse(path, wrong)
    # As in transformers, the older name takes precedence.
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    length = text["max_position_embeddings"]
    rope = decoder.rope(path, scaling, text.get("rope_theta"), 10_000.0, length)
    return decoder.fields(text) | {
        "rope_max_wavelength": rope.base,
        "rope_scaling_factor": rope.scaling,
        "tie_word_embeddings": bool(text["tie_word_embeddings"]),
        "rope_yarn": rope.yarn,
        "sliding_window_size": window if True in local else None,
        "attention_bias": bool(text.get("attention_bias")),
    }


def _window(text: dict[str, Any]) -> tuple[int | None, set[bool]]:
    """Returns the window or None, and which of True and False tell if a layer uses it."""
    window = text["sliding_window"] if text["use_sliding_window"] else None
    if (types := text.get("layer_types")) is not None:
        return window, {kind == "sliding_attention" for kind in types}
    first = text["max_window_layers"]
    layers = range(text["num_hidden_layers"])
    return window, {window is not None and i >= first for i in layers}


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns (config.json, {}, rules, {}): there is no image processor and no zero tensor.

    Args:
        model: a backbone or causal model. A backbone with an untied output layer is written as a
            causal model.
    """
    config = getattr(model, "backbone", model).config
    window = config.sliding_window_size
    form = {
        "hidden_act": "silu",
        **decoder.rope_form(
            config.rope_max_wavelength, config.rope_scaling_factor, config.rope_yarn
        ),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": decoder.layer_types(config),
    }
    names = ("qwen3", "Qwen3ForCausalLM", "Qwen3Model")
    return decoder.transformers_form(model, names, form, rules)


HUGGING_FACE = decoder.HuggingFaceFormat(("qwen3",), Qwen3Config, fields, rules)


# === GGUF ===

ARCHITECTURE = "qwen3"


def gguf_rules(config: Qwen3Config) -> list[Rule]:
    """Returns the rules of the GGUF file of a config."""
    return tensors.rules(config, tensors.NORMS | tensors.HEAD_NORMS)


def _gguf_fields(file: reading.File) -> dict[str, Any]:
    base, scaling, yarn = file.rope(1_000_000.0)
    return file.fields(head_dim=128) | {
        "rope_max_wavelength": base,
        "rope_scaling_factor": scaling,
        "rope_yarn": yarn,
    }


# llama.cpp's pooling by the last token of a text, for embedders.
LAST_TOKEN = 3
GGUF = reading.GGUFFormat(
    "Qwen 3",
    (ARCHITECTURE,),
    Qwen3Config,
    _gguf_fields,
    gguf_rules,
    idle_at={"pooling_type": (0, LAST_TOKEN)},
)


def gguf_form(config: Qwen3Config) -> GGUFForm:
    """Returns the settings of the GGUF file of a config, and those that it cannot hold."""
    absent = {
        **without_place_in_yarn(config.rope_yarn),
        "attention_bias": config.attention_bias,
        "sliding_window_size": config.sliding_window_size,
    }
    rope = (config.rope_max_wavelength, config.rope_scaling_factor)
    return GGUFForm(
        architecture=ARCHITECTURE,
        settings={**settings(config, config.head_dim, *rope), **yarn_settings(config.yarn)},
        vocabulary=BYTES,
        absent=[name for name, there in absent.items() if there],
    )


GGUF_EXPORT = GGUFExport(GGUF, gguf_form)


# === Tasks ===


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3CausalLM(CausalLM):
    """Qwen 3 for text generation; arguments and methods are those of `CausalLM`."""

    backbone_class = Qwen3Backbone
    preprocessor_class = Qwen3CausalLMPreprocessor
    gguf_export = GGUF_EXPORT


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3TextEmbedderPreprocessor(HubEmbedderPreprocessor):
    """`HubEmbedderPreprocessor` of Qwen 3, which has no start token."""

    family = "qwen3"
    tokenizer_class = Qwen3Tokenizer
    reader = "Qwen 3"
    siblings = ("Qwen3CausalLMPreprocessor",)


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3TextEmbedder(HubEmbedder):
    """Qwen 3 for text embeddings, one vector per text; see `HubEmbedder`."""

    backbone_class = Qwen3Backbone
    preprocessor_class = Qwen3TextEmbedderPreprocessor


# === Presets ===


def _size(
    layers: int, heads: int, width: int, intermediate: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "vocabulary_size": 151_936,
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_dim": width,
        "intermediate_dim": intermediate,
        "rope_max_wavelength": 1_000_000.0,
        "tie_word_embeddings": tied,
    }


# Qwen Team 2025 (arXiv:2505.09388 table 1), and the config.json of Qwen/Qwen3-0.6B and so on.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3_0.6b": _size(28, 16, 1024, 3072, tied=True),
    "qwen3_1.7b": _size(28, 16, 2048, 6144, tied=True),
    "qwen3_4b": _size(36, 32, 2560, 9728, tied=True),
    "qwen3_8b": _size(36, 32, 4096, 12_288),
    "qwen3_14b": _size(40, 40, 5120, 17_408),
    "qwen3_32b": _size(64, 64, 5120, 25_600),
    # Below 100,000 parameters, with grouped-query attention and an untied output layer.
    "qwen3_debug": _size(2, 4, 32, 64)
    | {"vocabulary_size": 320, "num_key_value_heads": 2, "head_dim": 8},
}


# === Family ===

FAMILY = Family(
    name="qwen3",
    backbone=Qwen3Backbone,
    tasks=(Qwen3CausalLM, Qwen3TextEmbedder),
    presets=PRESETS,
    formats=(HUGGING_FACE, GGUF),
    sizes=sizes,
    transformers_form=transformers_form,
    parts=PARTS,
)
