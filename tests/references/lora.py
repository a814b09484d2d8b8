"""Adapters as PEFT writes them, over a ViT and a Gemma of transformers.

`vit` and `gemma` are directories as transformers writes them. Each case is a folder: `adapter` (as
PEFT writes it) and `expected.npz` with `inputs` and the `logits` of the adapted model. Values are
random everywhere, so that scaling, lengths and layouts all count.
"""

from pathlib import Path

import numpy as np
import torch

from references.vit import save_huggingface
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import peft  # noqa: E402
import transformers  # noqa: E402

VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 3,
}
GEMMA = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
CASES = {
    "vit_plain": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 6},
    "vit_rslora": {"target_modules": ["fc1", "o_proj"], "lora_alpha": 6, "use_rslora": True},
    "vit_dora": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
        "lora_alpha": 6,
        "use_dora": True,
    },
    "vit_head": {
        "target_modules": ["q_proj"],
        "lora_alpha": 2,
        "modules_to_save": ["classifier"],
        "lora_dropout": 0.1,
    },
    "gemma_plain": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 6},
    "gemma_dora": {"target_modules": ["gate_proj", "k_proj"], "lora_alpha": 6, "use_dora": True},
    "gemma_rows": {"target_modules": ["q_proj"], "trainable_token_indices": [62, 7, 95]},
    "gemma_table": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * noise.abs())
            else:
                parameter.copy_(0.25 * noise)


def with_random_lora(model: torch.nn.Module, targets: list[str], **more: object) -> torch.nn.Module:
    """The model under adapters of PEFT at these layers, which change what it gives."""
    settings = {"target_modules": targets, "lora_alpha": 6, **more}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, **settings)).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(0.25 * torch.randn(weight.shape, generator=generator))
    return adapted


def _base(family: str) -> torch.nn.Module:
    if family == "vit":
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    else:
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA))
    _randomise(model, 0)
    return model.eval()


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = {
        "vit": rng.normal(size=(2, 8, 8, 1)).astype("float32"),
        "gemma": rng.integers(3, 96, size=(2, 9)).astype("int32"),
    }
    for family in inputs:
        save_huggingface(_base(family), folder / family)
    for seed, (case, settings) in enumerate(CASES.items(), start=1):
        family = case.split("_")[0]
        given = torch.from_numpy(inputs[family])
        given = given.permute(0, 3, 1, 2) if family == "vit" else given.long()
        model = peft.get_peft_model(_base(family), peft.LoraConfig(r=3, **settings)).eval()
        chosen = torch.nn.ModuleList(
            module for name, module in model.named_modules() if name.endswith(PARTS)
        )
        _randomise(chosen, seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.rand(parameter.shape))
            logits = model(given).logits.numpy()
        model.save_pretrained(folder / case / "adapter")
        np.savez(folder / case / "expected.npz", inputs=inputs[family], logits=logits)


PARTS = ("lora_A.default", "lora_B.default", "modules_to_save.default", "trainable_tokens_delta")
