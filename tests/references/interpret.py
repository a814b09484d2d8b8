"""Attention weights and Grad-CAM of transformers' ViT, DINOv3, CLIP and SigLIP.

Each of `vit`, `dinov3`, `clip` and `siglip` is a folder: `model` (a directory as transformers
writes it) and `expected.npz` with `images` (NHWC), `attention_<i>` (B, N, T, T) of each block, and
`cam`, maps (B, rows, columns) of Grad-CAM in torch, by hooks on the norm in front of the last
attention. The score is a logit of `classes` (vit), channel 3 of the class token (dinov3), or the
logit with the text of `token_ids` beside the image (clip, siglip). `vit` has `cam_block_0` too, by
the output of the first block, and `siglip` has `pooled` (B, 16), what its pooling attends to.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from references.two_towers import make, token_ids
from references.vit import arrays, pictures, randomise

import transformers  # isort: skip (references.vit prepares torch for it)

EAGER = {"attn_implementation": "eager"}
TINY = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 4,
}


def grad_cam(part: torch.nn.Module, score: Callable, prefix: int) -> torch.Tensor:
    """Selvaraju et al. 2017, equations 1 and 2, with patches for the pixels of a channel."""
    held = []
    hook = part.register_forward_hook(lambda _, __, output: held.append(output))
    total = score().sum()
    hook.remove()
    tokens = held[0][0] if isinstance(held[0], tuple) else held[0]
    (slopes,) = torch.autograd.grad(total, tokens)
    tokens, slopes = tokens[:, prefix:], slopes[:, prefix:]
    side = round(tokens.shape[1] ** 0.5)
    channels = tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)
    weights = slopes.transpose(1, 2).reshape(channels.shape).mean((2, 3), keepdim=True)
    return torch.relu((weights * channels).sum(1))


def save(folder: Path, name: str, attentions: tuple, **held: torch.Tensor) -> None:
    named = {f"attention_{i}": x for i, x in enumerate(attentions)}
    np.savez(folder / name / "expected.npz", **arrays(**held, **named))


def vit(folder: Path) -> None:
    config = transformers.ViTConfig(**TINY, num_labels=5, **EAGER)
    model = transformers.ViTForImageClassification(config)
    randomise(model, 1)
    model.save_pretrained(folder / "vit" / "model")
    images, classes = pictures((16, 16)), torch.tensor([4, 1])
    layers = model.vit.layers

    def score() -> torch.Tensor:
        return model(images).logits.gather(1, classes[:, None])

    held = {"images": images, "classes": classes}
    held["cam"] = grad_cam(layers[-1].layernorm_before, score, 1)
    held["cam_block_0"] = grad_cam(layers[0], score, 1)
    save(folder, "vit", model(images, output_attentions=True).attentions, **held)


def dinov3(folder: Path) -> None:
    config = transformers.DINOv3ViTConfig(**TINY, num_register_tokens=3, **EAGER)
    model = transformers.DINOv3ViTModel(config)
    randomise(model, 2)
    model.save_pretrained(folder / "dinov3" / "model")
    images = pictures((16, 16))

    def score() -> torch.Tensor:
        return model(images).pooler_output[:, 3]

    cam = grad_cam(model.model.layer[-1].norm1, score, 4)
    attentions = model(images, output_attentions=True).attentions
    save(folder, "dinov3", attentions, images=images, cam=cam)


def two_towers(folder: Path, kind: str) -> None:
    model = make(kind)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder / kind / "model")
    images, ids = pictures((16, 16), number=3), token_ids()[0][:3]
    tower = model.vision_model
    prefix = 1 if kind == "clip" else 0

    def score() -> torch.Tensor:
        return model(input_ids=ids, pixel_values=images).logits_per_image.diagonal()

    held = {"images": images, "token_ids": ids}
    held["cam"] = grad_cam(tower.encoder.layers[-1].layer_norm1, score, prefix)
    out = tower(images, output_attentions=True)
    if kind == "siglip":
        head, tokens = tower.head, out.last_hidden_state
        probe = head.probe.repeat(len(images), 1, 1)
        held["pooled"] = head.attention(probe, tokens, tokens)[1][:, 0]
    save(folder, kind, out.attentions, **held)


def write(folder: Path) -> None:
    vit(folder)
    dinov3(folder)
    for kind in ("clip", "siglip"):
        two_towers(folder, kind)
