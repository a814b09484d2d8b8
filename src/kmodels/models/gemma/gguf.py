"""GGUF files of Gemma 1 to 4, as llama.cpp writes them."""

from dataclasses import replace
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.blocks import huggingface as decoder
from kmodels.models.blocks.config import GLOBAL, LOCAL, kv_sources
from kmodels.models.blocks.gguf import reading, tensors
from kmodels.models.blocks.gguf.writing import (
    GGUFExport,
    GGUFForm,
    Setting,
    settings,
    without_place_in_yarn,
    yarn_settings,
)
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.huggingface import rope_fields
from kmodels.models.gemma.presets import GEMMA_2, GEMMA_3, GEMMA_4
from kmodels.text.gguf import MERGED, SCORED
from kmodels.weights import Rule

# === Reading ===

GENERATIONS = {"gemma": 1, "gemma2": 2, "gemma3": 3, "gemma4": 4}
# Number of layers of the largest model of each generation, which scales queries differently. GGUF
# files do not store this scale.
LARGEST = {2: 46, 3: 62}
NEEDED_4 = (
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.key_length"),
    *("attention.key_length_swa", "rope.freq_base", "rope.freq_base_swa"),
    "embedding_length_per_layer_input",
)
# llama.cpp's default cap of Gemma 4's logits; 0 is no cap.
USUAL_CAP = 30.0


def rules(config: GemmaConfig) -> list[Rule]:
    """Returns the rules of a config."""
    norms = dict(tensors.NORMS)
    if config.generation > 1:
        norms["post_attention_norm"] = "post_attention_norm"
        norms["post_ffw_norm"] = "post_mlp_norm"
    if config.generation > 2:
        norms |= tensors.HEAD_NORMS
    return tensors.rules(config, norms)


def unused(config: GemmaConfig) -> list[str]:
    """Returns the tensors that are not read, in Gemma 4 also the rotary factors."""
    factors = [tensors.ROPE_FACTORS] if config.generation == 4 else []
    return [*factors, *tensors.unused(config)]


def shares_otherwise(config: GemmaConfig) -> bool:
    """Returns True if llama.cpp would share the keys and values of other layers than the model.

    Among the layers with their own keys and values, llama.cpp shares those of the second to last
    with local layers and those of the last with global layers, without a look at their kinds.
    """
    own = config.num_layers - config.num_kv_shared_layers
    taken = {LOCAL: own - 2, GLOBAL: own - 1}
    pairs = zip(config.kinds, config.sources, strict=True)
    return any(source not in (None, taken[kind]) for kind, source in pairs)


def _fields(file: reading.File) -> dict[str, Any]:
    generation, get = GENERATIONS[file.architecture], file.get
    if generation == 4:
        return _gemma_4(file)
    fields = file.fields(head_dim=256)
    fields["intermediate_dim"] *= 1 if generation == 3 else 2
    layers = fields["num_layers"]
    rope = file.rope()
    fields |= rope_fields("global", rope)
    if generation < 3:
        fields |= rope_fields("local", rope)
    if generation == 1:
        return fields
    fields = {**(GEMMA_2 if generation == 2 else GEMMA_3), **fields}
    if generation == 2:
        fields["attention_logit_soft_cap"] = float(get("attn_logit_softcapping", 50.0))
        fields["final_logit_soft_cap"] = float(get("final_logit_softcapping", 30.0))
    else:
        fields["local_rope_wavelength"] = float(get("rope.freq_base_swa", 10_000.0))
        fields["final_logit_soft_cap"] = float(get("final_logit_softcapping", 0.0)) or None
    window = int(get("attention.sliding_window", 0 if generation == 3 else 4096))
    if window or generation == 2:
        fields["sliding_window_size"] = window
    else:  # as in llama.cpp
        fields["use_sliding_window_attention"] = False
    if isinstance(pattern := get("attention.sliding_window_pattern"), int):
        fields["sliding_window_pattern"] = pattern
    fields["query_head_dim_normalize"] = layers != LARGEST[generation]
    return fields


def _gemma_4(file: reading.File) -> dict[str, Any]:
    """Returns the fields of a Gemma 4, whose settings differ between layers."""
    get = file.get
    file.need(*NEEDED_4)
    fields = file.fields(head_dim=256, varying=(reading.FEED_FORWARD, reading.GROUPS))
    layers, wide = fields["num_layers"], int(get("attention.key_length"))
    narrow = int(get("attention.key_length_swa"))
    pattern = get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise InputError(
            f"{file.path} has gemma4.attention.sliding_window_pattern={pattern!r}; a list with one "
            "entry for each layer is read"
        )
    kinds = [LOCAL if windowed else GLOBAL for windowed in pattern]
    shared = int(get("attention.shared_kv_layers", 0))
    owners = [i for i, source in enumerate(kv_sources(kinds, shared)) if source is None]
    groups = file.by_layer(reading.GROUPS, layers, fields["num_query_heads"])
    heads = {kind: {n for n, k in zip(groups, kinds, strict=True) if k == kind} for kind in kinds}
    widths = file.by_layer(reading.FEED_FORWARD, layers)
    own, rest = set(widths[: layers - shared]), set(widths[layers - shared :])
    has_value = {f"blk.{i}.attn_v.weight" in file.tensors for i in owners if kinds[i] == GLOBAL}
    cap = float(get("final_logit_softcapping", USUAL_CAP))
    wrong = {
        "experts": get("expert_count", 0),
        "rope.scaling": get("rope.scaling.type", "none") != "none" or get("rope.scaling.factor"),
        "heads of another number in layers of one kind": any(len(n) > 1 for n in heads.values()),
        "these feed_forward_length": len(own) != 1
        or len(rest) > 1
        or not rest <= own | {2 * width for width in own},
        "values of their own in some global layers alone": len(has_value) > 1,
        "values of another width than keys": (
            int(get("attention.value_length_swa", narrow)) != narrow
        ),
        "rope.dimension_count_swa other than the width of a head": (
            int(get("rope.dimension_count_swa", narrow)) != narrow
        ),
    }
    decoder.refuse(file.path, wrong)
    everywhere = next(iter(heads.get(GLOBAL, ())), None)
    local = next(iter(heads.get(LOCAL, ())), everywhere)
    table, width = file.tensors.get(tensors.PER_LAYER_TABLE), int(get(NEEDED_4[-1]))
    rows = None if table is None or not width else int(table.shape[1])
    fields |= {
        **GEMMA_4,
        "head_dim": narrow,
        "num_key_value_heads": local,
        "layer_types": kinds,
        "global_head_dim": None if wide == narrow else wide,
        "num_global_key_value_heads": None if everywhere == local else everywhere,
        "attention_k_eq_v": has_value == {False},
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": bool(rest) and rest != own,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": None if rows == fields["vocabulary_size"] else rows,
        "sliding_window_size": int(get("attention.sliding_window")),
        "final_logit_soft_cap": cap or None,
        "local_rope_wavelength": float(get("rope.freq_base_swa")),
        "global_rope_wavelength": float(get("rope.freq_base")),
    }
    if GLOBAL in kinds:
        fields["global_rope_partial_rotary_factor"] = file.turned(wide)
    if shares_otherwise(GemmaConfig(**fields)):
        raise InputError(
            f"{file.path} shares keys and values of layers that llama.cpp does not take them from; "
            "give the Hugging Face directory that it was converted from"
        )
    return fields


FORMAT = reading.GGUFFormat("Gemma", GENERATIONS, GemmaConfig, _fields, rules, unused)
# The generation with a vision encoder in a separate file.
FORMAT_3 = replace(FORMAT, name="Gemma 3", architectures=("gemma3",))

# === Writing ===

ARCHITECTURES = {number: name for name, number in GENERATIONS.items()}
# The chat template of Gemma's instruction-tuned models, with placeholders for the markers of a
# generation; without a template llama.cpp uses that of another family.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<START>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    "{{ message['content'] | trim }}{{ '<END>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<START>model\n' }}{% endif %}"
)


def form(config: GemmaConfig) -> GGUFForm:
    """Returns the settings of the GGUF file of a config, and those that it cannot hold."""
    width = config.global_head_dim or config.head_dim
    turned = config.global_rope_partial_rotary_factor
    has_factors = config.generation == 4 and GLOBAL in config.kinds
    return GGUFForm(
        architecture=ARCHITECTURES[config.generation],
        settings=_settings(config, width),
        # For Gemma 4 llama.cpp reads merges and scores.
        vocabulary=MERGED if config.generation == 4 else SCORED,
        absent=_without_place(config),
        constants=(
            {tensors.ROPE_FACTORS: tensors.rope_factors(width, turned)} if has_factors else {}
        ),
        template=TEMPLATE,
    )


def _without_place(config: GemmaConfig) -> dict[str, object]:
    """Returns the settings that would be lost or ambiguous in the file, True if in force."""
    everywhere: dict[str, object] = {
        "use_bidirectional_attention": config.use_bidirectional_attention
    }
    if config.generation < 3:  # llama.cpp reads no output layer
        everywhere["tie_word_embeddings=False"] = not config.tie_word_embeddings
    if config.generation < 4:
        everywhere |= dict.fromkeys(config.of_gemma_4, True)
        return everywhere | without_place_in_yarn(config.global_rope_yarn)
    rows = config.per_layer_vocabulary if config.hidden_size_per_layer_input else None
    return {
        **everywhere,
        "enable_moe_block": config.enable_moe_block,
        f"vocab_size_per_layer_input={rows}, which is to be vocabulary_size": (
            rows not in (None, config.vocabulary_size)
        ),
        "keys and values of these layers for those that share": shares_otherwise(config),
    }


def _settings(config: GemmaConfig, head_dim: int) -> dict[str, Setting]:
    generation = config.generation
    scaling = config.global_rope_scaling_factor if generation < 4 else 1.0
    keys: dict[str, Setting] = {
        **settings(config, head_dim, config.global_rope_wavelength, scaling),
        **(yarn_settings(config.yarn("global")) if generation < 4 else {}),
    }
    if generation in (2, 4) or config.use_sliding_window_attention:
        keys["attention.sliding_window"] = config.sliding_window_size
    caps = {
        "attn_logit_softcapping": config.attention_logit_soft_cap if generation == 2 else None,
        "final_logit_softcapping": config.final_logit_soft_cap if generation in (2, 3) else None,
    }
    keys |= {name: float(cap) for name, cap in caps.items() if cap is not None}
    if generation == 3:
        keys["rope.freq_base_swa"] = float(config.local_rope_wavelength)
        keys["attention.sliding_window_pattern"] = config.sliding_window_pattern
    if generation == 4:
        keys |= {
            "rope.freq_base_swa": float(config.local_rope_wavelength),
            "rope.dimension_count_swa": config.head_dim,
            "attention.key_length_swa": config.head_dim,
            "attention.value_length_swa": config.head_dim,
            "attention.sliding_window_pattern": [kind == LOCAL for kind in config.kinds],
            "attention.shared_kv_layers": config.num_kv_shared_layers,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "final_logit_softcapping": float(config.final_logit_soft_cap or 0.0),
        }
    return keys


EXPORT = GGUFExport(FORMAT, form)
