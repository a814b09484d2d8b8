"""Low-rank adaptation (Hu et al. 2021) of any model whose linear layers are `layers.Dense`."""

from kmodels.lora.adapter import Adapter, LoraSettings
from kmodels.lora.enable import (
    describe,
    disabled,
    enable,
    is_merged,
    merge,
    restore,
    unmerge,
)
from kmodels.lora.files import load_adapter, save_adapter
from kmodels.lora.vocabulary import Ids

__all__ = [
    "Adapter",
    "Ids",
    "LoraSettings",
    "describe",
    "disabled",
    "enable",
    "is_merged",
    "load_adapter",
    "merge",
    "restore",
    "save_adapter",
    "unmerge",
]
