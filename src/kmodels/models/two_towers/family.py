"""The description of the family that the loaders use."""

from typing import Any

from kmodels.models.common.sizes import Sizes
from kmodels.models.registry import Family
from kmodels.models.two_towers.config import TwoTowersConfig
from kmodels.models.two_towers.model import TwoTowersBackbone
from kmodels.models.two_towers.presets import PRESETS
from kmodels.models.two_towers.similarity import ImageTextSimilarity
from kmodels.models.two_towers.weights import huggingface
from kmodels.models.vit import family as vit
from kmodels.models.vit.preprocessor import OF_PATCHES, fit_crop


def _fit_preprocessor(given: dict[str, Any], config: TwoTowersConfig) -> dict[str, Any]:
    """Returns rows as long as the positions of the texts, images of the tower's size."""
    kind = "clip" if config.projects else "siglip"
    length = {"kind": kind, "sequence_length": config.text.max_sequence_length}
    found = fit_crop({**length, **given}, config.vision.image_shape[:2])
    if config.naflex:
        most = {"max_num_patches": config.vision.num_positions}
        return {**most, **found, "patch_size": config.vision.patch_size}
    return {name: value for name, value in found.items() if name not in OF_PATCHES}


def sizes(config: TwoTowersConfig) -> Sizes:
    """Returns the sizes of the images' tower, which is the larger one of the published models."""
    return vit.sizes(config.vision)


FAMILY = Family(
    name="two_towers",
    backbone=TwoTowersBackbone,
    tasks=(ImageTextSimilarity,),
    presets=PRESETS,
    formats=(huggingface,),
    sizes=sizes,
    transformers_form=huggingface.transformers_form,
    fit_preprocessor=_fit_preprocessor,
)
