"""Qwen 3, dense (Qwen Team 2025): config, model, text, tasks, files, presets.

Differences from Gemma 3: norms multiply by their scale alone, the gate of the MLP is SiLU,
embeddings are not scaled, attention and MLP have no post-norm, and large sizes have an untied
output layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import check_whole
from kmodels.models.blocks import huggingface
from kmodels.models.blocks.causal_lm import CausalLM
from kmodels.models.blocks.config import BlockConfig, check_positive, presets
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.decoder_block import DecoderBlock
from kmodels.models.blocks.embedder.preprocessor import HubEmbedderPreprocessor
from kmodels.models.blocks.embedder.sentence_transformers import EmbedderFormat
from kmodels.models.blocks.embedder.task import PARTS, HubEmbedder
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.plain_decoder import PlainConfig, PlainFiles
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
from kmodels.models.blocks.rope import Rope, Yarn, check_alone
from kmodels.models.blocks.sizes import sizes
from kmodels.models.blocks.tokenizer import BytePairTokenizer
from kmodels.registry import Family
from kmodels.text import Turns

# === Config ===


@dataclass(frozen=True)
class Qwen3Config(PlainConfig):
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
        if self.rope_yarn is not None:
            Yarn.of(self.rope_yarn)
            check_alone(self, "rope_yarn", "rope_scaling_factor")

    @property
    def published_length(self) -> int:
        """`max_sequence_length` of the published models."""
        return 40_960

    @property
    def rope(self) -> Rope:
        """The rotary position embedding."""
        return Rope(self.rope_max_wavelength, self.rope_scaling_factor, self.rope_yarn)

    @staticmethod
    def rope_fields(rope: Rope) -> dict[str, Any]:
        """Returns the fields for a rotary position embedding."""
        names = ("rope_max_wavelength", "rope_scaling_factor", "rope_yarn")
        return dict(zip(names, rope[:3], strict=True))

    def block(self, index: int) -> BlockConfig:
        """Returns the settings of a block; all blocks are the same."""
        block = super().block(index)
        return replace(block, window=self.sliding_window_size, use_query_key_norm=True)


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


# === Files ===


def _fields(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    window = text["sliding_window"] if text["use_sliding_window"] else None
    if (types := text.get("layer_types")) is not None:
        local = {kind == "sliding_attention" for kind in types}
    else:
        layers = range(text["num_hidden_layers"])
        local = {window is not None and i >= text["max_window_layers"] for i in layers}
    problems = {
        "windows in some layers alone": len(local) == 2,
        f"layers with a window and sliding_window={text['sliding_window']!r}, "
        f"use_sliding_window={text['use_sliding_window']!r}": True in local and not window,
    }
    huggingface.refuse(path, problems)
    return {"sliding_window_size": window if True in local else None}


def _form(config: Qwen3Config, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        **rope,
        "use_sliding_window": config.sliding_window_size is not None,
        "sliding_window": config.sliding_window_size,
        "layer_types": huggingface.layer_types(config),
    }


# llama.cpp's pooling by the last token of a text, for embedders.
LAST_TOKEN = 3
FILES = PlainFiles(
    name="Qwen 3",
    config_class=Qwen3Config,
    names=("qwen3", "Qwen3ForCausalLM", "Qwen3Model"),
    defaults={
        **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016},
        **{"head_dim": 128, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 32, "hidden_act": "silu", "tie_word_embeddings": False},
        **{"max_position_embeddings": 32_768, "use_sliding_window": False},
        **{"sliding_window": 4096, "max_window_layers": 28},
    },
    fields=_fields,
    form=_form,
    architecture="qwen3",
    usual_head_dim=128,
    without_place=("sliding_window_size",),
    idle_at={"pooling_type": (0, LAST_TOKEN)},
)


# === Tasks ===


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3CausalLM(CausalLM):
    """Qwen 3 for text generation; arguments and methods are those of `CausalLM`."""

    backbone_class = Qwen3Backbone
    preprocessor_class = Qwen3CausalLMPreprocessor
    gguf_export = FILES.gguf_export


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

# Qwen Team 2025 (arXiv:2505.09388 table 1), and the config.json of Qwen/Qwen3-0.6B and so on.
PRESETS = presets(
    (
        *("num_layers", "num_query_heads", "num_key_value_heads", "head_dim", "hidden_dim"),
        *("intermediate_dim", "vocabulary_size", "tie_word_embeddings"),
    ),
    {
        "qwen3_0.6b": (28, 16, 8, 128, 1024, 3072, 151_936, True),
        "qwen3_1.7b": (28, 16, 8, 128, 2048, 6144, 151_936, True),
        "qwen3_4b": (36, 32, 8, 128, 2560, 9728, 151_936, True),
        "qwen3_8b": (36, 32, 8, 128, 4096, 12_288, 151_936, False),
        "qwen3_14b": (40, 40, 8, 128, 5120, 17_408, 151_936, False),
        "qwen3_32b": (64, 64, 8, 128, 5120, 25_600, 151_936, False),
        # Below 100,000 parameters, with grouped-query attention and an untied output layer.
        "qwen3_debug": (2, 4, 2, 8, 32, 64, 320, False),
    },
    rope_max_wavelength=1_000_000.0,
)


# === Family ===

FAMILY = Family(
    name="qwen3",
    backbone=Qwen3Backbone,
    tasks=(Qwen3CausalLM, Qwen3TextEmbedder),
    presets=PRESETS,
    formats=(FILES.hugging_face(EmbedderFormat), FILES.gguf),
    sizes=sizes,
    transformers_form=FILES.transformers_form,
    parts=PARTS,
)
