"""Gemma 1, 2 and 3 of transformers, with hidden states layer by layer and greedy continuations.

Each case is a folder: `model` (a directory as transformers writes it) and `expected.npz` with
`token_ids` (B, T), `embedding`, `block_<i>`, `final`, `logits`, `logits64` (the model in float64)
and `logits16` (in bfloat16), `prompt_<j>` and `greedy_<j>` (64 tokens behind it). Sizes are such
that each feature changes the result: windows below the length, caps that bite, fewer key/value
heads than heads, a head width that is not width / heads, an odd length.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import transformers  # noqa: E402

SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
PROMPTS = (11, 4, 1)
NEW = 64


def configs() -> dict[str, transformers.PretrainedConfig]:
    window = {"sliding_window": 5, "query_pre_attn_scalar": 7}
    return {
        "gemma": transformers.GemmaConfig(**SIZES, num_hidden_layers=2),
        "gemma2": transformers.Gemma2Config(
            **SIZES,
            **window,
            num_hidden_layers=3,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=4.0,
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **SIZES,
            **window,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    }


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / weight.shape[1] ** 0.5 if weight.ndim == 2 else 0.3 * noise)
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):
                number.add_(0.3 * torch.randn(number.shape, generator=generator))
    model.eval()


@contextmanager
def recorded_blocks(layers: Iterable[torch.nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """What each block gives inside, by name: transformers' list of hidden states ends normed."""
    found: dict[str, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, i=i: found.__setitem__(
                f"block_{i}", out[0] if isinstance(out, tuple) else out
            )
        )
        for i, layer in enumerate(layers)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def one(folder: Path, config: transformers.PretrainedConfig, shards: str) -> None:
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.save_pretrained(folder / "model", max_shard_size=shards)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, config.vocab_size, (2, 19), generator=generator)
    with torch.no_grad():
        with recorded_blocks(model.model.layers) as found:
            out = model(ids, output_hidden_states=True)
        found |= {
            "token_ids": ids,
            "embedding": out.hidden_states[0],
            "final": out.hidden_states[-1],
            "logits": out.logits,
        }
        for j, length in enumerate(PROMPTS):
            prompt = torch.randint(3, config.vocab_size, (1, length), generator=generator)
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
            ).sequences
            found |= {f"prompt_{j}": prompt[0], f"greedy_{j}": whole[0, length:]}
        found["logits64"] = model.double()(ids).logits
        found["logits16"] = model.bfloat16()(ids).logits.float()
    np.savez(folder / "expected.npz", **{name: x.numpy() for name, x in found.items()})


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    for name, config in configs().items():
        # One of them in several files.
        one(folder / name, config, "20KB" if name == "gemma2" else "1GB")
