"""Hugging Face's ViT in a plain training loop."""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
from transformers import ViTConfig, ViTForImageClassification  # noqa: E402

from vit_peers import loop_torch  # noqa: E402
from vit_peers.common import EPSILON, Pace, Settings, facts, places, weights  # noqa: E402

DENSE = {
    "attention.q_proj": "attention/query",
    "attention.k_proj": "attention/key",
    "attention.v_proj": "attention/value",
    "attention.o_proj": "attention/output",
    "mlp.fc1": "mlp/up",
    "mlp.fc2": "mlp/down",
}
NORMS = {"layernorm_before": "attention_norm", "layernorm_after": "mlp_norm"}


def tensors(settings: Settings) -> dict[str, Any]:
    """Returns its state by name."""
    arrays = weights(settings)
    found = {
        "vit.embeddings.cls_token": arrays["tokens/class_token"],
        "vit.embeddings.position_embeddings": arrays["tokens/position_embedding"],
        "vit.embeddings.patch_embeddings.projection.weight": loop_torch.patches(
            arrays["patch_embedding/kernel"], settings
        ),
        "vit.embeddings.patch_embeddings.projection.bias": arrays["patch_embedding/bias"],
    }

    def dense(name: str, path: str) -> None:
        found[f"{name}.weight"] = arrays[f"{path}/kernel"].T.copy()
        found[f"{name}.bias"] = arrays[f"{path}/bias"]

    def norm(name: str, path: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (
            arrays[f"{path}/scale"],
            arrays[f"{path}/bias"],
        )

    for i in range(settings.depth):
        for name, path in DENSE.items():
            dense(f"vit.layers.{i}.{name}", f"block_{i}/{path}")
        for name, path in NORMS.items():
            norm(f"vit.layers.{i}.{name}", f"block_{i}/{path}")
    norm("vit.layernorm", "final_norm")
    dense("classifier", "logits")
    return found


def build(settings: Settings, attention: str, complete: bool) -> Any:
    config = ViTConfig(
        hidden_size=settings.width,
        num_hidden_layers=settings.depth,
        num_attention_heads=settings.heads,
        intermediate_size=settings.mlp,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        layer_norm_eps=EPSILON,
        image_size=settings.image,
        patch_size=settings.patch,
        num_labels=settings.classes,
        attn_implementation=attention,
    )
    model: Any = ViTForImageClassification(config)
    loop_torch.fill(model, tensors(settings))
    if complete and settings.dropout:
        for layer in model.vit.layers:
            layer.mlp.activation_fn = torch.nn.Sequential(
                layer.mlp.activation_fn, torch.nn.Dropout(settings.dropout)
            )
    return model.train()


def train(
    settings: Settings,
    pace: Pace,
    attention: str,
    compiled: bool = False,
    narrow: bool = False,
    complete: bool = True,
) -> None:
    model = build(settings, attention, complete)
    if narrow:
        model.to(torch.bfloat16)
    layer = model.vit.layers[0]
    hidden: Any = layer.mlp.activation_fn
    found = facts(
        settings,
        **loop_torch.counted(model, settings),
        heads=layer.attention.num_attention_heads,
        dropout=places(
            model.vit.embeddings.dropout.p,
            layer.attention.attention_dropout,
            layer.dropout.p,
            hidden[1].p if isinstance(hidden, torch.nn.Sequential) else 0.0,
            layer.dropout.p,
        ),
    )
    run = torch.compile(model) if compiled else model
    loop_torch.train(
        lambda images: run(images).logits, list(model.parameters()), settings, pace, found
    )
