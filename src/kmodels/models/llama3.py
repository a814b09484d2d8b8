"""Llama 3 to 3.2, text (Meta 2024): config, model, text, task, files, presets.

Differences from Qwen 3: queries and keys have no norms, a text begins with a start token, and from
3.1 on the slow channels of the rotary position embedding are stretched for longer contexts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tokenizers

from kmodels.core.errors import InputError
from kmodels.models.blocks import huggingface as decoder
from kmodels.models.blocks.causal_lm import CausalLM
from kmodels.models.blocks.config import BlockConfig, DecoderConfig, check_positive
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.decoder_block import DecoderBlock
from kmodels.models.blocks.gguf import reading, tensors
from kmodels.models.blocks.gguf.writing import GGUFExport, GGUFForm, settings
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
from kmodels.models.blocks.rope import Llama3Scaling, check_alone
from kmodels.models.blocks.sizes import sizes
from kmodels.models.blocks.tokenizer import BytePairTokenizer
from kmodels.registry import Family
from kmodels.text import Turns, byte_level
from kmodels.text.gguf import BYTES
from kmodels.weights import Rule

# === Config ===

# The settings of `rope_type` "llama3": transformers' names to those of keras-hub.
SCALING = {
    "factor": "rope_frequency_adjustment_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_pretraining_sequence_length",
}


@dataclass(frozen=True)
class Llama3Config(DecoderConfig):
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
        if None in values:
            if any(value is not None for value in values):
                raise InputError(f"give all of {', '.join(SCALING.values())}, or none of them")
            return
        check_alone(
            SCALING["factor"], {"rope_position_scaling_factor": self.rope_position_scaling_factor}
        )
        if not values[1] < values[2]:
            raise InputError(
                f"rope_low_freq_factor is {values[1]} and rope_high_freq_factor {values[2]}; the "
                "second must be larger"
            )

    @property
    def scaling(self) -> Llama3Scaling | None:
        """The scaling of Llama 3.1, or None."""
        settings = {theirs: getattr(self, ours) for theirs, ours in SCALING.items()}
        return None if None in settings.values() else Llama3Scaling(**settings)

    @property
    def published_length(self) -> int:
        """8192 tokens for Llama 3, 131,072 from Llama 3.1 on."""
        return 8192 if self.rope_frequency_adjustment_factor is None else 131_072

    def block(self, index: int) -> BlockConfig:
        """Returns the settings of a block; all blocks are the same."""
        base, scaling = self.rope_max_wavelength, self.scaling
        return self.plain_block(
            rope_wavelength=base,
            rope_scaling=(
                scaling.divisors(self.head_dim, base)
                if scaling
                else self.rope_position_scaling_factor
            ),
            use_bias=self.attention_bias,
            use_output_bias=self.attention_bias,
        )


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


def _build(*arguments: Any) -> tokenizers.Tokenizer:
    return byte_level.build(*arguments, kind="llama-bpe")


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3Tokenizer(BytePairTokenizer):
    """`BytePairTokenizer` of Llama 3; arguments are in keras-hub's order.

    Args:
        vocabulary: token to id, the path of a vocab.json, or a `tokenizers.Tokenizer`.
        merges: pairs of tokens with a blank between them, or the path of a merges.txt.
        bos_token: text of the start token; by default the one that the files name.
        eos_token: text of the end token; by default the one that the files name.
        misc_special_tokens: further control tokens.
        **kwargs: of `LayerTokenizer`.
    """

    roles = {"start": BEGIN, "end": END, "pad": PAD}  # noqa: RUF012
    ends = (END, CALL, TURN)
    control_tokens = (BEGIN, END, *HEADER, TURN)
    build_core = staticmethod(_build)

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | Mapping[str, int] | str | Path,
        merges: Sequence[str] | str | Path | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        misc_special_tokens: Iterable[str] = (),
        **kwargs: Any,
    ):
        if not isinstance(vocabulary, tokenizers.Tokenizer):
            named = [*filter(None, (bos_token, eos_token)), *sorted(misc_special_tokens)]
            special = dict.fromkeys([*self.control_tokens, *named])
            vocabulary = byte_level.read(vocabulary, merges, tuple(special), _build)
        roles = {"start": bos_token, "end": eos_token}
        super().__init__(vocabulary, **{**roles, **kwargs})


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3CausalLMPreprocessor(CausalLMPreprocessor):
    """`CausalLMPreprocessor` of Llama 3. The template "llama3" is the checkpoints' chat format."""

    family = "llama3"
    tokenizer_class = Llama3Tokenizer
    chats = CHATS
    reader = "Llama 3"


# === Hugging Face ===

# transformers' configs omit settings that equal these defaults.
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "max_position_embeddings": 2048},
}


def rules(config: Llama3Config, prefix: str = "model.") -> list[Rule]:
    """Returns the rules of a config; `prefix` is empty for a model without its output layer."""
    return decoder.rules(config, decoder.NORMS, prefix)


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Llama3Config` for a config.json.

    Raises:
        InputError: lists the settings that are not supported.
    """
    text = {**DEFAULTS, **description}
    heads = text["num_attention_heads"]
    text["head_dim"] = text.get("head_dim") or text["hidden_size"] // heads
    text["num_key_value_heads"] = text.get("num_key_value_heads") or heads
    # As in transformers, the older name takes precedence.
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    rope = decoder.rope(
        *(path, scaling, text.get("rope_theta"), 10_000.0), kinds=("default", "linear", "llama3")
    )
    adjusts = decoder.rope_kind(scaling) == "llama3"
    given = {"original_max_position_embeddings": text["max_position_embeddings"], **scaling}
    unknown = sorted(set(scaling) - {*SCALING, "rope_type", "type", "rope_theta"})
    decoder.refuse(
        path,
        {
            f"an activation {text['hidden_act']!r}": text["hidden_act"] != "silu",
            "mlp_bias": text.get("mlp_bias"),
            f"{', '.join(unknown)} in rope_scaling": adjusts and unknown,
            "rope_scaling without its factors": adjusts and not SCALING.keys() <= given.keys(),
        },
    )
    return {
        **decoder.fields(text),
        "rope_max_wavelength": rope.base,
        "rope_position_scaling_factor": rope.scaling,
        "tie_word_embeddings": bool(text["tie_word_embeddings"]),
        "attention_bias": bool(text.get("attention_bias")),
        **({ours: given[theirs] for theirs, ours in SCALING.items()} if adjusts else {}),
    }


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns (config.json, {}, rules, {}): there is no image processor and no zero tensor.

    Args:
        model: a backbone or causal model. A backbone with an untied output layer is written as a
            causal model.
    """
    config = getattr(model, "backbone", model).config
    length = config.max_sequence_length or config.published_length
    form = {
        **{"hidden_act": "silu", "mlp_bias": False, "max_position_embeddings": length},
        **decoder.rope_form(config.rope_max_wavelength, config.rope_position_scaling_factor, None),
    }
    if config.scaling is not None:
        form["rope_scaling"] = {"rope_type": "llama3", **asdict(config.scaling)}
    names = ("llama", "LlamaForCausalLM", "LlamaModel")
    return decoder.transformers_form(model, names, form, rules)


HUGGING_FACE = decoder.HuggingFaceFormat(("llama",), Llama3Config, fields, rules)


# === GGUF ===

ARCHITECTURE = "llama"
# A file has the divisors of the positions instead of the settings that give them. These are the
# settings of the published models; llama.cpp's converter assumes the last one, too.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192


def gguf_rules(config: Llama3Config) -> list[Rule]:
    """Returns the rules of the GGUF file of a config."""
    changes = {
        f"{tensors.BLOCK}.attn_q.weight": tensors.adjacent(config.num_query_heads),
        f"{tensors.BLOCK}.attn_k.weight": tensors.adjacent(config.num_key_value_heads),
    }
    table = tensors.rules(config, tensors.NORMS)
    return [replace(rule, transform=changes.get(rule.source, rule.transform)) for rule in table]


def _gguf_fields(file: reading.File) -> dict[str, Any]:
    width = int(file.get("embedding_length", 0)) // max(int(file.get("attention.head_count", 1)), 1)
    base, scaling, yarn = file.rope(10_000.0)
    if yarn is not None:
        raise InputError(f"{file.path} scales its rotary embedding by YaRN; the model does not")
    fields: dict[str, Any] = file.fields(head_dim=width) | {
        "rope_max_wavelength": base,
        "rope_position_scaling_factor": scaling,
    }
    if (tensor := file.tensors.get(tensors.ROPE_FACTORS)) is None:
        return fields
    divisors = np.array(tensor.data, "float64")
    length = int(file.get("rope.scaling.original_context_length", ORIGINAL))
    scaling = Llama3Scaling.of_divisors(divisors, base, length, (LOW, HIGH))
    if scaling is None or len(divisors) != fields["head_dim"] // 2:
        raise InputError(
            f"{file.path} has a {tensors.ROPE_FACTORS} that no low_freq_factor and "
            "high_freq_factor of Llama 3 give; give the Hugging Face directory that it was "
            "converted from"
        )
    return fields | {SCALING[theirs]: value for theirs, value in asdict(scaling).items()}


def _unused(config: Llama3Config) -> list[str]:
    return [tensors.ROPE_FACTORS]


GGUF = reading.GGUFFormat(
    "Llama 3", (ARCHITECTURE,), Llama3Config, _gguf_fields, gguf_rules, _unused
)


def gguf_form(config: Llama3Config) -> GGUFForm:
    """Returns the settings of the GGUF file of a config, and those that it cannot hold."""
    rope = (config.rope_max_wavelength, config.rope_position_scaling_factor)
    keys, constants, absent = settings(config, config.head_dim, *rope), {}, []
    if (scaling := config.scaling) is not None:
        length = scaling.original_max_position_embeddings
        divisors = np.array(scaling.divisors(config.head_dim, rope[0]), "float32")
        keys["rope.scaling.original_context_length"] = length
        constants[tensors.ROPE_FACTORS] = divisors
        if scaling != Llama3Scaling.of_divisors(divisors, rope[0], length, (LOW, HIGH)):
            absent = ["this rope_low_freq_factor", "this rope_high_freq_factor"]
    return GGUFForm(
        architecture=ARCHITECTURE,
        settings=keys,
        vocabulary=BYTES,
        absent=["attention_bias", *absent] if config.attention_bias else absent,
        constants=constants,
    )


# === Task ===


@keras.saving.register_keras_serializable(package="kmodels")
class Llama3CausalLM(CausalLM):
    """Llama 3 for text generation; arguments and methods are those of `CausalLM`."""

    backbone_class = Llama3Backbone
    preprocessor_class = Llama3CausalLMPreprocessor
    gguf_export = GGUFExport(GGUF, gguf_form)


# === Presets ===


def _size(
    layers: int, heads: int, width: int, mlp: int, head_dim: int, factor: float | None, tied: bool
) -> dict[str, Any]:
    numbers = (factor, LOW, HIGH, ORIGINAL) if factor else (None,) * 4
    return {
        **{"vocabulary_size": 128_256, "num_layers": layers, "num_query_heads": heads},
        **{"num_key_value_heads": 8, "head_dim": head_dim, "hidden_dim": width},
        **{"intermediate_dim": mlp, "rope_max_wavelength": 500_000.0, "layer_norm_epsilon": 1e-5},
        **{"tie_word_embeddings": tied, **dict(zip(SCALING.values(), numbers, strict=True))},
    }


# Meta 2024 (arXiv:2407.21783 table 3), and the config.json of meta-llama/Llama-3.2-1B and so on.
PRESETS: dict[str, dict[str, Any]] = {
    "llama3_8b_en": _size(32, 32, 4096, 14_336, 128, None, False),
    "llama3.1_8b": _size(32, 32, 4096, 14_336, 128, 8.0, False),
    "llama3.2_1b": _size(16, 32, 2048, 8192, 64, 32.0, True),
    "llama3.2_3b": _size(28, 24, 3072, 8192, 128, 32.0, True),
    # Below 100,000 parameters, with grouped-query attention and an untied output layer.
    "llama3_debug": _size(2, 4, 32, 64, 8, 8.0, False)
    | {
        "vocabulary_size": 320,
        "num_key_value_heads": 2,
        SCALING["original_max_position_embeddings"]: 64,
    },
}


# === Family ===

FAMILY = Family(
    name="llama3",
    backbone=Llama3Backbone,
    tasks=(Llama3CausalLM,),
    presets=PRESETS,
    formats=(HUGGING_FACE, GGUF),
    sizes=sizes,
    transformers_form=transformers_form,
)
