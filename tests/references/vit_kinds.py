"""DeiT, DINOv2, SigLIP and CLIP of transformers and timm, and SigLIP 2's `.npz` as timm reads it.

Each case is a folder: `model` (a directory or file as its package writes it) and `expected.npz`
with `images` (NHWC), `parameters` (those of the image tower), and what the package gives of
`block_<i>`, `final` (after the last norm), `pooled` and `logits`; the same with `resized_` for
another image size. Sizes are such that each feature changes the result, and else alike, since JAX
compiles for each length again.
"""

from pathlib import Path

import numpy as np
import torch

from references.vit import (
    arrays,
    blocks_of,
    npz_tensors,
    pictures,
    randomise,
    save_huggingface,
)

import timm  # isort: skip (references.vit prepares torch for it)
import transformers  # isort: skip

SIZE = 32
RESIZED = (20, 44)  # a 5 x 11 grid from an 8 x 8 one: shrinks one axis, stretches the other
PATCH = 4
TINY = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "image_size": SIZE,
    "patch_size": PATCH,
}
TEXT = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TIMM = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": 24, "depth": 2, "num_heads": 3}


def save(folder: Path, name: str, **tensors: torch.Tensor | np.ndarray) -> None:
    plain = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    others = {name: x for name, x in tensors.items() if name not in plain}
    np.savez(folder / name / "expected.npz", **arrays(**plain), **others)


def parameters(model: torch.nn.Module) -> np.ndarray:
    return np.array(sum(x.numel() for x in model.parameters()))


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
    """Saves a model with what it gives; `tower` is its part that sees images."""
    randomise(model, seed)
    save_huggingface(model, folder / name / "model")
    tower = tower or getattr(model, model.base_model_prefix, model)
    tower = getattr(tower, "vision_model", tower)
    encoder = getattr(tower, "encoder", tower)
    blocks = encoder.layer if hasattr(encoder, "layer") else encoder.layers
    held: dict[str, torch.Tensor] = {}
    whole = model if hasattr(model, "get_image_features") is False else tower
    for key, size in (("", (SIZE, SIZE)), ("resized_", RESIZED)):
        images = pictures(size)
        arguments = {"pixel_values": images}
        if "dinov2" not in model.config.model_type:
            arguments["interpolate_pos_encoding"] = bool(key)
        if model.config.model_type.startswith("siglip2"):
            arguments = rows_of(images)
        with torch.no_grad():
            found = blocks_of(blocks, lambda arguments=arguments: whole(**arguments))
            output = found.pop("result")
            inner = tower(**arguments)
        found["final"] = inner.last_hidden_state
        if inner.pooler_output is not None:
            found["pooled"] = inner.pooler_output
        for logits in ("logits", "image_embeds"):
            if output.get(logits) is not None:
                found["logits"] = output[logits]
        held |= {f"{key}{name}": x for name, x in {**found, "images": images}.items()}
    save(folder, name, **held, parameters=parameters(model if whole is model else tower))


def all_of_huggingface(folder: Path) -> None:
    deit = transformers.DeiTConfig(**TINY, num_labels=5)
    huggingface(folder, "deit", 1, transformers.DeiTForImageClassificationWithTeacher(deit))
    huggingface(folder, "deit_token", 2, transformers.DeiTForImageClassification(deit))
    huggingface(folder, "deit_model", 3, transformers.DeiTModel(deit))
    small = {name: x for name, x in TINY.items() if name != "intermediate_size"}
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
    native = {name: x for name, x in TINY.items() if name != "image_size"}
    native = transformers.Siglip2VisionConfig(**native, num_patches=(SIZE // PATCH) ** 2)
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
    held = {"parameters": parameters(model)}
    with torch.no_grad():
        for key, size in (("", (SIZE, SIZE)), ("resized_", RESIZED)):
            images = pictures(size)
            if key:
                model.set_input_size(img_size=RESIZED)
            final, steps = model.forward_intermediates(
                images, output_fmt="NLC", return_prefix_tokens=True
            )
            steps = [step if isinstance(step, tuple) else (step,) for step in steps]
            found = {f"block_{i}": torch.cat(step[::-1], 1) for i, step in enumerate(steps)}
            found |= {"images": images, "final": final}
            found["pooled"] = model.forward_head(final, pre_logits=True)
            if model.num_classes:
                found["logits"] = model.forward_head(final)
            held |= {f"{key}{name}": x for name, x in found.items()}
    save(folder, name, **held)


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
    held: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for key, value in npz_tensors(seed, big_vision=True).items():
        key = key.replace("params/", "params/img/")
        start, there, rest = key.partition("encoderblock_")
        if there:
            stacks.setdefault(f"{start}encoderblock/{rest.partition('/')[2]}", []).append(value)
        elif "/head/" not in key:
            held[key] = value
    held |= {key: np.stack(values) for key, values in stacks.items()}
    held |= {"params/t": np.zeros(1, "float32"), "params/txt/head/bias": np.zeros(3, "float32")}
    (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / name / "model.npz"
    np.savez(file, **held)
    found: dict[str, torch.Tensor] = {}
    tiny = {**TIMM, "depth": 3, "mlp_ratio": 2, "num_classes": 0}
    for key, size in (("", (SIZE, SIZE)), ("resized_", RESIZED)):
        model = timm.create_model("vit_base_patch16_siglip_224", **{**tiny, "img_size": size})
        model.load_pretrained(str(file))
        model.eval()
        found[f"{key}images"] = pictures(size)
        with torch.no_grad():
            found[f"{key}final"] = model.forward_features(found[f"{key}images"])
            found[f"{key}pooled"] = model(found[f"{key}images"])
    save(folder, name, **found)


def write(folder: Path) -> None:
    """Writes all cases."""
    transformers.utils.logging.disable_progress_bar()
    all_of_huggingface(folder)
    all_of_timm(folder)
    npz_siglip(folder, "npz_siglip", 31)
