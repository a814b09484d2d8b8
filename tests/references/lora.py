"""Adapters as PEFT writes them, over a ViT and a Gemma of transformers.

`vit` and `gemma` are directories as transformers writes them. Each case is a folder: `adapter` (as
PEFT writes it) and `expected.npz` with `inputs` and the `logits` of the adapted model. Values are
random everywhere, so that scaling, lengths and layouts all count.
"""

from pathlib import Path

import numpy as np
import peft
import torch
import transformers

from references.common import save, save_model, vision_sizes

VIT = vision_sizes(hidden_size=16, num_attention_heads=2, intermediate_size=24, image_size=8)
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
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DORA = {"lora_alpha": 6, "use_dora": True}
HEAD = {"modules_to_save": ["classifier"], "lora_dropout": 0.1}
TABLE = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
# Layers of LoRA, and other settings of PEFT.
CASES = {
    "vit_plain": (["q_proj", "v_proj"], {"lora_alpha": 6}),
    "vit_rslora": (["fc1", "o_proj"], {"lora_alpha": 6, "use_rslora": True}),
    "vit_dora": ([*ATTENTION, "fc1", "fc2"], DORA),
    "vit_head": (["q_proj"], {"lora_alpha": 2, **HEAD}),
    "gemma_plain": (["q_proj", "v_proj"], {"lora_alpha": 6}),
    "gemma_dora": (["gate_proj", "k_proj"], DORA),
    "gemma_rows": (["q_proj"], {"trainable_token_indices": [62, 7, 95]}),
    "gemma_table": (["q_proj"], TABLE),
}
PARTS = ("lora_A.default", "lora_B.default", "modules_to_save.default", "trainable_tokens_delta")


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * noise.abs())
            else:
                parameter.copy_(0.25 * noise)


def write_adapter(
    folder: Path, model: torch.nn.Module, targets: list[str], inputs: dict, output: str, **more
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes a random adapter of the layers; returns an output without and with the adapter."""
    settings = {"target_modules": targets, "lora_alpha": 6, **more}
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        plain = model(**inputs)[output]
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, **settings)).eval()
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(0.25 * torch.randn(weight.shape, generator=generator))
        adapted.save_pretrained(folder)
        return plain, adapted(**inputs)[output]


def _base(family: str) -> torch.nn.Module:
    if family == "vit":
        config = transformers.ViTConfig(**VIT, num_channels=1, num_labels=3)
        model = transformers.ViTForImageClassification(config)
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
        save_model(_base(family), folder / family)
    for seed, (case, (targets, settings)) in enumerate(CASES.items(), start=1):
        family = case.split("_")[0]
        given = torch.from_numpy(inputs[family])
        given = given.permute(0, 3, 1, 2) if family == "vit" else given.long()
        config = peft.LoraConfig(r=3, target_modules=targets, **settings)
        model = peft.get_peft_model(_base(family), config).eval()
        chosen = torch.nn.ModuleList(
            module for name, module in model.named_modules() if name.endswith(PARTS)
        )
        _randomise(chosen, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
            logits = model(given).logits
        model.save_pretrained(folder / case / "adapter")
        save(folder / case / "expected.npz", inputs=inputs[family], logits=logits)
