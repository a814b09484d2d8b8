"""The layout table of ViT: what each dimension of its variables is."""

from kmodels.models.common.sharding import BLOCKS, KERNEL

LAYOUT: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?patch_embedding/kernel": (None, "embed"),
    r"(?:.*/)?tokens/.*": (None, None, "embed"),
    **BLOCKS,
    rf"(?:.*/)?(?:pre_logits|logits|distillation_logits|pixel_logits)/{KERNEL}": ("embed", None),
}
