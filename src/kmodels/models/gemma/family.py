"""What the loaders need to know about the family, in one place."""

from typing import Any

from kmodels.core.errors import InputError
from kmodels.memory.sizes import Sizes
from kmodels.models.gemma.causal_lm import Gemma3CausalLM, GemmaCausalLM
from kmodels.models.gemma.model import GemmaBackbone
from kmodels.models.gemma.presets import PRESETS
from kmodels.models.gemma.weights import gguf, huggingface
from kmodels.models.gemma.weights.keras_hub_config import PEERS
from kmodels.models.registry import Family
from kmodels.weights import Rule

NAMES = {
    1: ("gemma", "GemmaForCausalLM", "GemmaModel"),
    2: ("gemma2", "Gemma2ForCausalLM", "Gemma2Model"),
    3: ("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextModel"),
}


def _no_counterpart(config: Any) -> list[str]:
    generation = config.generation
    one_rope = (config.local_rope_wavelength, config.local_rope_scaling_factor) == (
        config.global_rope_wavelength,
        config.global_rope_scaling_factor,
    )
    absent = {
        "soft caps": generation == 1
        and (config.attention_logit_soft_cap or config.final_logit_soft_cap),
        "a sliding window": generation == 1 and config.use_sliding_window_attention,
        "this query scale": generation == 1 and config.query_scale != config.head_dim**-0.5,
        "attention_logit_soft_cap": generation == 3 and config.attention_logit_soft_cap,
        "two rotary bases": generation < 3 and not one_rope,
        "one post-norm without the other": generation > 1
        and not (config.use_post_ffw_norm and config.use_post_attention_norm),
    }
    return [name for name, there in absent.items() if there]


def transformers_form(model: Any) -> tuple[dict[str, Any], dict[str, Any], list[Rule], dict]:
    """A Gemma as transformers writes it.

    Args:
        model: a backbone or causal model.

    Returns:
        config.json, nothing for pictures, the table, and no tensors of zeros.

    Raises:
        InputError: lists everything that transformers cannot express.
    """
    backbone = getattr(model, "backbone", model)
    config = backbone.config
    kind, causal, bare = NAMES[config.generation]
    if problems := _no_counterpart(config):
        raise InputError(f"transformers' {causal} has no counterpart for {', '.join(problems)}")
    form: dict[str, Any] = {
        "architectures": [bare if backbone is model else causal],
        "model_type": kind,
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.layer_norm_epsilon,
        "attention_dropout": config.dropout,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_theta": config.global_rope_wavelength,
        **_tokens(model),
    }
    if (factor := config.global_rope_scaling_factor) != 1.0:
        form["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if config.generation > 1:
        form |= _windows(config)
    if config.generation == 3:
        form["rope_local_base_freq"] = config.local_rope_wavelength
    prefix = "" if backbone is model else "model."
    return form, {}, huggingface.rules(config, prefix), {}


def _windows(config: Any) -> dict[str, Any]:
    types = ("full_attention", "sliding_attention")
    return {
        "query_pre_attn_scalar": _whole(config.query_scale**-2),
        "attn_logit_softcapping": config.attention_logit_soft_cap,
        "final_logit_softcapping": config.final_logit_soft_cap,
        "sliding_window": config.sliding_window_size,
        "sliding_window_pattern": config.sliding_window_pattern,
        "layer_types": [types[config.is_local(i)] for i in range(config.num_layers)],
    }


def _whole(value: float) -> int | float:
    """The whole number that a float is but for rounding, which transformers wants."""
    return round(value) if abs(value - round(value)) < 1e-6 else value


def _tokens(model: Any) -> dict[str, Any]:
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    if tokenizer is None:
        return {}
    return {
        "bos_token_id": tokenizer.start_token_id,
        "eos_token_id": list(tokenizer.stop_token_ids),
        "pad_token_id": tokenizer.pad_token_id,
    }


def sizes(config: Any) -> Sizes:
    """What decides the memory of a step."""
    return Sizes(
        layers=config.num_layers,
        width=config.hidden_dim,
        heads=config.num_query_heads,
        groups=config.num_key_value_heads,
        head_dim=config.head_dim,
        mlp_dim=config.mlp_dim,
        vocabulary=config.vocabulary_size,
        gated=True,
        post_norms=config.use_post_attention_norm or config.use_post_ffw_norm,
        head_norms=config.use_query_key_norm,
        causal=True,
        windows=tuple(
            config.sliding_window_size if config.is_local(i) else None
            for i in range(config.num_layers)
        ),
        soft_cap=config.attention_logit_soft_cap,
        dropout=config.dropout,
        attention_dropout=config.dropout,
    )


FAMILY = Family(
    name="gemma",
    backbone=GemmaBackbone,
    tasks=(GemmaCausalLM, Gemma3CausalLM),
    presets=PRESETS,
    formats=(huggingface, gguf),
    parts={},
    defaults=lambda config, task: task,
    fit_preprocessor=lambda settings, config: settings,
    fit=lambda tensors, held, wanted: tensors,
    sizes=sizes,
    transformers_form=transformers_form,
    keras_hub=PEERS,
)
