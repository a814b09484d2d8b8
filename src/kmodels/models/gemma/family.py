"""The description of the family that the loaders use."""

from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.common import huggingface as decoder
from kmodels.models.common.embedder.task import PARTS
from kmodels.models.common.layer_kinds import GLOBAL, LOCAL
from kmodels.models.common.sizes import sizes
from kmodels.models.gemma.causal_lm import Gemma3CausalLM, Gemma4CausalLM, GemmaCausalLM
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.embedder import Gemma3TextEmbedder, GemmaTextEmbedder
from kmodels.models.gemma.model import GemmaBackbone
from kmodels.models.gemma.presets import PRESETS
from kmodels.models.gemma.weights import gemma4, gguf, huggingface
from kmodels.models.gemma.weights.keras_hub_config import PEERS
from kmodels.models.registry import Family

NAMES = {
    1: ("gemma", "GemmaForCausalLM", "GemmaModel"),
    2: ("gemma2", "Gemma2ForCausalLM", "Gemma2Model"),
    3: ("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextModel"),
    4: ("gemma4_text", "Gemma4ForCausalLM", "Gemma4TextModel"),
}


def _no_counterpart(config: GemmaConfig) -> list[str]:
    generation = config.generation
    if generation == 4:
        return [name for name, there in gemma4.lacks(config).items() if there]
    ropes = gemma4.rope_parameters(config)
    one_rope = ropes[LOCAL] == ropes[GLOBAL]
    absent = {
        "soft caps": generation == 1
        and (config.attention_logit_soft_cap or config.final_logit_soft_cap),
        "a sliding window": generation == 1 and config.use_sliding_window_attention,
        "this query scale": generation == 1 and config.query_scale != config.head_dim**-0.5,
        "attention_logit_soft_cap": generation == 3 and config.attention_logit_soft_cap,
        "use_bidirectional_attention": generation < 3 and config.use_bidirectional_attention,
        "two rotary bases": generation < 3 and not one_rope,
        **(gemma4.lacks_of_yarn(config) if generation == 3 else {}),
        "one post-norm without the other": generation > 1
        and not (config.use_post_ffw_norm and config.use_post_attention_norm),
    }
    return [*(name for name, there in absent.items() if there), *config.of_gemma_4]


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns a Gemma as transformers writes it.

    Args:
        model: a backbone or causal model.

    Returns:
        config.json, nothing for images, the table, and no tensors of zeros.

    Raises:
        InputError: lists everything that transformers cannot express.
    """
    config = getattr(model, "backbone", model).config
    names = NAMES[config.generation]
    if problems := _no_counterpart(config):
        raise InputError(f"transformers' {names[1]} has no counterpart for {', '.join(problems)}")
    if config.generation == 4:
        return decoder.transformers_form(model, names, gemma4.form(config), huggingface.rules)
    form: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        **decoder.rope_form(
            config.global_rope_wavelength,
            config.global_rope_scaling_factor,
            config.global_rope_yarn,
        ),
    }
    if config.generation > 1:
        form |= _windows(config)
    if config.generation == 3:
        form["rope_local_base_freq"] = config.local_rope_wavelength
        # The older names say nothing else of the layers with a window.
        if (ropes := gemma4.rope_parameters(config))[LOCAL]["rope_type"] != "default":
            form["rope_parameters"] = ropes
        form["use_bidirectional_attention"] = config.use_bidirectional_attention
    return decoder.transformers_form(model, names, form, huggingface.rules)


def _windows(config: GemmaConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _whole(config.query_scale**-2),
        "attn_logit_softcapping": config.attention_logit_soft_cap,
        "final_logit_softcapping": config.final_logit_soft_cap,
        "sliding_window": config.sliding_window_size,
        "sliding_window_pattern": config.sliding_window_pattern,
        "layer_types": decoder.layer_types(config),
    }


def _whole(value: float) -> int | float:
    """Returns the whole number that a float is except for rounding, which transformers wants."""
    return round(value) if abs(value - round(value)) < 1e-6 else value


FAMILY = Family(
    name="gemma",
    backbone=GemmaBackbone,
    tasks=(GemmaCausalLM, Gemma3CausalLM, Gemma4CausalLM, GemmaTextEmbedder, Gemma3TextEmbedder),
    presets=PRESETS,
    formats=(huggingface.FORMAT, gguf.FORMAT),
    sizes=sizes,
    transformers_form=transformers_form,
    keras_hub=PEERS,
    parts=PARTS,
)
