"""DINOv3 of transformers and timm.

Each case is a folder: `model` (a directory as its package writes it) and `expected.npz` as in
`references.vit_kinds`; the other image size is of an odd aspect ratio.
"""

from pathlib import Path

import torch

from references.vit import blocks_of, pictures, randomise, save_huggingface
from references.vit_kinds import PATCH, RESIZED, SIZE, parameters, save

import timm  # isort: skip (references.vit prepares torch for it)
import transformers  # isort: skip

TINY = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": SIZE,
    "patch_size": PATCH,
}
TIMM = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": 24, "depth": 2, "num_heads": 3}
SIZES = {"": (SIZE, SIZE), "resized_": RESIZED}


# === transformers ===


def dinov3(folder: Path, name: str, seed: int, **changes) -> None:
    model = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**{**TINY, **changes}))
    randomise(model, seed)
    save_huggingface(model, folder / name / "model")
    held: dict[str, torch.Tensor] = {}
    for key, size in SIZES.items():
        images = pictures(size)
        with torch.no_grad():
            found = blocks_of(model.model.layer, lambda images=images: model(images))
        output = found.pop("result")
        found |= {"images": images, "final": output.last_hidden_state}
        found["pooled"] = output.pooler_output
        held |= {f"{key}{name}": x for name, x in found.items()}
    save(folder, name, **held, parameters=parameters(model))


def all_of_huggingface(folder: Path) -> None:
    dinov3(folder, "dinov3", 1, num_register_tokens=3)
    gated = {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False}
    dinov3(folder, "dinov3_gated", 2, **gated, value_bias=False, rope_theta=20.0)


# === timm ===


def eva(folder: Path, name: str, seed: int, architecture: str, **changes) -> None:
    arguments = {**TIMM, "num_classes": 0, **changes}
    model = timm.create_model(architecture, **arguments)
    randomise(model, seed)
    timm.models.save_for_hf(
        model, folder / name / "model", safe_serialization=True, model_args=arguments
    )
    held = {"parameters": parameters(model)}
    with torch.no_grad():
        for key, size in SIZES.items():
            images = pictures(size)
            if key:
                model.set_input_size(img_size=size)
            found = blocks_of(model.blocks, lambda images=images: model.forward_features(images))
            found["final"] = final = found.pop("result")
            found |= {"images": images, "pooled": model.forward_head(final, pre_logits=True)}
            if model.num_classes:
                found["logits"] = model.forward_head(final)
            held |= {f"{key}{name}": x for name, x in found.items()}
    save(folder, name, **held)


def all_of_timm(folder: Path) -> None:
    token = {"global_pool": "token", "num_reg_tokens": 2}
    eva(folder, "timm_dinov3", 21, "vit_small_patch16_dinov3", **token, mlp_ratio=2)
    classes = {"num_classes": 5, "mlp_ratio": 1.5}
    eva(folder, "timm_dinov3_gated", 22, "vit_small_plus_patch16_dinov3_qkvb", **classes)


def write(folder: Path) -> None:
    """Writes all cases."""
    transformers.utils.logging.disable_progress_bar()
    all_of_huggingface(folder)
    all_of_timm(folder)
