"""The vision half of Gemma 4 in transformers' and PEFT's files: names of tensors and settings."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kmodels.models.blocks import module_names
from kmodels.models.gemma_vision.gemma4_encoder import (
    BOUNDS,
    Gemma4VisionEmbedder,
    Gemma4VisionEncoder,
)
from kmodels.weights import Rule, transpose

if TYPE_CHECKING:
    import keras


class VisionFiles(NamedTuple):
    """A kind of vision encoder in transformers' files.

    Attributes:
        rules: an encoder to its rules, with the names of the published files.
        settings: a vision_config to the arguments of the encoder, and the settings that are not
            supported, with True if they are used.
        form: an encoder to its vision_config.
    """

    rules: Callable[[Any], list[Rule]]
    settings: Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, object]]]
    form: Callable[[Any], dict[str, Any]]


# === The tower ===

TOWER_KIND = "gemma4_vision"
# Arguments of the layer, with the settings of the same meaning and their usual values.
TOWER_SETTINGS: dict[str, tuple[str, Any]] = {
    "patch_size": ("patch_size", 16),
    "num_heads": ("num_attention_heads", 12),
    "hidden_dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 16),
    "intermediate_dim": ("intermediate_size", 3072),
    "head_dim": ("head_dim", 64),
    "num_key_value_heads": ("num_key_value_heads", 12),
    "pool_size": ("pooling_kernel_size", 3),
    "position_embedding_size": ("position_embedding_size", 10_240),
    "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
    "dropout": ("attention_dropout", 0.0),
    "use_clipped_linears": ("use_clipped_linears", False),
    "standardize": ("standardize", False),
}
ROPE = {"rope_type": "axial", "rope_theta": 100.0}
# The published files have the older name.
AXIAL = ("axial", "default")
TOWER_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
}
LAYERS = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": "mlp.down_proj",
}
TOWER, PROJECTOR = "model.vision_tower.", "model.embed_vision."
BLOCK = f"{TOWER}encoder.layers.{{i}}."


def _tower_rules(encoder: Gemma4VisionEncoder) -> list[Rule]:
    front = f"{TOWER}patch_embedder."
    table = [
        Rule(f"{front}input_proj.weight", "patch_embedding/kernel", transpose),
        Rule(f"{front}position_embedding_table", "position_embeddings"),
        Rule(f"{PROJECTOR}embedding_projection.weight", "input_projection/kernel", transpose),
    ]
    for theirs, ours in TOWER_NORMS.items():
        table.append(Rule(f"{BLOCK}{theirs}.weight", f"block_{{i}}/{ours}/scale"))
    for ours, theirs in LAYERS.items():
        place = f"block_{{i}}/{ours}"
        table.append(Rule(f"{BLOCK}{theirs}.linear.weight", f"{place}/kernel", transpose))
        if encoder.use_clipped_linears:
            table += [Rule(f"{BLOCK}{theirs}.{name}", f"{place}/{name}") for name in BOUNDS]
    if encoder.standardize:
        table += [Rule(f"{TOWER}{name}", name) for name in ("std_bias", "std_scale")]
    return table


def _tower_settings(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    arguments = {
        ours: vision.get(theirs, usual) for ours, (theirs, usual) in TOWER_SETTINGS.items()
    }
    rope = {**ROPE, **(vision.get("rope_parameters") or {})}
    activation = vision.get("hidden_activation", "gelu_pytorch_tanh")
    kind = vision.get("model_type", TOWER_KIND)
    arguments |= {"rope_max_wavelength": rope["rope_theta"], "dropout": arguments["dropout"] or 0.0}
    return arguments, {
        f"model_type={kind!r} of the vision_config": kind != TOWER_KIND,
        f"hidden_activation={activation!r} of the vision tower": activation != "gelu_pytorch_tanh",
        "attention_bias of the vision tower": vision.get("attention_bias"),
        f"rope_type={rope['rope_type']!r} of the vision tower": rope["rope_type"] not in AXIAL,
    }


def _tower_form(encoder: Gemma4VisionEncoder) -> dict[str, Any]:
    arguments = {theirs: getattr(encoder, ours) for ours, (theirs, _) in TOWER_SETTINGS.items()}
    rope = {**ROPE, "rope_theta": encoder.rope_max_wavelength}
    activation = {"hidden_activation": "gelu_pytorch_tanh"}
    return {"model_type": TOWER_KIND, **arguments, **activation, "rope_parameters": rope}


TOWER_FILES = VisionFiles(_tower_rules, _tower_settings, _tower_form)

# === Gemma 4 12B, without a tower ===

EMBEDDER_KIND = "gemma4_unified_vision"
EMBEDDER_SETTINGS: dict[str, tuple[str, Any]] = {
    "patch_size": ("patch_size", 16),
    "pool_size": ("pooling_kernel_size", 3),
    "hidden_dim": ("mm_embed_dim", 3840),
    "position_embedding_size": ("mm_posemb_size", 1120),
    "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
}
EMBEDDER_NORMS = {
    "patch_ln1": "patch_norm",
    "patch_ln2": "patch_embedding_norm",
    "pos_norm": "position_norm",
}
EMBEDDER = "model.vision_embedder."


def _embedder_rules(encoder: Gemma4VisionEmbedder) -> list[Rule]:
    table = [
        Rule(f"{EMBEDDER}{theirs}.{theirs_end}", f"{ours}/{end}")
        for theirs, ours in EMBEDDER_NORMS.items()
        for theirs_end, end in (("weight", "scale"), ("bias", "bias"))
    ]
    return [
        *table,
        Rule(f"{EMBEDDER}patch_dense.weight", "patch_embedding/kernel", transpose),
        Rule(f"{EMBEDDER}patch_dense.bias", "patch_embedding/bias"),
        Rule(f"{EMBEDDER}pos_embedding", "position_embeddings"),
        Rule(f"{PROJECTOR}embedding_projection.weight", "input_projection/kernel", transpose),
    ]


def _embedder_settings(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    arguments = {
        ours: vision.get(theirs, usual) for ours, (theirs, usual) in EMBEDDER_SETTINGS.items()
    }
    width = vision.get("output_proj_dims", arguments["hidden_dim"])
    kind = vision.get("model_type", EMBEDDER_KIND)
    return arguments, {
        f"model_type={kind!r} of the vision_config": kind != EMBEDDER_KIND,
        f"output_proj_dims={width}, which is to be mm_embed_dim": width != arguments["hidden_dim"],
    }


def _embedder_form(encoder: Gemma4VisionEmbedder) -> dict[str, Any]:
    arguments = {theirs: getattr(encoder, ours) for ours, (theirs, _) in EMBEDDER_SETTINGS.items()}
    return {"model_type": EMBEDDER_KIND, **arguments, "output_proj_dims": encoder.hidden_dim}


EMBEDDER_FILES = VisionFiles(_embedder_rules, _embedder_settings, _embedder_form)

# === PEFT ===

TEXT = "model.language_model."
PEFT_TOWER = {
    "patch_embedding": "model.vision_tower.patch_embedder.input_proj",
    "input_projection": "model.embed_vision.embedding_projection",
    **{f"block_{{i}}/{ours}": f"{BLOCK}{theirs}.linear" for ours, theirs in LAYERS.items()},
}
PEFT_EMBEDDER = {
    "patch_embedding": "model.embed_vision.patch_dense",
    "input_projection": "model.embed_vision.multimodal_embedder.embedding_projection",
}


def peft_names(model: "keras.Model") -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    encoder = getattr(model, "backbone", model).vision_encoder
    texts = module_names.names(model, (TEXT,), heads=("lm_head",))
    vision = PEFT_TOWER if isinstance(encoder, Gemma4VisionEncoder) else PEFT_EMBEDDER
    names = {f"vision_encoder/{ours}": theirs for ours, theirs in vision.items()}
    return [{**texts[0], **names}, *texts[1:]]
