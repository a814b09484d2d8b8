"""Models from names and files, and back: the work of `from_preset` and `save_to_preset`."""

from kmodels.presets.find import (
    causal_lm_of,
    class_below,
    class_of,
    family_of,
    generation_config_of,
    list_presets,
    locate,
)
from kmodels.presets.load import load, preprocessor_settings
from kmodels.presets.save import check_parts, export_to_transformers, save
from kmodels.registry import class_named

__all__ = [
    "causal_lm_of",
    "check_parts",
    "class_below",
    "class_named",
    "class_of",
    "export_to_transformers",
    "family_of",
    "generation_config_of",
    "list_presets",
    "load",
    "locate",
    "preprocessor_settings",
    "save",
]
