"""The layout table of two towers: that of each, below whatever it is called."""

from kmodels.models.common.sharding import KERNEL, TEXT_ENCODER
from kmodels.models.vit.model import LAYOUT as VISION

LAYOUT: dict[str, tuple[str | None, ...]] = {
    **VISION,
    **TEXT_ENCODER,
    rf"(?:.*/)?(?:vision_projection|text_encoder/head)/{KERNEL}": ("embed", None),
}
