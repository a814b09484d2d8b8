"""Gemma 1, 2 and 3 of transformers, with hidden states layer by layer and greedy continuations.

`untied` is a Gemma 2 with an output layer of its own, and `adapter` is written by PEFT over it,
with matrices of both tables; `adapter.npz` holds the logits of both. Each other case is a folder:
`model` (a directory as transformers writes it) and `expected.npz` with `token_ids` (B, T),
`embedding`, `block_<i>`, `final`, `logits`, `logits64` (the model in float64) and `logits16` (in
bfloat16), `prompt_<j>` and `greedy_<j>` (64 tokens behind it). Sizes are such that each feature
changes the result: windows below the length, caps that bite, fewer key/value heads than heads, a
head width that is not width / heads, an odd length.
"""

from pathlib import Path

import torch
import transformers

from references.common import recorded_blocks, save, token_ids
from references.lora import write_adapter

DECODER = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
}
SIZES = {**DECODER, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
WINDOWS = {"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 7}
LAYERS = {"layer_types": [LOCAL, GLOBAL, LOCAL]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PROMPTS = (11, 4, 1)
NEW = 64


def configs() -> dict[str, transformers.PretrainedConfig]:
    capped = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = {GLOBAL: linear, LOCAL: ROPE}
    return {
        "gemma": transformers.GemmaConfig(**SIZES, num_hidden_layers=2),
        "gemma2": transformers.Gemma2Config(**SIZES, **WINDOWS, **capped),
        "untied": transformers.Gemma2Config(
            **SIZES, **WINDOWS, **capped, tie_word_embeddings=False
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **SIZES, **WINDOWS, **LAYERS, rope_parameters=ropes
        ),
    }


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / weight.shape[1] ** 0.5 if weight.ndim == 2 else 0.3 * noise)
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):
                number.add_(0.3 * torch.randn(number.shape, generator=generator))
    return model.eval()


def greedy(model: torch.nn.Module, inputs: dict, number: int, **settings: object) -> torch.Tensor:
    """The tokens that the model puts behind one row of inputs."""
    settings |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"max_new_tokens": number, "return_dict_in_generate": True}
    return model.generate(**inputs, **settings).sequences[0, inputs["input_ids"].shape[1] :]


def one(folder: Path, config: transformers.PretrainedConfig, shards: str = "1GB") -> None:
    config._attn_implementation = "eager"
    model = randomise(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder / "model", max_shard_size=shards)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, config.vocab_size, (2, 19), generator=generator)
    with torch.no_grad():
        with recorded_blocks(model.model.layers) as outputs:
            out = model(ids, output_hidden_states=True)
        outputs |= {"token_ids": ids, "logits": out.logits}
        outputs |= {"embedding": out.hidden_states[0], "final": out.hidden_states[-1]}
        for j, length in enumerate(PROMPTS):
            prompt = torch.randint(3, config.vocab_size, (1, length), generator=generator)
            inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            outputs |= {f"prompt_{j}": prompt[0], f"greedy_{j}": greedy(model, inputs, NEW)}
        outputs["logits64"] = model.double()(ids).logits
        outputs["logits16"] = model.bfloat16()(ids).logits.float()
    save(folder / "expected.npz", **outputs)


def write_text_adapter(folder: Path, base: str, name: str, targets: list[str], **more) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / base / "model")
    ids = token_ids(3, 160, (2, 9), 7)
    inputs = {"input_ids": ids}
    plain, logits = write_adapter(folder / name, model, targets, inputs, "logits", **more)
    save(folder / f"{name}.npz", inputs=ids, plain=plain, logits=logits)


def write(folder: Path) -> None:
    for name, config in configs().items():
        # One of them in several files.
        one(folder / name, config, "20KB" if name == "gemma2" else "1GB")
    write_text_adapter(folder, "untied", "adapter", ["q_proj", "embed_tokens", "lm_head"])
