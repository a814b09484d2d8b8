"""Hugging Face directories of Gemma 1, 2 and 3, the text part of multimodal ones included."""

import logging
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.generation.settings import not_applied
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.presets import GEMMA_2, GEMMA_3
from kmodels.weights import Checkpoint, Rule, read_safetensors, transpose
from kmodels.weights.readers import read_json

log = logging.getLogger("kmodels")

BLOCK = "layers.{i}"
GENERATIONS = {"gemma": 1, "gemma2": 2, "gemma3_text": 3, "gemma3": 3}
HEAD = "lm_head.weight"
# A causal model, the text part of a multimodal one in transformers 4 and 5, a bare model.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
OTHER_PARTS = ("vision_tower", "multi_modal_projector", "embed_vision")
GENERATION = "generation_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
# What transformers' configs leave out where it equals their own defaults.
DEFAULTS: dict[int, dict[str, Any]] = {
    1: {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    2: {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    3: {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}


def rules(config: GemmaConfig, prefix: str = "model.") -> list[Rule]:
    """The table of one generation; `prefix` is empty in a bare model."""
    kernels = {
        "self_attn.q_proj": "attention/query",
        "self_attn.k_proj": "attention/key",
        "self_attn.v_proj": "attention/value",
        "self_attn.o_proj": "attention/output",
        "mlp.gate_proj": "mlp/gate",
        "mlp.up_proj": "mlp/up",
        "mlp.down_proj": "mlp/down",
    }
    norms = {"input_layernorm": "attention_norm"}
    if config.generation == 1:
        norms["post_attention_layernorm"] = "mlp_norm"
    else:
        norms["post_attention_layernorm"] = "post_attention_norm"
        norms["pre_feedforward_layernorm"] = "mlp_norm"
        norms["post_feedforward_layernorm"] = "post_mlp_norm"
    if config.generation == 3:
        norms["self_attn.q_norm"] = "attention/query_norm"
        norms["self_attn.k_norm"] = "attention/key_norm"
    table = [Rule("embed_tokens.weight", "token_embedding/embeddings")]
    for source, target in norms.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/scale"))
    for source, target in kernels.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/kernel", transpose))
    table.append(Rule("norm.weight", "final_norm/scale"))
    return [Rule(prefix + rule.source, rule.target, rule.transform) for rule in table]


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Whether a directory with this config.json is of this format."""
    return path.is_dir() and description.get("model_type") in GENERATIONS


def open_checkpoint(
    path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
) -> Checkpoint:
    """Understands a directory.

    Args:
        path: of the directory.
        description: the object in its config.json.
        given: unused; the file says it all.
        weights: False where only the architecture is wanted and no tensors need be there.

    Raises:
        InputError: for settings that the model has no counterpart for.
    """
    backbone = backbone_fields(path, description)
    tensors = read_safetensors(path) if weights else {}
    parts = {name: part for name in tensors for part in OTHER_PARTS if f"{part}." in name}
    names = [name for name in tensors if name not in parts]
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), PREFIXES[2])
    # The output layer is the embedding table; some files hold it twice.
    dropped = (HEAD, f"language_model.{HEAD}")
    held = {
        name: tensors[name]
        for name in names
        if name not in dropped and not name.endswith("rotary_emb.inv_freq")
    }
    has_tokenizer = any((path / name).is_file() for name in TOKENIZERS)
    generation = read_json(path / GENERATION) if (path / GENERATION).is_file() else None
    if weights and generation and (asked := not_applied(generation)):
        log.warning(
            "%s asks for %s, which generate does not do by itself; "
            'compile(sampler="generation_config") draws so, and lengths go to generate',
            path / GENERATION,
            asked,
        )
    return Checkpoint(
        path=path,
        kind="Hugging Face",
        backbone=backbone,
        task={"generation_config": generation},
        preprocessor={"tokenizer": str(path)} if has_tokenizer else None,
        tensors=held,
        rules=rules(GemmaConfig(**backbone), prefix),
        left_out=[part for part in OTHER_PARTS if part in parts.values()],
    )


def backbone_fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """The config of a config.json.

    Raises:
        InputError: lists the settings that the model has no counterpart for.
    """
    generation = GENERATIONS[description["model_type"]]
    given = {**description, **(description.get("text_config") or {})}
    text = {**DEFAULTS[generation], **given}
    activation = text.get("hidden_activation") or text.get("hidden_act") or "gelu_pytorch_tanh"
    known = ("gelu", "gelu_pytorch_tanh") if generation == 1 else ("gelu_pytorch_tanh",)
    wrong = {
        f"an activation {activation!r}": activation not in known,
        "attention_bias": text.get("attention_bias"),
        "use_bidirectional_attention": text.get("use_bidirectional_attention"),
        "tie_word_embeddings=false": text.get("tie_word_embeddings") is False,
    }
    if problems := [name for name, there in wrong.items() if there]:
        raise InputError(f"{path}: the model has no counterpart for {', '.join(problems)}")
    fields = {
        "vocabulary_size": text["vocab_size"],
        "num_layers": text["num_hidden_layers"],
        "num_query_heads": text["num_attention_heads"],
        "num_key_value_heads": text["num_key_value_heads"],
        "hidden_dim": text["hidden_size"],
        "intermediate_dim": text["intermediate_size"] * (1 if generation == 3 else 2),
        "head_dim": text["head_dim"],
        "layer_norm_epsilon": text.get("rms_norm_eps", 1e-6),
        "dropout": text.get("attention_dropout") or 0.0,
    }
    rope = _rope(path, text)
    if generation == 1:
        wavelength, scaling = rope("", "rope_theta", 10_000.0)
        return fields | _both(wavelength, scaling)
    fields |= GEMMA_2 if generation == 2 else GEMMA_3
    fields |= {
        "query_pre_attention_scalar": float(text["query_pre_attn_scalar"]),
        "final_logit_soft_cap": text["final_logit_softcapping"],
        # Transformers' Gemma 3 reads this setting and does not apply it.
        "attention_logit_soft_cap": text["attn_logit_softcapping"] if generation == 2 else None,
        "sliding_window_size": text["sliding_window"] or 1,
        **_pattern(path, text, fields["sliding_window_pattern"]),
    }
    if generation == 2:
        return fields | _both(*rope("", "rope_theta", 10_000.0))
    local = rope("sliding_attention", "rope_local_base_freq", 10_000.0)
    everywhere = rope("full_attention", "rope_theta", 1_000_000.0)
    return fields | {
        "local_rope_wavelength": local[0],
        "local_rope_scaling_factor": local[1],
        "global_rope_wavelength": everywhere[0],
        "global_rope_scaling_factor": everywhere[1],
    }


def _both(wavelength: float, scaling: float) -> dict[str, float]:
    return {
        f"{where}_rope_{name}": value
        for where in ("local", "global")
        for name, value in (("wavelength", wavelength), ("scaling_factor", scaling))
    }


def _rope(path: Path, text: dict[str, Any]) -> Any:
    """Reads wavelength and scaling as transformers 4 and 5 write them."""
    new, old = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}

    def read(kind: str, name: str, default: float) -> tuple[float, float]:
        found = (new.get(kind) or {}) if kind else new
        scaling = {**({} if kind == "sliding_attention" else old), **found}
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in ("default", "linear"):
            raise InputError(
                f"{path}: rope_type is {rope_type!r}; the model knows default and linear"
            )
        base = float(scaling.get("rope_theta", text.get(name, default)))
        return base, float(scaling.get("factor", 1.0)) if rope_type == "linear" else 1.0

    return read


def _pattern(path: Path, text: dict[str, Any], usual: int) -> dict[str, Any]:
    """Which layers are local, as "every n-th is not"."""
    layers = text["num_hidden_layers"]
    types = text.get("layer_types")
    if not types:
        pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or usual
        return {"sliding_window_pattern": pattern}
    local = [kind == "sliding_attention" for kind in types]
    if not any(local):
        return {"use_sliding_window_attention": False}
    # Fewer layers than the usual pattern are all local; keep the pattern of the family then.
    pattern = local.index(False) + 1 if False in local else max(usual, layers + 1)
    if local != [bool((i + 1) % pattern) for i in range(layers)]:
        raise InputError(f"{path}: layer_types do not repeat: {', '.join(types)}")
    return {"sliding_window_pattern": pattern}
