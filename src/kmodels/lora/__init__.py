"""Low-rank adaptation (Hu et al. 2021) of any model whose linear layers are `layers.Dense`."""

from kmodels.layers.adapter import Adapter, LoraSettings
from kmodels.layers.changes import describe_adapters as describe
from kmodels.layers.changes import is_merged
from kmodels.layers.changes import restore_adapters as restore
from kmodels.lora.adapter_files import load_adapter, save_adapter
from kmodels.lora.enable import disabled, enable, merge, unmerge
from kmodels.lora.modules import Ids

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
