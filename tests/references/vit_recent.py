"""DINOv3, I-JEPA and MAE of transformers; DINOv3, Perception Encoder and RoPE-ViTs of timm.

Each case is a folder: `model` (a directory as its package writes it) and `expected.npz` as in
`references.vit_kinds`; the other image size is of an odd aspect ratio.
"""

from pathlib import Path

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
    vision_sizes,
)
from references.vit_kinds import TIMM

TINY = vision_sizes(intermediate_size=40)


# === transformers ===


def huggingface(folder: Path, name: str, seed: int, model: torch.nn.Module, part: str = "") -> None:
    """Saves a model with its outputs; `part` is the attribute that holds the image tower."""
    save_model(randomise(model, seed), folder / name / "model")
    inner = getattr(model, part) if part else model
    kind = name.partition("_")[0]
    layers = inner.model.layer if kind == "dinov3" else inner.layers

    def run(images: torch.Tensor) -> dict:
        inputs = {"pixel_values": images}
        if kind != "dinov3":
            inputs["interpolate_pos_encoding"] = images.shape[-1] != SIZE
        if kind == "mae":
            # Patches are sorted by this, even if none is hidden.
            number = images[0, 0].numel() // PATCH**2
            inputs["noise"] = torch.arange(number, dtype=torch.float32)[None].repeat(2, 1)
        with recorded_blocks(layers) as outputs:
            final = inner(**inputs).last_hidden_state
        outputs["final"] = final
        outputs["pooled"] = final.mean(dim=1) if kind == "ijepa" else final[:, 0]
        if name == "ijepa_classes":
            outputs["logits"] = model(**inputs).logits
        return outputs

    outputs = at_both_sizes(run)
    counted = model if kind == "ijepa" else inner
    save(folder / name / "expected.npz", **outputs, parameters=parameters(counted))


def all_of_huggingface(folder: Path) -> None:
    config = transformers.DINOv3ViTConfig(**TINY, num_register_tokens=3)
    huggingface(folder, "dinov3", 1, transformers.DINOv3ViTModel(config))
    gated = {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False}
    config = transformers.DINOv3ViTConfig(**{**TINY, **gated}, value_bias=False, rope_theta=20.0)
    huggingface(folder, "dinov3_gated", 2, transformers.DINOv3ViTModel(config))
    config = transformers.IJepaConfig(**TINY, num_labels=5, layer_norm_eps=1e-6)
    huggingface(folder, "ijepa", 3, transformers.IJepaModel(config))
    model = transformers.IJepaForImageClassification(config)
    huggingface(folder, "ijepa_classes", 4, model, "ijepa")
    decoder = {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 24,
    }
    config = transformers.ViTMAEConfig(**TINY, **decoder, mask_ratio=0.0)
    huggingface(folder, "mae", 5, transformers.ViTMAEModel(config))
    config = transformers.ViTMAEConfig(**TINY, **decoder, mask_ratio=0.0, qkv_bias=False)
    huggingface(folder, "mae_pretraining", 6, transformers.ViTMAEForPreTraining(config), "vit")


# === timm ===


def eva(folder: Path, name: str, seed: int, architecture: str, **changes) -> None:
    arguments = {**TIMM, "num_classes": 0, **changes}
    model = randomise(timm.create_model(architecture, **arguments), seed)
    timm.models.save_for_hf(
        model, folder / name / "model", safe_serialization=True, model_args=arguments
    )

    def run(images: torch.Tensor) -> dict:
        if images.shape[-1] != SIZE:
            model.set_input_size(img_size=images.shape[2:])
        with recorded_blocks(model.blocks) as outputs:
            final = model.forward_features(images)
        outputs |= {"final": final, "pooled": model.forward_head(final, pre_logits=True)}
        if model.num_classes:
            outputs["logits"] = model.forward_head(final)
        return outputs

    number = parameters(model)
    save(folder / name / "expected.npz", **at_both_sizes(run), parameters=number)


def all_of_timm(folder: Path) -> None:
    token = {"global_pool": "token", "num_reg_tokens": 2}
    eva(folder, "timm_dinov3", 21, "vit_small_patch16_dinov3", **token, mlp_ratio=2)
    classes = {"num_classes": 5, "mlp_ratio": 1.5}
    eva(folder, "timm_dinov3_gated", 22, "vit_small_plus_patch16_dinov3_qkvb", **classes)
    pool = {"mlp_ratio": 2, "attn_pool_num_heads": 2, "attn_pool_mlp_ratio": 1.5}
    eva(folder, "timm_pe", 23, "vit_pe_core_base_patch16_224", **pool)
    # Different numbers of rows and columns tell the two axes apart.
    classes = {"num_classes": 5, "ref_feat_shape": (5, 7)}
    eva(folder, "timm_pe_classes", 24, "vit_pe_core_gigantic_patch14_448", **pool, **classes)
    eva(folder, "timm_pe_lang", 25, "vit_pe_lang_large_patch14_448", mlp_ratio=2)
    eva(folder, "timm_rope", 26, "vit_base_patch16_rope_reg1_gap_256", **classes, mlp_ratio=2)
    without = {"num_classes": 5, "qkv_bias": False}
    eva(folder, "timm_rope_unbiased", 27, "vit_mediumd_patch16_rope_reg1_gap_256", **without)
    eva(folder, "timm_rope_ape", 28, "vit_small_patch16_rope_ape_224", num_classes=5)


def write(folder: Path) -> None:
    all_of_huggingface(folder)
    all_of_timm(folder)
