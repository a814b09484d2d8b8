"""DeiT, DINOv2, SigLIP and CLIP of transformers and timm, and SigLIP 2's `.npz` as timm reads it.

Each case is a folder: `model` (a directory or file as its package writes it) and `expected.npz`
with `images` (NHWC), `parameters` (those of the image tower), and what the package gives of
`block_<i>`, `final` (after the last norm), `pooled` and `logits`; the same with `resized_` for
another image size. Sizes are such that each feature changes the result, and else alike, since JAX
compiles for each length again.
"""

from pathlib import Path

import numpy as np
import timm
import torch
import transformers

from references.common import (
    PATCH,
    SIZE,
    at_both_sizes,
    parameters,
    randomise,
    recorded_blocks,
    save,
    save_model,
    text_sizes,
    vision_sizes,
)
from references.vit import npz_tensors

TINY = vision_sizes()
TEXT = text_sizes(
    num_hidden_layers=1,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=None,
    pad_token_id=None,
)
TIMM = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": 24, "depth": 2, "num_heads": 3}


# === transformers ===


def rows_of(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """What SigLIP 2 takes: patches as rows, all of them seen, and the grid that they came from."""
    number, channels, height, width = images.shape
    grid = (height // PATCH, width // PATCH)
    rows = images.reshape(number, channels, grid[0], PATCH, grid[1], PATCH)
    rows = rows.permute(0, 2, 4, 3, 5, 1).reshape(number, grid[0] * grid[1], -1)
    return {
        "pixel_values": rows,
        "pixel_attention_mask": torch.ones(rows.shape[:2], dtype=torch.int64),
        "spatial_shapes": torch.tensor([grid] * number),
    }


def huggingface(folder: Path, name: str, seed: int, model: torch.nn.Module, tower=None) -> None:
    """Saves a model with its outputs; `tower` is its part that sees images."""
    save_model(randomise(model, seed), folder / name / "model")
    tower = tower or getattr(model, model.base_model_prefix, model)
    tower = getattr(tower, "vision_model", tower)
    encoder = getattr(tower, "encoder", tower)
    blocks = encoder.layer if hasattr(encoder, "layer") else encoder.layers
    whole = tower if hasattr(model, "get_image_features") else model
    kind = model.config.model_type

    def run(images: torch.Tensor) -> dict:
        inputs = {"pixel_values": images}
        if kind.startswith("siglip2"):
            inputs = rows_of(images)
        elif "dinov2" not in kind:
            inputs["interpolate_pos_encoding"] = images.shape[-1] != SIZE
        with recorded_blocks(blocks) as outputs:
            output = whole(**inputs)
        inner = tower(**inputs)
        outputs["final"] = inner.last_hidden_state
        if inner.pooler_output is not None:
            outputs["pooled"] = inner.pooler_output
        for logits in ("logits", "image_embeds"):
            if output.get(logits) is not None:
                outputs["logits"] = output[logits]
        return outputs

    number = parameters(model if whole is model else tower)
    save(folder / name / "expected.npz", **at_both_sizes(run), parameters=number)


def all_of_huggingface(folder: Path) -> None:
    deit = transformers.DeiTConfig(**TINY, num_labels=5)
    huggingface(folder, "deit", 1, transformers.DeiTForImageClassificationWithTeacher(deit))
    huggingface(folder, "deit_token", 2, transformers.DeiTForImageClassification(deit))
    huggingface(folder, "deit_model", 3, transformers.DeiTModel(deit))
    small = vision_sizes(intermediate_size=None)
    dino = transformers.Dinov2Config(**small, mlp_ratio=2, num_labels=5)
    huggingface(folder, "dinov2", 4, transformers.Dinov2ForImageClassification(dino))
    huggingface(folder, "dinov2_model", 5, transformers.Dinov2Model(dino))
    giant = transformers.Dinov2WithRegistersConfig(**small, mlp_ratio=2, use_swiglu_ffn=True)
    huggingface(folder, "dinov2_giant", 6, transformers.Dinov2WithRegistersModel(giant))
    vision = transformers.SiglipVisionConfig(**TINY)
    huggingface(folder, "siglip", 7, transformers.SiglipVisionModel(vision))
    both = transformers.SiglipConfig(vision_config=TINY, text_config=TEXT, num_labels=5)
    huggingface(folder, "siglip_classes", 8, transformers.SiglipForImageClassification(both))
    full = transformers.SiglipModel(both)
    huggingface(folder, "siglip_model", 9, full, full.vision_model)
    sizes = vision_sizes(image_size=None, num_patches=(SIZE // PATCH) ** 2)
    native = transformers.Siglip2VisionConfig(**sizes)
    huggingface(folder, "siglip2", 10, transformers.Siglip2VisionModel(native))
    vision = transformers.CLIPVisionConfig(**TINY, projection_dim=7)
    huggingface(folder, "clip", 11, transformers.CLIPVisionModel(vision))
    model = transformers.CLIPVisionModelWithProjection(vision)
    huggingface(folder, "clip_projection", 12, model)
    text = {**TEXT, "projection_dim": 7}
    both = transformers.CLIPConfig(
        vision_config=TINY, text_config=text, projection_dim=7, num_labels=5
    )
    model = transformers.CLIPForImageClassification(both)
    huggingface(folder, "clip_classes", 13, model, model.vision_model)
    full = transformers.CLIPModel(both)
    huggingface(folder, "clip_model", 14, full, full.vision_model)


# === timm ===


def timm_case(folder: Path, name: str, seed: int, architecture: str, **changes) -> None:
    model = timm.create_model(architecture, **{**TIMM, "num_classes": 5, "mlp_ratio": 2, **changes})
    randomise(model, seed)
    timm.models.save_for_hf(model, folder / name / "model", safe_serialization=True)

    def run(images: torch.Tensor) -> dict:
        if images.shape[-1] != SIZE:
            model.set_input_size(img_size=images.shape[2:])
        final, steps = model.forward_intermediates(
            images, output_fmt="NLC", return_prefix_tokens=True
        )
        steps = [step if isinstance(step, tuple) else (step,) for step in steps]
        outputs = {f"block_{i}": torch.cat(step[::-1], 1) for i, step in enumerate(steps)}
        outputs |= {"final": final, "pooled": model.forward_head(final, pre_logits=True)}
        if model.num_classes:
            outputs["logits"] = model.forward_head(final)
        return outputs

    number = parameters(model)
    save(folder / name / "expected.npz", **at_both_sizes(run), parameters=number)


def all_of_timm(folder: Path) -> None:
    timm_case(folder, "timm_deit", 21, "deit_tiny_distilled_patch16_224")
    giant = "vit_giant_patch14_reg4_dinov2"
    timm_case(folder, "timm_dinov2", 22, giant, num_classes=0, mlp_ratio=2.66667)
    timm_case(folder, "timm_siglip", 23, "vit_base_patch32_siglip_256", num_classes=0)
    registers = {"global_pool": "map", "reg_tokens": 4, "no_embed_class": True}
    timm_case(folder, "timm_map", 24, "vit_tiny_patch16_224", **registers)
    timm_case(folder, "timm_clip", 25, "vit_base_patch32_clip_quickgelu_224")


# === .npz ===


def npz_siglip(folder: Path, name: str, seed: int) -> None:
    """Image and text tower in a file, blocks stacked, no head."""
    arrays: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for key, value in npz_tensors(seed, big_vision=True).items():
        key = key.replace("params/", "params/img/")
        start, block, rest = key.partition("encoderblock_")
        if block:
            stacks.setdefault(f"{start}encoderblock/{rest.partition('/')[2]}", []).append(value)
        elif "/head/" not in key:
            arrays[key] = value
    arrays |= {key: np.stack(values) for key, values in stacks.items()}
    arrays |= {"params/t": np.zeros(1, "float32"), "params/txt/head/bias": np.zeros(3, "float32")}
    file = folder / name / "model.npz"
    save(file, **arrays)

    def run(images: torch.Tensor) -> dict:
        tiny = {**TIMM, "depth": 3, "mlp_ratio": 2, "num_classes": 0, "img_size": images.shape[2:]}
        model = timm.create_model("vit_base_patch16_siglip_224", **tiny)
        model.load_pretrained(str(file))
        model.eval()
        return {"final": model.forward_features(images), "pooled": model(images)}

    save(folder / name / "expected.npz", **at_both_sizes(run))


def write(folder: Path) -> None:
    all_of_huggingface(folder)
    all_of_timm(folder)
    npz_siglip(folder, "npz_siglip", 31)
