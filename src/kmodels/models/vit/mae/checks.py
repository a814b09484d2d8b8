"""Check whether a backbone can be pretrained by masking patches."""

from kmodels.core.errors import InputError
from kmodels.models.vit.model import ViTBackbone


def check_backbone(backbone: ViTBackbone, patches: int, mask_ratio: float) -> None:
    """Raises `InputError` for a backbone that has no token for each patch that it sees."""
    config = backbone.config
    if not 0 <= mask_ratio < 1 or not int(patches * (1 - mask_ratio)):
        raise InputError(
            f"mask_ratio is {mask_ratio} of {patches} patches; give 0 or more, and leave at least "
            "one to be seen"
        )
    if backbone.coordinates is not None:
        raise InputError(
            "the patches of the backbone turn by their places (rope_theta), of which those that "
            "are hidden would be left out; give a ViTBackbone with a position embedding"
        )
    if config.patch_drop_rate or config.token_merging:
        raise InputError(
            "the backbone leaves out patches or merges tokens, and MAE hides patches by itself; "
            "leave patch_drop_rate and token_merging at 0"
        )
    shape = tuple(backbone.output.shape)
    if shape[1:] != (patches + config.num_prefix_tokens, config.hidden_dim):
        raise InputError(
            f"{type(backbone).__name__} gives no token for each patch; give a ViTBackbone"
        )
