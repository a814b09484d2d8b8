"""PEFT's names and settings (huggingface.co/docs/peft, "PEFT checkpoint format").

A family gives `peft_names`: one or more tables of "block_{i}/attention/query" to the module's name
in transformers. The first is written; all are read, for names changed between versions.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kmodels.errors import InputError
from kmodels.lora.adapter import LoraSettings

PREFIX = "base_model.model."
PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
# Settings that would change what the tensors mean, unless they have one of these values.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
}
# Ways to begin that change the base as well, so that the adapter does not suit the plain one.
CHANGED_BASES = ("pissa", "olora", "corda", "loftq")


def _tables(model: Any) -> Sequence[Mapping[str, str]]:
    """Tables of a family; for a backbone alone without the prefix that the task adds."""
    backbone = getattr(model, "backbone", model)
    tables = getattr(backbone, "peft_names", ())
    if backbone is not model:
        return tables
    prefix = getattr(backbone, "peft_prefix", "")
    return [{k: name.removeprefix(prefix) for k, name in table.items()} for table in tables]


def _name(path: str, table: Mapping[str, str]) -> str | None:
    number = re.search(r"\d+", path)
    pattern = path.replace(number[0], "{i}", 1) if number else path
    name = table.get(pattern)
    return name and name.replace("{i}", number[0] if number else "")


def names(model: Any, paths: Iterable[str]) -> dict[str, str]:
    """Name in transformers of each layer; its path with dots where transformers has none."""
    table = next(iter(_tables(model)), {})
    return {path: _name(path, table) or path.replace("/", ".") for path in paths}


def paths(model: Any, layers: Iterable[str]) -> dict[str, str]:
    """Path of the layer that each name means, in any of the family's spellings."""
    backbone = getattr(model, "backbone", model)
    tables = [*getattr(backbone, "peft_names", ()), *_tables(backbone)]
    found = {}
    for path in layers:
        for name in (path.replace("/", "."), *(_name(path, table) for table in tables)):
            if name is not None:
                found[name] = path
    return found


def split(name: str) -> tuple[str, str | None]:
    """Module and part of a tensor's name; the part is None where it is no part of an adapter."""
    name = name.removeprefix(PREFIX).replace(".modules_to_save.", ".")
    for part in (*PARTS, "weight", "bias"):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return name, None


def config(
    settings: LoraSettings, targets: Sequence[str], others: Sequence[str], heads: Sequence[str]
) -> dict[str, Any]:
    """adapter_config.json.

    Args:
        settings: of the adapters.
        targets: names of the adapted modules.
        others: names of the linear modules that have no adapter.
        heads: names of the modules that are trained as a whole.
    """
    ends = sorted({name.rpartition(".")[2] for name in targets})
    unclear = any(name.rpartition(".")[2] in ends for name in others)
    return {
        "peft_type": "LORA",
        "r": settings.rank,
        "lora_alpha": settings.rank if settings.alpha is None else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted(targets) if unclear else ends,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "modules_to_save": sorted(heads) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }


def settings(described: Mapping[str, Any], origin: Path) -> LoraSettings:
    """The settings in an adapter_config.json.

    Raises:
        InputError: for kinds of adapters that are not LoRA, or LoRA with parts that are not here.
    """
    wrong = [
        f"{key}={described[key]!r}"
        for key, plain in PLAIN.items()
        if key in described and described[key] not in plain
    ]
    begun = described.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.startswith(CHANGED_BASES):
        wrong.append(f"init_lora_weights={begun!r}, which changes the base too")
    if wrong:
        raise InputError(f"{origin} is an adapter of a kind not known here: {', '.join(wrong)}")
    try:
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
        dropout = float(described.get("lora_dropout") or 0.0)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError(
            f"{origin} has no r and lora_alpha in adapter_config.json, or no number there or as "
            "lora_dropout; write it again"
        ) from None
    return LoraSettings(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=tuple(_list(described.get("target_modules"))) or ("all-linear",),
        rslora=bool(described.get("use_rslora")),
        dora=bool(described.get("use_dora")),
    )


def _list(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for name in value if isinstance(name, str)]
    return [value] if isinstance(value, str) else []
