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

import torch
import transformers

from references.common import pictures, randomise, save, vision_sizes
from references.two_towers import make, padded_ids

EAGER = {"attn_implementation": "eager"}
TINY = vision_sizes(num_hidden_layers=3, intermediate_size=40, image_size=16)


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


def save_case(folder: Path, attentions: tuple, **outputs: torch.Tensor) -> None:
    outputs |= {f"attention_{i}": x for i, x in enumerate(attentions)}
    save(folder / "expected.npz", **outputs)


def vit(folder: Path) -> None:
    config = transformers.ViTConfig(**TINY, num_labels=5, **EAGER)
    model = randomise(transformers.ViTForImageClassification(config), 1)
    model.save_pretrained(folder / "model")
    images, classes = pictures((16, 16)), torch.tensor([4, 1])
    layers = model.vit.layers

    def score() -> torch.Tensor:
        return model(images).logits.gather(1, classes[:, None])

    outputs = {"images": images, "classes": classes}
    outputs["cam"] = grad_cam(layers[-1].layernorm_before, score, 1)
    outputs["cam_block_0"] = grad_cam(layers[0], score, 1)
    save_case(folder, model(images, output_attentions=True).attentions, **outputs)


def dinov3(folder: Path) -> None:
    config = transformers.DINOv3ViTConfig(**TINY, num_register_tokens=3, **EAGER)
    model = randomise(transformers.DINOv3ViTModel(config), 2)
    model.save_pretrained(folder / "model")
    images = pictures((16, 16))
    cam = grad_cam(model.model.layer[-1].norm1, lambda: model(images).pooler_output[:, 3], 4)
    attentions = model(images, output_attentions=True).attentions
    save_case(folder, attentions, images=images, cam=cam)


def two_towers(folder: Path, kind: str) -> None:
    model = make(kind)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder / "model")
    images, ids = pictures((16, 16), number=3), padded_ids()[0][:3]
    tower = model.vision_model
    prefix = 1 if kind == "clip" else 0

    def score() -> torch.Tensor:
        return model(input_ids=ids, pixel_values=images).logits_per_image.diagonal()

    outputs = {"images": images, "token_ids": ids}
    outputs["cam"] = grad_cam(tower.encoder.layers[-1].layer_norm1, score, prefix)
    out = tower(images, output_attentions=True)
    if kind == "siglip":
        head, tokens = tower.head, out.last_hidden_state
        probe = head.probe.repeat(len(images), 1, 1)
        outputs["pooled"] = head.attention(probe, tokens, tokens)[1][:, 0]
    save_case(folder, out.attentions, **outputs)


def write(folder: Path) -> None:
    vit(folder / "vit")
    dinov3(folder / "dinov3")
    for kind in ("clip", "siglip"):
        two_towers(folder / kind, kind)
