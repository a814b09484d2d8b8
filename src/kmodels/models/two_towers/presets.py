"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any

from kmodels.models.clip import PRESETS as CLIP_TEXTS
from kmodels.models.siglip import PRESETS as SIGLIP_TEXTS
from kmodels.models.vit.presets import PRESETS as IMAGES


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the backbone's fields of a preset, without those of its task."""
    return {name: value for name, value in fields.items() if not name.startswith("task_")}


def _clip(vision: str, text: str, width: int) -> dict[str, Any]:
    return {
        "vision_encoder": _fields(IMAGES[vision]),
        "text_encoder": _fields(CLIP_TEXTS[text]),
        "projection_dim": width,
    }


def _siglip() -> dict[str, dict[str, Any]]:
    """Returns each pair of towers, by the name of its vision tower, as in keras-hub."""
    found = {}
    for name, vision in IMAGES.items():
        kind, _, size = name.partition("_")
        if kind in ("siglip", "siglip2"):
            size = size.partition("_")[0].replace("giantopt", "giant")
            text = _fields(SIGLIP_TEXTS[f"{kind}_text_{size}"])
            found[name] = {"vision_encoder": _fields(vision), "text_encoder": text}
    return found


def _naflex(size: str) -> dict[str, Any]:
    native = {"position_interpolation": "bilinear_antialias"}
    return {
        "vision_encoder": _fields(IMAGES[f"siglip2_{size}_patch16_256"]) | native,
        "text_encoder": _fields(SIGLIP_TEXTS[f"siglip2_text_{size}"]),
        "naflex": True,
    }


MICRO: dict[str, Any] = {
    **{"image_shape": (28, 28, 1), "patch_size": 7, "num_layers": 4},
    **{"num_heads": 4, "hidden_dim": 128, "mlp_dim": 256},
}
MICRO_TEXT: dict[str, Any] = {
    **{"embedding_dim": 128, "hidden_dim": 128, "num_layers": 2, "num_heads": 4},
    **{"intermediate_dim": 256, "max_sequence_length": 16},
}
TEXTS = {"clip": CLIP_TEXTS["clip_text_debug"], "siglip": SIGLIP_TEXTS["siglip_text_debug"]}
PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2021 (arXiv:2103.00020), tables 19 and 20; names are keras-hub's.
    "clip_vit_base_patch32": _clip("clip_base_patch32_224", "clip_text_base", 512),
    "clip_vit_base_patch16": _clip("clip_base_patch16_224", "clip_text_base", 512),
    "clip_vit_large_patch14": _clip("clip_large_patch14_224", "clip_text_large", 768),
    "clip_vit_large_patch14_336": _clip("clip_large_patch14_336", "clip_text_large", 768),
    # OpenCLIP's (Cherti et al. 2023, arXiv:2212.07143).
    "clip_vit_h_14_laion2b_s32b_b79k": _clip("clip_huge_patch14_224", "clip_text_huge", 1024),
    "clip_vit_bigg_14_laion2b_39b_b160k": _clip(
        "clip_gigantic_patch14_224", "clip_text_bigg", 1280
    ),
    # Zhai et al. 2023 and Tschannen et al. 2025, see the presets of both towers.
    **_siglip(),
    # With native aspect ratio (NaFlex); the table of positions is that of 256 patches.
    **{f"siglip2_{size}_patch16_naflex": _naflex(size) for size in ("base", "so400m")},
    # Small enough to train on two cores, on Fashion-MNIST.
    **{
        f"{kind}_micro_patch7_28": {
            "vision_encoder": _fields(IMAGES[name]) | MICRO,
            "text_encoder": _fields(TEXTS[kind]) | MICRO_TEXT,
            **({"projection_dim": 64} if kind == "clip" else {}),
        }
        for kind, name in {
            "clip": "clip_base_patch32_224",
            "siglip": "siglip_base_patch16_224",
        }.items()
    },
    # Below 100,000 parameters.
    "clip_debug": {
        "vision_encoder": _fields(IMAGES["clip_base_patch32_224"])
        | {"image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 2}
        | {"num_heads": 2, "hidden_dim": 32, "mlp_dim": 64},
        "text_encoder": _fields(CLIP_TEXTS["clip_text_debug"]),
        "projection_dim": 24,
    },
    "siglip_debug": {
        "vision_encoder": _fields(IMAGES["siglip_base_patch16_224"])
        | {"image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 2}
        | {"num_heads": 2, "hidden_dim": 32, "mlp_dim": 64},
        "text_encoder": _fields(SIGLIP_TEXTS["siglip_text_debug"]),
    },
}
