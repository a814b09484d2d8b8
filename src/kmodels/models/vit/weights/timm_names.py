"""timm's names of Vision Transformers, and the settings that only the names decide.

The tables hold every `vit_*`, `deit*`, `eva*`, `flexivit_*` and `naflexvit_*` of timm 1.0.31; a
test compares them with timm.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kmodels.core.errors import InputError


@dataclass(frozen=True)
class Architecture:
    """Settings that the name of an architecture decides.

    Args:
        form: "vit", "naflex", or one of timm's `Eva` models in `eva.ROTARY`.
        num_heads: attention heads.
        pooling: timm's name of the pooling.
        activation: "gelu", "gelu_tanh" or "quick_gelu"; "silu" for a gated MLP.
        epsilon: of the norms of a "vit".
        no_embed_class: the position embedding has rows for the patches alone.
    """

    form: str
    num_heads: int
    pooling: str
    activation: str = "gelu"
    epsilon: float = 1e-6
    no_embed_class: bool = False


NAMES: dict[Architecture, str] = {
    Architecture("vit", 12, "token", no_embed_class=True): (
        "deit3_base_patch16_224 deit3_base_patch16_384 flexivit_base vit_base_patch14_reg1_tipsv2 "
        "vit_base_patch14_reg4_dinov2 vit_base_patch16_radio_v3"
    ),
    Architecture("vit", 16, "token", no_embed_class=True): (
        "deit3_huge_patch14_224 deit3_large_patch16_224 deit3_large_patch16_384 flexivit_large "
        "vit_huge_patch16_radio_v3 vit_huge_patch16_radio_v4 vit_large_patch14_reg1_tipsv2 "
        "vit_large_patch14_reg4_dinov2 vit_large_patch16_radio_v3 vit_so400m_patch14_reg1_tipsv2 "
        "vit_so400m_patch16_radio_v4"
    ),
    Architecture("vit", 8, "token", no_embed_class=True): "deit3_medium_patch16_224",
    Architecture("vit", 6, "token", no_embed_class=True): (
        "deit3_small_patch16_224 deit3_small_patch16_384 flexivit_small "
        "vit_small_patch14_reg4_dinov2"
    ),
    Architecture("vit", 12, "token"): (
        "deit_base_distilled_patch16_224 deit_base_distilled_patch16_384 deit_base_patch16_224 "
        "deit_base_patch16_384 vit_base_patch14_dinov2 vit_base_patch16_224 "
        "vit_base_patch16_224_miil vit_base_patch16_384 vit_base_patch32_224 vit_base_patch32_384 "
        "vit_base_patch8_224"
    ),
    Architecture("vit", 6, "token"): (
        "deit_small_distilled_patch16_224 deit_small_patch16_224 vit_small_patch14_dinov2 "
        "vit_small_patch16_224 vit_small_patch16_36x1_224 vit_small_patch16_384 "
        "vit_small_patch32_224 vit_small_patch32_384 vit_small_patch8_224"
    ),
    Architecture("vit", 3, "token"): (
        "deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 vit_tiny_patch16_224 "
        "vit_tiny_patch16_384"
    ),
    Architecture("vit", 16, "avg"): (
        "eva_large_patch14_196 eva_large_patch14_336 vit_base_patch16_gap_224 "
        "vit_giant_patch16_gap_224 vit_huge_patch14_gap_224 vit_huge_patch16_gap_448 "
        "vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384 "
        "vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378 "
        "vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448 "
        "vit_so400m_patch14_siglip_gap_896"
    ),
    Architecture("naflex", 12, "avg"): "naflexvit_base_patch16_gap",
    Architecture("naflex", 12, "map"): "naflexvit_base_patch16_map",
    Architecture("naflex", 12, "map", activation="gelu_tanh"): "naflexvit_base_patch16_siglip",
    Architecture("naflex", 13, "avg"): "naflexvit_so150m2_patch16_reg1_gap",
    Architecture("naflex", 13, "map"): "naflexvit_so150m2_patch16_reg1_map",
    Architecture("naflex", 16, "map", activation="gelu_tanh"): "naflexvit_so400m_patch16_siglip",
    Architecture("dinov3", 32, "avg"): "vit_7b_patch16_dinov3",
    Architecture("vit", 12, "token", epsilon=1e-05): (
        "vit_base_patch16_clip_224 vit_base_patch16_clip_384 vit_base_patch32_clip_224 "
        "vit_base_patch32_clip_256 vit_base_patch32_clip_384 vit_base_patch32_clip_448"
    ),
    Architecture("vit", 12, "token", activation="quick_gelu", epsilon=1e-05): (
        "vit_base_patch16_clip_quickgelu_224 vit_base_patch32_clip_quickgelu_224"
    ),
    Architecture("dinov3", 12, "avg"): "vit_base_patch16_dinov3_qkvb vit_base_patch16_dinov3",
    Architecture("dinov3", 12, "token"): "vit_base_patch16_lingbot",
    Architecture("vit", 14, "token"): "vit_base_patch16_plus_240 vit_base_patch32_plus_256",
    Architecture("vit", 14, "token", epsilon=1e-05): "vit_base_patch16_plus_clip_240",
    Architecture("vit", 12, "avg", no_embed_class=True): "vit_base_patch16_reg4_gap_256",
    Architecture("vit", 12, "map"): (
        "vit_base_patch16_siglip_224 vit_base_patch16_siglip_256 vit_base_patch16_siglip_384 "
        "vit_base_patch16_siglip_512"
    ),
    Architecture("vit", 12, "avg"): (
        "vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256 "
        "vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512"
    ),
    Architecture("vit", 12, "map", activation="gelu_tanh"): "vit_base_patch32_siglip_256",
    Architecture("vit", 12, "avg", activation="gelu_tanh"): "vit_base_patch32_siglip_gap_256",
    Architecture("vit", 10, "avg"): "vit_betwixt_patch16_gap_256",
    Architecture("vit", 10, "avg", no_embed_class=True): (
        "vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256 "
        "vit_betwixt_patch16_reg4_gap_384"
    ),
    Architecture("vit", 10, "token", epsilon=1e-05): "vit_betwixt_patch32_clip_224",
    Architecture("vit", 16, "token"): (
        "vit_giant_patch14_224 vit_gigantic_patch14_224 vit_huge_patch14_224 "
        "vit_intern300m_patch14_448 vit_large_patch14_224 vit_large_patch14_dinov2 "
        "vit_large_patch16_224 vit_large_patch16_384 vit_large_patch32_224 vit_large_patch32_384"
    ),
    Architecture("vit", 16, "token", epsilon=1e-05): (
        "vit_giant_patch14_clip_224 vit_gigantic_patch14_clip_224 vit_gigantic_patch14_clip_378 "
        "vit_huge_patch14_clip_224 vit_huge_patch14_clip_336 vit_huge_patch14_clip_378 "
        "vit_large_patch14_clip_224 vit_large_patch14_clip_336"
    ),
    Architecture("vit", 24, "token", activation="silu"): "vit_giant_patch14_dinov2",
    Architecture("vit", 24, "token", activation="silu", no_embed_class=True): (
        "vit_giant_patch14_reg1_tipsv2 vit_giant_patch14_reg4_dinov2"
    ),
    Architecture("dinov3", 24, "token"): "vit_giant_patch16_lingbot",
    Architecture("vit", 24, "token", no_embed_class=True): "vit_giant_patch16_radio_v3",
    Architecture("vit", 16, "map", activation="gelu_tanh"): (
        "vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384 "
        "vit_large_patch16_siglip_512 vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384 "
        "vit_so400m_patch16_siglip_512"
    ),
    Architecture("vit", 16, "avg", activation="gelu_tanh"): (
        "vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384 "
        "vit_large_patch16_siglip_gap_512 vit_so400m_patch16_siglip_gap_256 "
        "vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512"
    ),
    Architecture("vit", 16, "token", activation="quick_gelu", epsilon=1e-05): (
        "vit_gigantic_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_224 "
        "vit_huge_patch14_clip_quickgelu_378 vit_large_patch14_clip_quickgelu_224 "
        "vit_large_patch14_clip_quickgelu_336"
    ),
    Architecture("dinov3", 20, "avg"): (
        "vit_huge_plus_patch16_dinov3_qkvb vit_huge_plus_patch16_dinov3"
    ),
    Architecture("dinov3", 16, "avg"): "vit_large_patch16_dinov3_qkvb vit_large_patch16_dinov3",
    Architecture("dinov3", 16, "token"): "vit_large_patch16_lingbot",
    Architecture("vit", 16, "map"): (
        "vit_large_patch16_siglip_256 vit_large_patch16_siglip_384 vit_so400m_patch14_siglip_224 "
        "vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384"
    ),
    Architecture("vit", 5, "avg", no_embed_class=True): (
        "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256"
    ),
    Architecture("vit", 8, "token", epsilon=1e-05): (
        "vit_medium_patch16_clip_224 vit_medium_patch32_clip_224"
    ),
    Architecture("vit", 8, "avg"): (
        "vit_medium_patch16_gap_240 vit_medium_patch16_gap_256 vit_medium_patch16_gap_384"
    ),
    Architecture("vit", 8, "avg", no_embed_class=True): (
        "vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256 "
        "vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384"
    ),
    Architecture("perception", 12, "map"): "vit_pe_core_base_patch16_224",
    Architecture("perception", 16, "map"): (
        "vit_pe_core_gigantic_patch14_448 vit_pe_core_large_patch14_336"
    ),
    Architecture("perception", 6, "map"): "vit_pe_core_small_patch16_384",
    Architecture("perception", 3, "map"): "vit_pe_core_tiny_patch16_384",
    Architecture("perception", 16, "avg"): (
        "vit_pe_lang_gigantic_patch14_448 vit_pe_lang_large_patch14_448 "
        "vit_pe_spatial_gigantic_patch14_448 vit_pe_spatial_large_patch14_448"
    ),
    Architecture("perception", 12, "avg"): "vit_pe_spatial_base_patch16_512",
    Architecture("perception", 6, "avg"): "vit_pe_spatial_small_patch16_512",
    Architecture("perception", 3, "avg"): "vit_pe_spatial_tiny_patch16_512",
    Architecture("rope_xy", 6, "token"): "vit_small_patch16_rope_224",
    Architecture("rope_xy", 6, "token", no_embed_class=True): ("vit_small_patch16_rope_ape_224"),
    Architecture("rope_xy", 12, "token"): "vit_base_patch16_rope_224",
    Architecture("rope_xy", 12, "token", no_embed_class=True): ("vit_base_patch16_rope_ape_224"),
    Architecture("rope_xy", 16, "token"): "vit_large_patch16_rope_224",
    Architecture("rope_xy", 16, "token", no_embed_class=True): ("vit_large_patch16_rope_ape_224"),
    Architecture("rope_ij", 8, "avg"): (
        "vit_medium_patch16_rope_reg1_gap_256 vit_mediumd_patch16_rope_reg1_gap_256"
    ),
    Architecture("rope_ij", 10, "avg"): "vit_betwixt_patch16_rope_reg4_gap_256",
    Architecture("rope_ij", 12, "avg"): "vit_base_patch16_rope_reg1_gap_256",
    Architecture("dinov3", 6, "avg"): (
        "vit_small_patch16_dinov3_qkvb vit_small_patch16_dinov3 vit_small_plus_patch16_dinov3 "
        "vit_small_plus_patch16_dinov3_qkvb"
    ),
    Architecture("dinov3", 6, "token"): "vit_small_patch16_lingbot",
    Architecture("vit", 13, "avg"): (
        "vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384 "
        "vit_so150m2_patch16_reg1_gap_448"
    ),
    Architecture("vit", 14, "avg"): (
        "vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384"
    ),
    Architecture("vit", 14, "map"): "vit_so150m_patch16_reg4_map_256",
    Architecture("dinov3", 3, "avg"): "vit_tiny_patch16_dinov3_qkvb",
    Architecture("vit", 4, "avg", no_embed_class=True): "vit_wee_patch16_reg1_gap_256",
    Architecture("vit", 4, "token", epsilon=1e-05): "vit_xsmall_patch16_clip_224",
}
# What the models here lack, and the architectures that have it.
UNSUPPORTED: dict[str, str] = {
    "EVA's blocks": (
        "eva02_base_patch14_224 eva02_base_patch14_448 eva02_base_patch16_clip_224 "
        "eva02_enormous_patch14_clip_224 eva02_large_patch14_224 eva02_large_patch14_448 "
        "eva02_large_patch14_clip_224 eva02_large_patch14_clip_336 eva02_small_patch14_224 "
        "eva02_small_patch14_336 eva02_tiny_patch14_224 eva02_tiny_patch14_336 "
        "eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_560 "
        "eva_giant_patch14_clip_224"
    ),
    "positions that keep the aspect ratio": (
        "naflexvit_base_patch16_par_gap naflexvit_base_patch16_parfac_gap "
        "naflexvit_base_patch16_radio_v3 naflexvit_giant_patch16_radio_v3 "
        "naflexvit_huge_patch16_radio_v3 naflexvit_huge_patch16_radio_v4 "
        "naflexvit_large_patch16_radio_v3 naflexvit_so400m_patch16_radio_v4"
    ),
    "grouped keys and root-mean-square norms": (
        "vit_5b_patch16_sapiens2 vit_base_patch16_sapiens2 vit_giant_patch16_sapiens2 "
        "vit_huge_patch16_sapiens2 vit_large_patch16_sapiens2"
    ),
    "patches from a convolutional network": (
        "vit_base_mci_224 vit_base_r26_s32_224 vit_base_r50_s16_224 vit_base_r50_s16_384 "
        "vit_base_resnet26d_224 vit_base_resnet50d_224 vit_large_r50_s32_224 "
        "vit_large_r50_s32_384 vit_small_r26_s32_224 vit_small_r26_s32_384 "
        "vit_small_resnet26d_224 vit_small_resnet50d_s16_224 vit_tiny_r_s16_p8_224 "
        "vit_tiny_r_s16_p8_384"
    ),
    "parallel branches": (
        "vit_base_patch16_18x2_224 vit_base_patch16_xp_224 vit_dpwee_patch16_reg1_gap_256 "
        "vit_huge_patch14_xp_224 vit_large_patch14_xp_224 vit_pwee_patch16_reg1_gap_256 "
        "vit_small_patch16_18x2_224"
    ),
    "rotary frequencies learned by each block": (
        "vit_base_patch16_rope_mixed_224 vit_base_patch16_rope_mixed_ape_224 "
        "vit_large_patch16_rope_mixed_224 vit_large_patch16_rope_mixed_ape_224 "
        "vit_small_patch16_rope_mixed_224 vit_small_patch16_rope_mixed_ape_224"
    ),
    "norms after the branches": ("vit_base_patch16_rpn_224"),
    "differential attention": ("vit_dlittle_patch16_reg1_gap_256 vit_dwee_patch16_reg1_gap_256"),
    "relative positions": (
        "vit_relpos_base_patch16_224 vit_relpos_base_patch16_cls_224 "
        "vit_relpos_base_patch16_clsgap_224 vit_relpos_base_patch16_plus_240 "
        "vit_relpos_base_patch16_rpn_224 vit_relpos_base_patch32_plus_rpn_256 "
        "vit_relpos_medium_patch16_224 vit_relpos_medium_patch16_cls_224 "
        "vit_relpos_medium_patch16_rpn_224 vit_relpos_small_patch16_224 "
        "vit_relpos_small_patch16_rpn_224 vit_srelpos_medium_patch16_224 "
        "vit_srelpos_small_patch16_224"
    ),
}
ARCHITECTURES = {name: found for found, names in NAMES.items() for name in names.split()}
LACKING = {name: part for part, names in UNSUPPORTED.items() for name in names.split()}
# Forms of names that are not in the tables; any other name is that of a "vit".
FORMS = {
    "dinov3": re.compile(r"vit_\w+_patch\d+_dinov3(_qkvb)?"),
    "perception": re.compile(r"vit_pe_(core|lang|spatial)_[a-z]+_patch(\d+)_(\d+)"),
    "naflex": re.compile(r"naflexvit_\w+"),
}


def form_of(name: str) -> str:
    """Returns the form of an architecture, with or without the tag of its weights."""
    name = name.partition(".")[0]
    if name in ARCHITECTURES:
        return ARCHITECTURES[name].form
    return next((form for form, pattern in FORMS.items() if pattern.fullmatch(name)), "vit")


def architecture(path: Path, name: str) -> Architecture | None:
    """Returns the architecture of a name, with or without a tag, or None if timm does not have it.

    Raises:
        InputError: for an architecture with parts that the models here lack.
    """
    name = name.partition(".")[0]
    if name in LACKING:
        raise InputError(f"{path}: {name} has {LACKING[name]}, which kmodels does not support")
    return ARCHITECTURES.get(name)
