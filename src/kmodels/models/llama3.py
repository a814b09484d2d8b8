"""Llama 3 to 3.2, text (Meta 2024): config, model, text, task, files, presets.

Differences from Qwen 3: queries and keys have no norms, a text begins with a start token, and from
3.1 on the slow channels of the rotary position embedding are stretched for longer contexts.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.blocks.causal_lm import CausalLM
from kmodels.models.blocks.config import check_positive, presets
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.decoder_block import DecoderBlock
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.plain_decoder import PlainConfig, PlainFiles
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
from kmodels.models.blocks.rope import Llama3Scaling, Rope, check_alone
from kmodels.models.blocks.sizes import sizes
from kmodels.models.blocks.tokenizer import BytePairTokenizer
from kmodels.registry import Family
from kmodels.text import Turns, byte_level

# === Config ===

# The settings of `rope_type` "llama3": transformers' names to those of keras-hub.
SCALING = {
    "factor": "rope_frequency_adjustment_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_pretraining_sequence_length",
}


@dataclass(frozen=True)
class Llama3Config(PlainConfig):
    """Sizes of a Llama 3 backbone; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table. Other fields are those of `DecoderConfig`.
        rope_max_wavelength: base of the rotary embedding, 500,000 in the published models.
        rope_position_scaling_factor: divides the positions of all channels.
        rope_frequency_adjustment_factor: divides the positions of slow channels; None for Llama 3,
            like the next three. If it is given, rope_position_scaling_factor must be 1.
        rope_low_freq_factor: channels that turn less often than this within the original context
            are slow.
        rope_high_freq_factor: channels that turn more often than this keep their positions.
        rope_pretraining_sequence_length: length of the original context, in tokens.
        attention_bias: biases in all four projections of the attention, as in transformers; the
            published models have none.

    Raises:
        InputError: for sizes that do not fit together.
    """

    tie_word_embeddings: bool = False
    rope_max_wavelength: float = 10_000.0
    rope_position_scaling_factor: float = 1.0
    rope_frequency_adjustment_factor: float | None = None
    rope_low_freq_factor: float | None = None
    rope_high_freq_factor: float | None = None
    rope_pretraining_sequence_length: int | None = None
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "rope_max_wavelength", "rope_position_scaling_factor")
        check_positive(self, *SCALING.values(), none="no adjustment")
        values = [getattr(self, name) for name in SCALING.values()]
        if None in values and any(values):
            raise InputError(f"give all of {', '.join(SCALING.values())}, or none of them")
        if None not in values:
            check_alone(self, SCALING["factor"], "rope_position_scaling_factor")
            if not values[1] < values[2]:
                raise InputError(
                    f"rope_low_freq_factor is {values[1]} and rope_high_freq_factor {values[2]}; "
                    "the second must be larger"
                )

    @property
    def published_length(self) -> int:
        """8192 tokens for Llama 3, 131,072 from Llama 3.1 on."""
        return 8192 if self.rope_frequency_adjustment_factor is None else 131_072

    @property
    def rope(self) -> Rope:
        """The rotary position embedding."""
        settings = {theirs: getattr(self, ours) for theirs, ours in SCALING.items()}
        scaling = None if None in settings.values() else Llama3Scaling(**settings)
        return Rope(self.rope_max_wavelength, self.rope_position_scaling_factor, None, scaling)

    @staticmethod
    def rope_fields(rope: Rope) -> dict[str, Any]:
        """Returns the fields for a rotary position embedding."""
        scaling = {} if rope.llama3 is None else asdict(rope.llama3)
        return {
            "rope_max_wavelength": rope.base,
            "rope_position_scaling_factor": rope.scaling,
            **{ours: scaling.get(theirs) for theirs, ours in SCALING.items()},
        }


# === Model ===


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3Block(DecoderBlock):
    """`DecoderBlock` of a `Llama3Config`."""

    config_class = Llama3Config


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3Backbone(DecoderBackbone):
    """A Llama 3 without its output layer; arguments are in keras-hub's order.

    Args:
        *args: see `DecoderBackbone`.
        **kwargs: the other fields of `Llama3Config`.

    Call:
        {"token_ids", "padding_mask"}, each (B, T) int -> hidden states (B, T, D).

    Source:
        Meta, arXiv:2407.21783; Transformers' `modeling_llama`.
    """

    config_class = Llama3Config
    block_class = Llama3Block
    family = "llama3"

    __init__ = in_order(
        *("vocabulary_size", "num_layers", "num_query_heads", "hidden_dim", "intermediate_dim"),
        *("num_key_value_heads", "rope_max_wavelength", "rope_position_scaling_factor"),
        *SCALING.values(),
        *("layer_norm_epsilon", "dropout", "dtype", "tie_word_embeddings"),
    )(DecoderBackbone.__init__)


# === Text ===

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
HEADER, TURN, CALL = ("<|start_header_id|>", "<|end_header_id|>"), "<|eot_id|>", "<|eom_id|>"


def _turn(role: str) -> str:
    return f"{HEADER[0]}{role}{HEADER[1]}\n\n{{content}}{TURN}"


CHATS = {
    "llama3": Turns(
        user=_turn("user") + "{}assistant{}\n\n".format(*HEADER),
        model=TURN,
        between="",
        tokens=(*HEADER, TURN),
        system=_turn("system"),
    )
}


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3Tokenizer(BytePairTokenizer):
    """`BytePairTokenizer` of Llama 3; arguments are in keras-hub's order."""

    roles = {"start": BEGIN, "end": END, "pad": PAD}  # noqa: RUF012
    ends = (END, CALL, TURN)
    control_tokens = (BEGIN, END, *HEADER, TURN)
    build_core = staticmethod(partial(byte_level.build, kind="llama-bpe"))


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3CausalLMPreprocessor(CausalLMPreprocessor):
    """`CausalLMPreprocessor` of Llama 3. The template "llama3" is the checkpoints' chat format."""

    family = "llama3"
    tokenizer_class = Llama3Tokenizer
    chats = CHATS
    reader = "Llama 3"


# === Files ===

FILES = PlainFiles(
    name="Llama 3",
    config_class=Llama3Config,
    names=("llama", "LlamaForCausalLM", "LlamaModel"),
    defaults={
        **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu"},
        **{"tie_word_embeddings": False, "max_position_embeddings": 2048},
    },
    refused=("mlp_bias",),
    form=lambda config, rope: {
        "mlp_bias": False,
        "max_position_embeddings": config.context_length,
        **rope,
    },
    architecture="llama",
    ropes=("default", "linear", "llama3"),
    adjacent=True,
)


# === Task ===


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3CausalLM(CausalLM):
    """Llama 3 for text generation; arguments and methods are those of `CausalLM`."""

    backbone_class = Llama3Backbone
    preprocessor_class = Llama3CausalLMPreprocessor
    gguf_export = FILES.gguf_export


# === Presets ===

# Meta 2024 (arXiv:2407.21783 table 3), and the config.json of meta-llama/Llama-3.2-1B and so on.
PRESETS = presets(
    (
        *("num_layers", "num_query_heads", "num_key_value_heads", "head_dim", "hidden_dim"),
        *("intermediate_dim", "vocabulary_size", "tie_word_embeddings", *SCALING.values()),
    ),
    {
        "llama3_8b_en": (32, 32, 8, 128, 4096, 14_336, 128_256, False, *(None,) * 4),
        "llama3.1_8b": (32, 32, 8, 128, 4096, 14_336, 128_256, False, 8.0, 1.0, 4.0, 8192),
        "llama3.2_1b": (16, 32, 8, 64, 2048, 8192, 128_256, True, 32.0, 1.0, 4.0, 8192),
        "llama3.2_3b": (28, 24, 8, 128, 3072, 8192, 128_256, True, 32.0, 1.0, 4.0, 8192),
        # Below 100,000 parameters, with grouped-query attention and an untied output layer.
        "llama3_debug": (2, 4, 2, 8, 32, 64, 320, False, 8.0, 1.0, 4.0, 64),
    },
    rope_max_wavelength=500_000.0,
    layer_norm_epsilon=1e-5,
)


# === Family ===

FAMILY = Family(
    name="llama3",
    backbone=Llama3Backbone,
    tasks=(Llama3CausalLM,),
    presets=PRESETS,
    formats=(FILES.hugging_face(), FILES.gguf),
    sizes=sizes,
    transformers_form=FILES.transformers_form,
)
