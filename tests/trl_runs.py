"""Tiny models, adapters and batches for runs of 20 steps that TRL and kmodels both make.

All are made by formula, so that neither needs the other's files. `tests/write_trl_losses.py` writes
TRL's losses, `tests/loop/training/test_preference_runs.py` compares.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

STEPS, ROWS, LONGEST, VOCABULARY = 20, 4, 24, 96
RATE, BETA, CLIP = 2e-3, 0.3, 1.0
RANK, ALPHA = 4, 8
HIDDEN, LAYERS, HEADS, KEY_HEADS, HEAD, INNER = 32, 2, 4, 2, 8, 48
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        **COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "bos_token_id": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "qwen3": {
        **COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "bos_token_id": None,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "use_sliding_window": False,
        "sliding_window": None,
    },
}


def draw(name: str, *shape: int, scale: float = 0.2) -> np.ndarray:
    """Random numbers that depend on the name alone."""
    rng = np.random.default_rng(list(name.encode()))
    return (scale * rng.standard_normal(shape)).astype("float32")


def write_model(family: str, folder: Path) -> Path:
    """Writes a model as a directory of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(LAYERS):
        block = f"layers.{layer}."
        shapes |= {
            f"{block}self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            f"{block}self_attn.k_proj": (KEY_HEADS * HEAD, HIDDEN),
            f"{block}self_attn.v_proj": (KEY_HEADS * HEAD, HIDDEN),
            f"{block}self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            f"{block}self_attn.q_norm": (HEAD,),
            f"{block}self_attn.k_norm": (HEAD,),
            f"{block}mlp.gate_proj": (INNER, HIDDEN),
            f"{block}mlp.up_proj": (INNER, HIDDEN),
            f"{block}mlp.down_proj": (HIDDEN, INNER),
            **{f"{block}{name}": (HIDDEN,) for name in norms},
        }
    tensors = {f"model.{name}.weight": draw(name, *shape) for name, shape in shapes.items()}
    if family == "qwen3":  # whose scale of a norm is the weight, not one more
        tensors = {k: x + 1 if x.ndim == 1 else x for k, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_adapter(folder: Path) -> Path:
    """Writes an adapter of query and value in PEFT's format, which changes nothing yet."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * HEAD), ("v_proj", KEY_HEADS * HEAD)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = draw(f"{layer}{name}", RANK, HIDDEN)
            tensors[f"{path}.lora_B.weight"] = np.zeros((width, RANK), "float32")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def records() -> list[list[dict[str, Any]]]:
    """Batches of prompts with two answers and a label, as token ids."""
    rng = np.random.default_rng(20)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(3, VOCABULARY, rng.integers(low, high)).tolist()

    return [
        [
            {
                "prompt": ids(2, 9),
                "chosen": ids(1, 12),
                "rejected": ids(1, 12),
                "label": bool(rng.integers(2)),
            }
            for _ in range(ROWS)
        ]
        for _ in range(STEPS)
    ]


def rows_of(prompts: list[list[int]], answers: list[list[int]]) -> tuple[np.ndarray, ...]:
    """Token ids, 1 for tokens, and 1 for tokens of an answer, each (rows, LONGEST)."""
    ids, there, learnt = (np.zeros((len(prompts), LONGEST), "int32") for _ in range(3))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        length = len(prompt) + len(answer)
        ids[i, :length] = prompt + answer
        there[i, :length] = 1
        learnt[i, len(prompt) : length] = 1
    return ids, there, learnt
