"""PEFT's names and settings (huggingface.co/docs/peft, "PEFT checkpoint format").

A family gives `peft_names`: one or more tables of "block_{i}/attention/query" to the module's name
in transformers. The first is written; all are read, for names changed between versions.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.lora import peft_parameters
from kmodels.lora.adapter import LoraSettings
from kmodels.lora.patterns import matching
from kmodels.lora.saved_modules import HEAD, TABLE

PREFIX = "base_model.model."
INNER = peft_parameters.INNER
# Tensors in whose names an adapter's may stand, that name, and what follows it.
_WITH_NAME = re.compile(
    r"(.*\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
    r"|modules_to_save|trainable_tokens_delta))\.(?!(?:weight|bias)$)(\w+)((?:\.weight|\.bias)?)"
)
PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
# The same of a table that rows are looked up in.
PARTS_OF_TABLE = ("lora_embedding_A", "lora_embedding_B", PARTS[2])
# Settings that `settings` and `modules` read.
READ = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "ensure_weight_tying",
    "init_lora_weights",
    "bias",
)
BIASES = ("none", "all", "lora_only")
# Those that choose modules, whose tensors tell as much, and those about the making of the file.
HARMLESS = (
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "peft_version",
    "megatron_core",
    "runtime_config",
    # Each of these has an effect only with a setting of its own, which is refused or changes
    # nothing.
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
)
# Ways to begin that leave the base as it is, and those that change it too, so that the adapter does
# not suit the plain one; PEFT takes some in any case.
BEGINNINGS = ("gaussian", "eva", "orthogonal", "mica", "nora", "astra")
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Described:
    """The contents of an adapter_config.json.

    Args:
        settings: settings of all adapters but those that a pattern names.
        ranks: rank by the end of a module's name, or a pattern for it.
        alphas: alpha likewise.
        token_ids: rows of the embedding table that are trained, in PEFT's form; None for none.
        tables: names of the embedding table and its head among the modules that are trained.
        tied: whether the head takes what the table is trained to.
    """

    settings: LoraSettings
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    token_ids: Any = None
    tables: Sequence[str] = ()
    tied: bool = False

    def of(self, modules: Iterable[str]) -> dict[str, LoraSettings]:
        """Returns the settings of each module, by its name."""
        ends = {module: _ends(module) for module in modules}
        every = sorted({end for held in ends.values() for end in held})

        def chosen(numbers: Mapping[str, Any], module: str, usual: Any) -> Any:
            for pattern, number in numbers.items():
                if not matching(pattern, every).isdisjoint(ends[module]):
                    return number
            return usual

        return {
            module: replace(
                self.settings,
                rank=chosen(self.ranks, module, self.settings.rank),
                alpha=chosen(self.alphas, module, self.settings.alpha),
            )
            for module in ends
        }

    def counted(self) -> dict[str, Any]:
        """Returns what the hash of a file counts."""
        more = {name: getattr(self, name) for name in ("ranks", "alphas", "token_ids")}
        more |= {"tables": self.tables, "tied": self.tied} if self.tables else {}
        return self.settings.to_dict() | {key: value for key, value in more.items() if value}


def _ends(module: str) -> list[str]:
    """Returns the ends of a module's name, of which PEFT's patterns match one as a whole."""
    parts = module.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _tables(model: keras.Model) -> Sequence[Mapping[str, str]]:
    backbone = getattr(model, "backbone", model)
    find = getattr(backbone, "peft_names", None)
    return () if find is None else find(model)


def _name(path: str, table: Mapping[str, str]) -> str | None:
    number = re.search(r"\d+", path)
    pattern = path.replace(number[0], "{i}", 1) if number else path
    name = table.get(pattern)
    return name and name.replace("{i}", number[0] if number else "")


def names(model: keras.Model, paths: Iterable[str]) -> dict[str, str]:
    """Returns name in transformers of each layer that has one there."""
    table = next(iter(_tables(model)), {})
    found = {path: _name(path, table) for path in paths}
    return {path: name for path, name in found.items() if name is not None}


def in_order(model: keras.Model, names: Iterable[str]) -> list[str]:
    """Returns names of transformers in the order in which a module of theirs holds them."""
    table = next(iter(_tables(model)), {})
    ends = [peft_parameters.end(name) for name in table.values()]
    return sorted(names, key=lambda name: ends.index(peft_parameters.end(name)))


def outside_blocks(model: keras.Model) -> list[str]:
    """Returns transformers' names of what stands beside the blocks, in this model or not."""
    return [name for table in _tables(model) for name in table.values() if "{i}" not in name]


def paths(model: keras.Model, layers: Iterable[str]) -> dict[str, str]:
    """Returns the path of the layer that each name means, in any of the family's spellings."""
    found = {}
    for path in layers:
        for name in (_name(path, table) for table in _tables(model)):
            if name is not None:
                found.setdefault(name, path)
    return found


def split(name: str) -> tuple[str, str | None]:
    """Returns module and part of a tensor's name; the part is None if no adapter has it."""
    name = name.removeprefix(PREFIX).replace(".modules_to_save.", ".")
    name = re.sub(r"\.base_layer\.(weight|bias)$", r".\1", name)
    for part in (*PARTS, *PARTS_OF_TABLE, "weight", "bias"):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return name, None


def without_adapter_name(arrays: Mapping[str, np.ndarray], origin: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file under the names that PEFT writes, without an adapter's name.

    A state dictionary that was saved directly has "lora_A.default.weight" for "lora_A.weight".

    Raises:
        InputError: for tensors of several adapters.
    """
    found, adapters = {}, set()
    for name, array in arrays.items():
        if match := _WITH_NAME.fullmatch(name):
            start, adapter, end = match.groups()
            adapters.add(adapter)
            name = start + ("" if start.endswith("vector") else end)
        # Originals of what is trained whole are those of the base.
        if ".original_module." not in name or is_table(name):
            found[name] = array
    if len(adapters) > 1:
        raise InputError(
            f"{origin} holds several adapters, {', '.join(sorted(adapters))}; save one alone with "
            "save_pretrained(selected_adapters=...)"
        )
    return found


def is_table(name: str) -> bool:
    """Returns True if a tensor belongs to the embedding table or the output layer."""
    return any(f".{table}." in f".{name}" for table in (TABLE, HEAD))


def config(
    adapters: Mapping[str, LoraSettings],
    others: Sequence[str],
    heads: Sequence[str],
    experts: Sequence[str] = (),
    biases: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the content of adapter_config.json.

    Args:
        adapters: settings by name of the adapted module.
        others: names of the linear modules that have no adapter.
        heads: names of the modules that are trained as a whole.
        experts: names of the tensors of experts, adapted or not.
        biases: names of the modules of which only the bias is trained.

    Raises:
        InputError: for adapters that differ in more than PEFT can say.
    """
    ranks = Counter(settings.rank for settings in adapters.values())
    alphas = Counter(_alpha(settings) for settings in adapters.values())
    shared = {(s.dropout, s.rslora, s.dora) for s in adapters.values()}
    if len(shared) > 1:
        raise InputError(
            "PEFT has one dropout, rslora and dora for all adapters of a file; this model's have "
            f"{len(shared)} combinations: use save_to_preset"
        )
    ((dropout, rslora, dora),) = shared
    rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
    linear = [name for name in adapters if name not in experts]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    parameters = peft_parameters.described(adapters, experts)
    unclear = any(name.rpartition(".")[2] in ends for name in others)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {n: s.rank for n, s in sorted(adapters.items()) if s.rank != rank},
        "alpha_pattern": {n: _alpha(s) for n, s in sorted(adapters.items()) if _alpha(s) != alpha},
        "lora_dropout": dropout,
        "target_modules": sorted(linear) if unclear else ends,
        **({"target_parameters": parameters} if parameters else {}),
        "use_rslora": rslora,
        "use_dora": dora,
        "modules_to_save": sorted(heads) or None,
        "bias": ("lora_only" if set(biases) <= set(linear) else "all") if biases else "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }


def _alpha(settings: LoraSettings) -> float:
    return settings.rank if settings.alpha is None else settings.alpha


def settings(described: Mapping[str, Any], origin: Path) -> Described:
    """Returns the settings in an adapter_config.json.

    Each key is read, without effect, or at a value that turns it off; any other raises, since it
    may change what the tensors mean.

    Raises:
        InputError: for kinds of adapters that are not LoRA, or LoRA with parts that are not here.
    """
    wrong = [] if described.get("peft_type") == "LORA" else [_said(described, "peft_type")]
    known = {*READ, *HARMLESS, "peft_type"}
    wrong += [
        _said(described, key)
        for key, value in described.items()
        if key not in known and value not in (None, False, "none", [], {})
    ]
    if described.get("bias") not in (None, *BIASES):
        wrong.append(_said(described, "bias"))
    begun = described.get("init_lora_weights", True)
    if not isinstance(begun, bool | None) and not str(begun).lower().startswith(BEGINNINGS):
        changes = str(begun).lower().startswith(CHANGED_BASES)
        why = ", which changes the base too" if changes else ""
        wrong.append(_said(described, "init_lora_weights") + why)
    if wrong:
        raise InputError(f"{origin} is an adapter of an unsupported kind: {', '.join(wrong)}")
    try:
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
        dropout = float(described.get("lora_dropout") or 0.0)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError(
            f"{origin} has no r and lora_alpha in adapter_config.json, or no number there or as "
            "lora_dropout; write it again"
        ) from None
    found = LoraSettings(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=tuple(_list(described.get("target_modules"))) or ("all-linear",),
        rslora=bool(described.get("use_rslora")),
        dora=bool(described.get("use_dora")),
        target_parameters=tuple(_list(described.get("target_parameters"))),
    )
    try:
        ranks = {key: int(n) for key, n in _pattern(described, "rank_pattern")}
        alphas = {key: float(n) for key, n in _pattern(described, "alpha_pattern")}
    except (TypeError, ValueError, OverflowError, RecursionError, re.error):
        raise InputError(
            f"{origin} has a rank_pattern or alpha_pattern in adapter_config.json that means "
            "nothing: patterns are names with numbers"
        ) from None
    saved = _list(described.get("modules_to_save"))
    return Described(
        found,
        ranks,
        alphas,
        described.get("trainable_token_indices"),
        [name for name in saved if name.rpartition(".")[2] in (TABLE, HEAD)],
        bool(described.get("ensure_weight_tying")),
    )


def _said(described: Mapping[str, Any], key: str) -> str:
    return f"{key}={described.get(key)!r}"


def _pattern(described: Mapping[str, Any], key: str) -> Iterable[tuple[str, Any]]:
    given = described.get(key) or {}
    if not isinstance(given, Mapping):
        raise TypeError
    for name in given:
        re.compile(name)
    return given.items()


def _list(value: object) -> list[str]:
    if isinstance(value, list):
        return [name for name in value if isinstance(name, str)]
    return [value] if isinstance(value, str) else []
