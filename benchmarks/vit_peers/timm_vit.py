"""timm's ViT in a plain training loop."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
from timm.layers import set_fused_attn  # noqa: E402
from timm.models import VisionTransformer  # noqa: E402

from vit_peers import loop_torch  # noqa: E402
from vit_peers.common import Pace, Settings, facts, places, weights  # noqa: E402

DENSE = {
    "attn.qkv": ("attention/query", "attention/key", "attention/value"),
    "attn.proj": ("attention/output",),
    "mlp.fc1": ("mlp/up",),
    "mlp.fc2": ("mlp/down",),
}


def tensors(settings: Settings) -> dict[str, Any]:
    """Returns its state by name."""
    arrays = weights(settings)
    found = {
        "cls_token": arrays["tokens/class_token"],
        "pos_embed": arrays["tokens/position_embedding"],
        "patch_embed.proj.weight": loop_torch.patches(arrays["patch_embedding/kernel"], settings),
        "patch_embed.proj.bias": arrays["patch_embedding/bias"],
    }

    def dense(name: str, *paths: str) -> None:
        kernels = [arrays[f"{path}/kernel"].T for path in paths]
        found[f"{name}.weight"] = np.ascontiguousarray(np.concatenate(kernels))
        found[f"{name}.bias"] = np.concatenate([arrays[f"{path}/bias"] for path in paths])

    def norm(name: str, path: str) -> None:
        found[f"{name}.weight"] = arrays[f"{path}/scale"]
        found[f"{name}.bias"] = arrays[f"{path}/bias"]

    for i in range(settings.depth):
        for name, paths in DENSE.items():
            dense(f"blocks.{i}.{name}", *(f"block_{i}/{path}" for path in paths))
        norm(f"blocks.{i}.norm1", f"block_{i}/attention_norm")
        norm(f"blocks.{i}.norm2", f"block_{i}/mlp_norm")
    norm("norm", "final_norm")
    dense("head", "logits")
    return found


def build(settings: Settings, attention: str) -> VisionTransformer:
    set_fused_attn(attention == "sdpa")
    model = VisionTransformer(
        img_size=settings.image,
        patch_size=settings.patch,
        num_classes=settings.classes,
        embed_dim=settings.width,
        depth=settings.depth,
        num_heads=settings.heads,
        mlp_ratio=settings.mlp / settings.width,
        pos_drop_rate=settings.dropout,
        proj_drop_rate=settings.dropout,
        attn_drop_rate=settings.dropout,
    )
    loop_torch.fill(model, tensors(settings))
    return model.train()


def train(
    settings: Settings, pace: Pace, attention: str, compiled: bool = False, narrow: bool = False
) -> None:
    model: Any = build(settings, attention)
    if narrow:
        model.to(torch.bfloat16)
    block = model.blocks[0]
    found = facts(
        settings,
        **loop_torch.counted(model, settings),
        heads=block.attn.num_heads,
        dropout=places(
            model.pos_drop.p,
            block.attn.attn_drop.p,
            block.attn.proj_drop.p,
            block.mlp.drop1.p,
            block.mlp.drop2.p,
        ),
    )
    run = torch.compile(model) if compiled else model
    loop_torch.train(run, list(model.parameters()), settings, pace, found)
