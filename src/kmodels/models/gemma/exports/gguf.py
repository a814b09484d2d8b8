"""The settings of a Gemma in a GGUF file, by generation."""

from kmodels.models.common.gguf import tensors
from kmodels.models.common.gguf.writing import (
    GGUFExport,
    GGUFForm,
    Setting,
    settings,
    without_place_in_yarn,
    yarn_settings,
)
from kmodels.models.common.layer_kinds import GLOBAL, LOCAL
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.weights import gguf as weights_gguf
from kmodels.text.gguf import MERGED, SCORED

ARCHITECTURES = {number: name for name, number in weights_gguf.GENERATIONS.items()}
# Tokens that the published models were trained on; the config of a model does not say.
CONTEXT = {1: 8192, 2: 8192, 3: 32_768, 4: 131_072}
# The template that Gemma's instruction models were trained on, between the markers of a generation;
# llama.cpp would take that of another family.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<START>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    "{{ message['content'] | trim }}{{ '<END>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<START>model\n' }}{% endif %}"
)


def form(config: GemmaConfig) -> GGUFForm:
    """Returns a Gemma as its file says it."""
    width = config.global_head_dim or config.head_dim
    turned = config.global_rope_partial_rotary_factor
    has_factors = config.generation == 4 and GLOBAL in config.kinds
    return GGUFForm(
        architecture=ARCHITECTURES[config.generation],
        settings=_settings(config, width),
        # Of a Gemma 4 llama.cpp reads the merges themselves, with the scores beside them.
        vocabulary=MERGED if config.generation == 4 else SCORED,
        absent=_without_place(config),
        constants=(
            {tensors.ROPE_FACTORS: tensors.rope_factors(width, turned)} if has_factors else {}
        ),
        template=TEMPLATE,
    )


def _without_place(config: GemmaConfig) -> list[str]:
    """Returns settings that the file could not tell apart from others when it is read again."""
    everywhere = {"use_bidirectional_attention": config.use_bidirectional_attention}
    if config.generation < 3:  # of which llama.cpp reads no output layer
        everywhere["tie_word_embeddings=False"] = not config.tie_word_embeddings
    if config.generation < 4:
        everywhere |= dict.fromkeys(config.of_gemma_4, True)
        everywhere |= without_place_in_yarn(config.global_rope_yarn)
        return [name for name, there in everywhere.items() if there]
    rows = config.per_layer_vocabulary if config.hidden_size_per_layer_input else None
    absent = {
        **everywhere,
        "enable_moe_block": config.enable_moe_block,
        f"vocab_size_per_layer_input={rows}, which is to be vocabulary_size": (
            rows not in (None, config.vocabulary_size)
        ),
        "keys and values of these layers for those that share": weights_gguf.shares_otherwise(
            config
        ),
    }
    return [name for name, there in absent.items() if there]


def _settings(config: GemmaConfig, head_dim: int) -> dict[str, Setting]:
    generation = config.generation
    scaling = config.global_rope_scaling_factor if generation < 4 else 1.0
    found: dict[str, Setting] = {
        "context_length": CONTEXT[generation],
        **settings(config, head_dim, config.global_rope_wavelength, scaling),
        **(yarn_settings(config.yarn("global")) if generation < 4 else {}),
    }
    if generation > 1:
        found["attention.sliding_window"] = config.sliding_window_size
    caps = {
        "attn_logit_softcapping": config.attention_logit_soft_cap if generation == 2 else None,
        "final_logit_softcapping": config.final_logit_soft_cap if generation in (2, 3) else None,
    }
    found |= {name: float(cap) for name, cap in caps.items() if cap is not None}
    if generation == 3:
        found["rope.freq_base_swa"] = float(config.local_rope_wavelength)
        found["attention.sliding_window_pattern"] = config.sliding_window_pattern
    if generation == 4:
        found |= _of_4(config)
    return found


def _of_4(config: GemmaConfig) -> dict[str, Setting]:
    """Returns what only a Gemma 4 says."""
    return {
        "rope.freq_base_swa": float(config.local_rope_wavelength),
        "rope.dimension_count_swa": config.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.sliding_window_pattern": [kind == LOCAL for kind in config.kinds],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": float(config.final_logit_soft_cap or 0.0),
    }


EXPORT = GGUFExport(weights_gguf.FORMAT, form)
