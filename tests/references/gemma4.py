"""Gemma 4's text models of transformers: one for each feature alone, and one with all of them.

Cases are as those of `references.gemma`. `flat` is the config.json of `all` in the older spelling,
`multimodal` a directory of a Gemma4ForConditionalGeneration with towers, `unified` one of the model
without them, each with `expected.npz`. `adapter` is written by PEFT over `all`, `adapter_experts`
and `adapter_some` over `all_experts`; `<name>.npz` holds the logits without and with them.
`experts.npz` holds what a layer of experts gives.
"""

import json
from pathlib import Path

import torch
import transformers

from references.common import save, save_json, token_ids
from references.gemma import GLOBAL, LOCAL, SIZES, one, randomise, write_text_adapter

ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 1e2},
    GLOBAL: {"rope_type": "default", "rope_theta": 1e4},
}
TURNED = {
    **ROPES,
    GLOBAL: {"rope_type": "proportional", "rope_theta": 1e2, "partial_rotary_factor": 0.5},
}
# Without any of the features below: heads are alike everywhere, and every channel turns.
PLAIN = {
    **SIZES,
    "num_hidden_layers": 4,
    "layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL],
    "sliding_window": 5,
    "global_head_dim": SIZES["head_dim"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "rope_parameters": ROPES,
}
HEADS = {"0": {"head_dim": 12, "num_key_value_heads": 1}}
FEATURES = {
    "heads": {"per_layer_config": {**HEADS, "3": HEADS["0"]}},
    "key_is_value": {"attention_k_eq_v": True},
    "shared": {"num_kv_shared_layers": 2},
    "double_wide": {"num_kv_shared_layers": 1, "use_double_wide_mlp": True},
    "per_layer": {"hidden_size_per_layer_input": 6},
    "turned": {"rope_parameters": TURNED},
    "capped": {"final_logit_softcapping": 4.0},
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}
ALL = {
    **PLAIN,
    **{name: value for feature in FEATURES.values() for name, value in feature.items()},
    "num_hidden_layers": 6,
    "layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL],
    "num_kv_shared_layers": 2,
    "per_layer_config": dict.fromkeys("035", HEADS["0"]),
}


# Without per-layer embeddings, which `Gemma4UnifiedConfig` does not have.
UNIFIED = {name: value for name, value in PLAIN.items() if "per_layer_input" not in name}
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
AUDIO = {**SMALL, "output_proj_dims": 8, "subsampling_conv_channels": [4, 4]}


def write_flat(folder: Path) -> None:
    text = json.loads((folder / "all" / "model" / "config.json").read_text())
    heads = text.pop("per_layer_config")["0"]
    text["global_head_dim"] = heads["head_dim"]
    text["num_global_key_value_heads"] = heads["num_key_value_heads"]
    (folder / "flat").mkdir(exist_ok=True)
    save_json(folder / "flat" / "config.json", text)


def write_multimodal(folder: Path) -> None:
    vision = {**SMALL, "intermediate_size": 8, "num_key_value_heads": 2, "head_dim": 4}
    multimodal = transformers.Gemma4Config(
        text_config={**PLAIN, **FEATURES["shared"], **FEATURES["per_layer"]},
        vision_config={**vision, "position_embedding_size": 4},
        audio_config=AUDIO,
    )
    unified = transformers.Gemma4UnifiedConfig(
        text_config=UNIFIED, vision_config={"mm_embed_dim": 8, "output_proj_dims": 8}
    )
    ids = token_ids(3, 160, (1, 9))
    for name, model in (
        ("multimodal", transformers.Gemma4ForConditionalGeneration(multimodal)),
        ("unified", transformers.Gemma4UnifiedForConditionalGeneration(unified)),
    ):
        randomise(model).save_pretrained(folder / name / "model")
        with torch.no_grad():
            save(folder / name / "expected.npz", token_ids=ids, logits=model(ids).logits)


def write_experts(folder: Path) -> None:
    """The experts of a layer for a given choice: in bfloat16 the router may choose otherwise."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "experts" / "model", experts_implementation="eager"
    )
    experts = model.model.layers[0].experts.bfloat16()
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(300, 32, generator=generator).bfloat16()
    weights, indices = torch.rand(300, 6, generator=generator).topk(2)
    with torch.no_grad():
        y16 = experts(x, indices, weights).float()
        y64 = experts.double()(x.double(), indices, weights.double())
    inputs = {"x": x.float(), "indices": indices, "weights": weights}
    save(folder / "experts.npz", **inputs, y16=y16, y64=y64)


def write_adapters(folder: Path) -> None:
    targets = ["q_proj", "v_proj", "per_layer_input_gate", "per_layer_model_projection"]
    write_text_adapter(folder, "all", "adapter", targets)
    more = {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}
    targets = ["q_proj", "router.proj"]
    write_text_adapter(folder, "all_experts", "adapter_experts", targets, **more)
    down, up = "model.layers.1.experts.down_proj", "model.layers.3.experts.gate_up_proj"
    more = {"target_parameters": [down, up], "rank_pattern": {up: 2}, "alpha_pattern": {down: 5}}
    write_text_adapter(folder, "all_experts", "adapter_some", [], **more)


def write(folder: Path) -> None:
    for name, feature in {"plain": {}, **FEATURES, "experts": EXPERTS}.items():
        # If hidden states are asked for, `generate` leaves out a shortcut that fails on shared
        # keys and values without per-layer embeddings.
        config = transformers.Gemma4TextConfig(**{**PLAIN, **feature}, output_hidden_states=True)
        config._experts_implementation = "eager"  # the other one has no float64
        one(folder / name, config)
    one(folder / "all", transformers.Gemma4TextConfig(**ALL), "60KB")
    config = transformers.Gemma4TextConfig(**ALL, **EXPERTS)
    config._experts_implementation = "eager"
    one(folder / "all_experts", config, "60KB")
    write_flat(folder)
    write_multimodal(folder)
    write_experts(folder)
    write_adapters(folder)
