"""DINOv3, I-JEPA and MAE of transformers, DINOv3 and Perception Encoder of timm.

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
    ijepa(folder, "ijepa", 3)
    ijepa(folder, "ijepa_classes", 4, classes=True)
    mae(folder, "mae", 5)
    mae(folder, "mae_pretraining", 6, pretraining=True)


def ijepa(folder: Path, name: str, seed: int, classes: bool = False) -> None:
    config = transformers.IJepaConfig(**TINY, num_labels=5, layer_norm_eps=1e-6)
    made = transformers.IJepaForImageClassification if classes else transformers.IJepaModel
    model = made(config)
    randomise(model, seed)
    save_huggingface(model, folder / name / "model")
    inner = model.ijepa if classes else model
    held: dict[str, torch.Tensor] = {}
    for key, size in SIZES.items():
        given = {"pixel_values": pictures(size), "interpolate_pos_encoding": bool(key)}
        with torch.no_grad():
            found = blocks_of(inner.layers, lambda given=given: inner(**given))
            found |= {"images": given["pixel_values"]}
            found["final"] = final = found.pop("result").last_hidden_state
            found["pooled"] = final.mean(dim=1)
            if classes:
                found["logits"] = model(**given).logits
        held |= {f"{key}{name}": x for name, x in found.items()}
    save(folder, name, **held, parameters=parameters(model))


def mae(folder: Path, name: str, seed: int, pretraining: bool = False) -> None:
    decoder = {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 24,
    }
    config = transformers.ViTMAEConfig(**TINY, **decoder, qkv_bias=not pretraining, mask_ratio=0.0)
    made = transformers.ViTMAEForPreTraining if pretraining else transformers.ViTMAEModel
    model = made(config)
    randomise(model, seed)
    save_huggingface(model, folder / name / "model")
    inner = model.vit if pretraining else model
    held: dict[str, torch.Tensor] = {}
    for key, size in SIZES.items():
        images = pictures(size)
        # Patches are sorted by this, also where none is hidden.
        noise = torch.arange(size[0] * size[1] // PATCH**2, dtype=torch.float32)[None].repeat(2, 1)
        given = {"pixel_values": images, "noise": noise, "interpolate_pos_encoding": bool(key)}
        with torch.no_grad():
            found = blocks_of(inner.layers, lambda given=given: inner(**given))
        found |= {"images": images}
        found["final"] = final = found.pop("result").last_hidden_state
        found["pooled"] = final[:, 0]
        held |= {f"{key}{name}": x for name, x in found.items()}
    save(folder, name, **held, parameters=parameters(inner))


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
    pool = {"mlp_ratio": 2, "attn_pool_num_heads": 2, "attn_pool_mlp_ratio": 1.5}
    eva(folder, "timm_pe", 23, "vit_pe_core_base_patch16_224", **pool)
    # Another number of rows than of columns tells the two axes apart.
    classes = {"num_classes": 5, "ref_feat_shape": (5, 7)}
    eva(folder, "timm_pe_classes", 24, "vit_pe_core_gigantic_patch14_448", **pool, **classes)
    eva(folder, "timm_pe_lang", 25, "vit_pe_lang_large_patch14_448", mlp_ratio=2)


def write(folder: Path) -> None:
    """Writes all cases."""
    transformers.utils.logging.disable_progress_bar()
    all_of_huggingface(folder)
    all_of_timm(folder)
