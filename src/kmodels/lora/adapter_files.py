"""Adapters in PEFT's files, both ways (huggingface.co/docs/peft, "PEFT checkpoint format").

A directory holds adapter_config.json and adapter_model.safetensors. A hash in the header of the
second, which PEFT does not read, covers everything that `load_adapter` reads from the directory. A
program that writes the file again drops the hash, whereas a list of hashes in a separate file would
stay and be wrong.
"""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_directory
from kmodels.core.remote import local_copy, staged
from kmodels.core.schema import read_json
from kmodels.layers.adapter import Adaptable, LoraSettings
from kmodels.layers.changes import (
    adaptable_layers,
    adapters,
    is_merged,
    put_adapters,
    rows,
    trained_parts,
)
from kmodels.lora import modules
from kmodels.lora.modules import (
    BIAS,
    HEAD,
    TABLE,
    TABLES,
    WEIGHT,
    Module,
    expert_layers,
    linear_layers,
    matching,
)
from kmodels.weights import LazyArray, gather, write_safetensors
from kmodels.weights.files import read_metadata, read_tensors
from kmodels.weights.native import WriteBy, refuse_to_replace

log = logging.getLogger("kmodels")
STEM = "adapter_model"
CONFIG, WEIGHTS = "adapter_config.json", f"{STEM}.safetensors"
HASH = "kmodels_sha256"
PREFIX = "base_model.model."
INNER = ".base_layer"
# A tensor's name up to the name of an adapter, that name, and the rest.
_WITH_NAME = re.compile(
    r"(.*\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
    r"|modules_to_save|trainable_tokens_delta))\.(?!(?:weight|bias)$)(\w+)((?:\.weight|\.bias)?)"
)
PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
# The same for an embedding table.
LOOKUP_PARTS = ("lora_embedding_A", "lora_embedding_B", PARTS[2])
# Keys that are read.
READ = (
    *("peft_type", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "bias"),
    *("target_modules", "target_parameters", "modules_to_save", "trainable_token_indices"),
    *("use_rslora", "use_dora", "ensure_weight_tying", "init_lora_weights"),
)
BIASES = ("none", "all", "lora_only")
# Keys that choose modules, which the tensors' names show too, and keys about the file's origin.
HARMLESS = (
    *("layers_to_transform", "layers_pattern", "exclude_modules", "auto_mapping", "revision"),
    *("base_model_name_or_path", "task_type", "inference_mode", "peft_version"),
    *("megatron_core", "runtime_config"),
    # Each of these has an effect only with another key, which is refused or changes nothing.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
)
# Initializations that leave the base unchanged, and those that change it, so that the adapter does
# not fit the original base; PEFT accepts some in upper case.
BEGINNINGS = ("gaussian", "eva", "orthogonal", "mica", "nora", "astra")
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Parts of the embedding table in a file. Trained rows:
ROWS = "token_adapter.trainable_tokens_delta"
# The frozen table: beside trained rows, beside an adapter, or alone.
BASE, ADAPTED = "token_adapter.base_layer.weight", "base_layer.weight"
# If all of the table is trained, PEFT may write it twice, and the original too.
COPY, BEFORE = "modules_to_save.weight", "original_module.weight"
TABLE_PARTS = (ROWS, BASE, ADAPTED, COPY, BEFORE, WEIGHT)


# === Names of tensors ===


def _split(name: str, parts: Sequence[str]) -> tuple[str, str | None]:
    """Returns module and part of a tensor's name, or the name and None for an unknown part."""
    for part in parts:
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return name, None


def _without_adapter_name(arrays: Mapping[str, np.ndarray], origin: Path) -> dict[str, np.ndarray]:
    """Returns the tensors under the names that PEFT writes, which lack the adapter's name.

    A state dictionary that was saved directly has "lora_A.default.weight" for "lora_A.weight".

    Raises:
        InputError: for tensors of several adapters.
    """
    renamed, adapters = {}, set()
    for name, array in arrays.items():
        if match := _WITH_NAME.fullmatch(name):
            start, adapter, end = match.groups()
            adapters.add(adapter)
            name = start + ("" if start.endswith("vector") else end)
        # The originals of other modules that are trained whole are those of the base.
        if ".original_module." not in name or _is_table(name):
            renamed[name] = array
    if len(adapters) > 1:
        raise InputError(
            f"{origin} holds several adapters, {', '.join(sorted(adapters))}; save one alone with "
            "save_pretrained(selected_adapters=...)"
        )
    return renamed


def _is_table(name: str) -> bool:
    return any(f".{table}." in f".{name}" for table in (TABLE, HEAD))


def _adapter_parts(layer: Adaptable) -> tuple[str, ...]:
    """Returns the ends of the names of an adapter's tensors in a file."""
    return LOOKUP_PARTS if layer.is_lookup else PARTS


# === adapter_config.json ===


@dataclass(frozen=True)
class Described:
    """The contents of an adapter_config.json.

    Args:
        settings: settings of all adapters that no pattern names.
        ranks: rank by the end of a module's name, or a pattern for it.
        alphas: alpha by the same.
        token_ids: trained rows of the embedding table, in PEFT's form; None for none.
        tables: names of the embedding table and its head among the modules that are trained.
        tied: True if table and head are trained as one.
    """

    settings: LoraSettings
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    token_ids: Any = None
    tables: Sequence[str] = ()
    tied: bool = False

    def of(self, names: Iterable[str]) -> dict[str, LoraSettings]:
        """Returns the settings of each module, by its name."""
        # PEFT's patterns match one of the ends of a module's name as a whole.
        ends = {
            name: [".".join(name.split(".")[i:]) for i in range(name.count(".") + 1)]
            for name in names
        }
        every = sorted({end for of_layer in ends.values() for end in of_layer})

        def chosen(numbers: Mapping[str, Any], module: str, default: Any) -> Any:
            for pattern, number in numbers.items():
                if not matching(pattern, every).isdisjoint(ends[module]):
                    return number
            return default

        return {
            module: replace(
                self.settings,
                rank=chosen(self.ranks, module, self.settings.rank),
                alpha=chosen(self.alphas, module, self.settings.alpha),
            )
            for module in ends
        }

    def hash(self, arrays: Mapping[str, np.ndarray]) -> str:
        """Returns sha256 over the settings and over name, dtype, shape and bytes of each array."""
        more = {name: getattr(self, name) for name in ("ranks", "alphas", "token_ids")}
        more |= {"tables": self.tables, "tied": self.tied} if self.tables else {}
        counted = self.settings.to_dict() | {key: value for key, value in more.items() if value}
        digest = hashlib.sha256(json.dumps(counted, sort_keys=True).encode())
        for name, array in sorted(arrays.items()):
            digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def settings(described: Mapping[str, Any], origin: Path) -> Described:
    """Returns the settings in an adapter_config.json, whose types `read_json` has checked.

    Each key is read, has no effect, or must have a value that turns it off; others raise, since
    they may change the meaning of the tensors.

    Raises:
        InputError: for other kinds of adapters, or features of LoRA that are not supported.
    """
    wrong = [] if described.get("peft_type") == "LORA" else ["peft_type"]
    off = (None, False, "none", [], {})
    unknown = [key for key in described if key not in READ and key not in HARMLESS]
    wrong += [key for key in unknown if described[key] not in off]
    if described.get("bias") not in (None, *BIASES):
        wrong.append("bias")
    problems = [f"{key}={described.get(key)!r}" for key in wrong]
    begun = described.get("init_lora_weights")
    if isinstance(begun, str) and not begun.lower().startswith(BEGINNINGS):
        changes = begun.lower().startswith(CHANGED_BASES)
        why = ", which changes the base too" if changes else ""
        problems.append(f"init_lora_weights={begun!r}{why}")
    if problems:
        raise InputError(f"{origin} is an adapter of an unsupported kind: {', '.join(problems)}")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if rank is None or alpha is None:
        raise InputError(f"{origin} has no r and lora_alpha in {CONFIG}; write it again")
    saved = _list(described.get("modules_to_save"))
    return Described(
        LoraSettings(
            rank=rank,
            alpha=float(alpha),
            dropout=float(described.get("lora_dropout") or 0.0),
            targets=tuple(_list(described.get("target_modules"))) or ("all-linear",),
            rslora=bool(described.get("use_rslora")),
            dora=bool(described.get("use_dora")),
            target_parameters=tuple(_list(described.get("target_parameters"))),
        ),
        described.get("rank_pattern") or {},
        {key: float(x) for key, x in (described.get("alpha_pattern") or {}).items()},
        described.get("trainable_token_indices"),
        [name for name in saved if name.rpartition(".")[2] in (TABLE, HEAD)],
        bool(described.get("ensure_weight_tying")),
    )


def _list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _config(
    adapted: Mapping[str, LoraSettings],
    others: Sequence[str],
    heads: Sequence[str],
    experts: Sequence[str],
    biases: Sequence[str],
) -> dict[str, Any]:
    """Returns the content of adapter_config.json.

    It is made of settings by name of the adapted module, and of the names of linear modules without
    an adapter, modules that are trained as a whole, tensors of experts, adapted or not, and modules
    of which only the bias is trained.

    Raises:
        InputError: for adapters whose differences PEFT cannot express.
    """
    ranks = Counter(settings.rank for settings in adapted.values())
    alphas = Counter(settings.given_alpha for settings in adapted.values())
    shared = {(s.dropout, s.rslora, s.dora) for s in adapted.values()}
    if len(shared) > 1:
        raise InputError(
            "PEFT has one dropout, rslora and dora for all adapters of a file; this model's have "
            f"{len(shared)} combinations: use save_to_preset"
        )
    ((dropout, rslora, dora),) = shared
    rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
    linear = [name for name in adapted if name not in experts]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    unclear = any(name.rpartition(".")[2] in ends for name in others)
    tensors = [name for name in experts if name in adapted]
    of_experts = sorted({_tensor(name) for name in tensors})
    if any(_tensor(name) in of_experts for name in experts if name not in adapted):
        of_experts = sorted(tensors)
    settings = sorted(adapted.items())
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: s.rank for name, s in settings if s.rank != rank},
        "alpha_pattern": {name: s.given_alpha for name, s in settings if s.given_alpha != alpha},
        "lora_dropout": dropout,
        "target_modules": sorted(linear) if unclear else ends,
        **({"target_parameters": of_experts} if of_experts else {}),
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


# === Experts ===
# PEFT wraps the module that holds the tensor of all experts, and wraps it twice if two of its
# tensors have adapters: the wrapper of the first is the inner one. Only this order tells whose
# matrices a file holds.


def _tensor(name: str) -> str:
    """Returns module and tensor alone, such as "experts.down_proj"."""
    return ".".join(name.split(".")[-2:])


def _wrappers(model: keras.Model, names: Iterable[str]) -> dict[str, str]:
    """Returns the module in a file by name of an adapted tensor of experts."""
    order = [_tensor(name) for name in next(iter(modules.name_tables(model)), {}).values()]
    tensors: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: order.index(_tensor(name))):
        tensors.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + INNER * (len(names_of_module) - 1 - place)
        for module, names_of_module in tensors.items()
        for place, name in enumerate(names_of_module)
    }


def _expert_shapes(layer: Any, rank: int) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the two matrices in a file: all experts side by side."""
    rows = rank * layer.groups
    return {PARTS[0]: (rows, layer.input_dim), PARTS[1]: (layer.units, rows)}


def _experts_to_file(array: np.ndarray, part: str) -> np.ndarray:
    """(E, in, rank) -> (E * rank, in) for the first matrix, (E, rank, out) -> (out, rank * E)."""
    if part == PARTS[0]:
        return np.swapaxes(array, 1, 2).reshape(-1, array.shape[1])
    return np.transpose(array, (2, 1, 0)).reshape(array.shape[2], -1)


def _experts_from_file(array: np.ndarray, part: str, experts: int) -> np.ndarray:
    if part == PARTS[0]:
        return np.swapaxes(array.reshape(experts, -1, array.shape[1]), 1, 2)
    return np.transpose(array.reshape(array.shape[0], -1, experts), (2, 1, 0))


# === The embedding table ===
# In transformers and PEFT, a tied table and head are two modules that share weights; here they are
# one variable, so a file must say the same of both.


def _table_to_file(
    model: keras.Model, save_embedding_layers: bool | str
) -> tuple[dict[str, LazyArray], dict[str, Any]]:
    """Returns tensors by name and entries of adapter_config.json for the table.

    Raises:
        InputError: for another `save_embedding_layers`, or a table without a name in transformers.
    """
    if save_embedding_layers not in (True, False, "auto"):
        raise InputError(
            f"save_embedding_layers is {save_embedding_layers!r}; give True, False or 'auto'"
        )
    entries: dict[str, Any] = {}
    tensors: dict[str, LazyArray] = {}
    layers = modules.tables(model)
    names = modules.names(model, layers)
    for path, layer in layers.items():
        trained, whole = layer.rows, layer.embeddings.trainable
        wanted = layer.resized if save_embedding_layers == "auto" else save_embedding_layers
        if not (trained or whole or wanted):
            continue
        if (name := names.get(path)) is None:
            raise InputError(
                f"transformers has no name for {path}, so that PEFT would load nothing there; use "
                "save_to_preset"
            )
        if trained is not None:
            tensors[f"{name}.{ROWS}"] = _lazy(trained.values)
            entries["trainable_token_indices"] = list(trained.ids)
        if whole:
            entries["modules_to_save"] = [name]
            tensors[f"{name}.{WEIGHT}"] = _lazy(layer.embeddings)
            if layer.tie_weights and getattr(model, "backbone", model) is not model:
                tensors[f"{HEAD}.{WEIGHT}"] = _lazy(layer.embeddings)
                entries["ensure_weight_tying"] = True
        elif wanted:
            adapted = any(table.is_lookup and table.adapter for table in layer.tables)
            end = BASE if trained is not None else ADAPTED if adapted else WEIGHT
            tensors[f"{name}.{end}"] = _lazy(layer.embeddings)
        for table in layer.tables:
            if wanted and table.is_output and not table.kernel.trainable:
                end = WEIGHT if table.adapter is None else ADAPTED
                tensors[f"{HEAD}.{end}"] = _lazy(table.kernel)
    return tensors, entries


def _table_from_file(
    model: keras.Model, arrays: Mapping[str, np.ndarray], described: Described
) -> tuple[set[str], Callable[[], None], list[str]]:
    """Reads the embedding table, or some rows of it.

    Returns:
        The names of its tensors, a function that puts them into the frozen model, and the problems.
    """
    layers = modules.tables(model)
    by_name = modules.paths(model, layers)
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in TABLE_PARTS}
    used: set[str] = set()
    for name, array in arrays.items():
        module, part = _split(name.removeprefix(PREFIX), TABLE_PARTS)
        if part is not None and module in by_name:
            parts[part][module] = array
            used.add(name)
    layer: Any = next(iter(layers.values()), None)
    ids, named = described.token_ids, described.tables
    if layer is not None and not layer.tie_weights:  # the head is a module like any other
        named = [name for name in named if name.rpartition(".")[2] != HEAD]

    def refused(problem: str) -> tuple[set[str], Callable[[], None], list[str]]:
        return used, lambda: None, [problem]

    if not used and ids is None and not named:
        return used, lambda: None, []
    if layer is None:
        return refused("it trains an embedding table, and this model has none")
    weights = {**parts[WEIGHT], **parts[BASE], **parts[ADAPTED], **parts[COPY]}
    trained, table = (next(iter(x.values()), np.zeros(0)) for x in (parts[ROWS], weights))
    size = (layer.input_dim, layer.output_dim)
    if weights and table.shape != size:
        return refused(
            f"the embedding table is {table.shape}, the model's {size}: call "
            f"resize_token_embeddings({table.shape[0]}) first"
        )
    try:
        begin = modules.prepare(model, ids, [layer.path] if named else None)
        order = np.argsort(modules.ids_of(ids, layer)) if ids else np.zeros(0, int)
    except InputError as problem:
        return refused(str(problem))
    problems = []
    if bool(parts[ROWS]) != (ids is not None):
        sides = "rows of tokens", "trainable_token_indices"
        problems.append("it has {} and no {}".format(*(sides if parts[ROWS] else sides[::-1])))
    if named and not weights:
        problems.append(f"modules_to_save names {', '.join(named)}, which it does not hold")
    for what, copied in (("rows", parts[ROWS]), ("a table", weights)):
        copies = list(copied.values())
        if not all(np.array_equal(copies[0], other) for other in copies[1:]):
            problems.append(f"{' and '.join(copied)} have {what} each, and here they are one")
    # Without ensure_weight_tying, PEFT trains a copy of one of the two and not the other. A file of
    # a model without a head, which holds the table alone, has no other.
    untied = layer.tie_weights and described.tables and not described.tied
    if untied and len(weights) < 2 and list(weights) != [TABLE]:
        problems.append(
            f"modules_to_save={list(described.tables)} without ensure_weight_tying left the other "
            f"of table and {HEAD} as it was, and here they are one"
        )
    if len(order) and parts[ROWS] and trained.shape != (len(order), size[1]):
        problems.append(
            f"the trained rows are {trained.shape}, the model needs {(len(order), size[1])}"
        )

    def put() -> None:
        if named:  # the copies take the trained values, and the table stays
            begin()
        if weights:
            layer.embeddings.assign(np.asarray(table, "float32"))
        if not named:
            begin()
        for part in rows(layer).values():
            part.values.assign(np.asarray(trained, "float32")[order])

    return used, put, problems


def _lazy(variable: keras.Variable, transposed: bool = False) -> LazyArray:
    """Returns a variable in float32, as PEFT writes it, that is read only when it is written."""
    shape = tuple(variable.shape)
    read = partial(_float32, variable)
    array = LazyArray(shape, np.dtype("float32"), read)
    return array.map(shape[::-1], np.transpose) if transposed else array


def _float32(variable: keras.Variable) -> np.ndarray:
    return np.asarray(gather.values(variable), "float32")


# === Writing ===


def save_adapter(
    model: keras.Model,
    directory: str | Path,
    write_by: WriteBy = lambda tensors, write: write(tensors),
    save_embedding_layers: bool | str = "auto",
) -> Path:
    """Writes the adapters, and a trained head, to a directory that PEFT and `load_adapter` read.

    `load_adapter` refuses a directory that was changed since, by a hash in the file's header.

    Args:
        model: a backbone or task with adapters.
        directory: to make or replace, local or an address.
        write_by: calls the function that writes the tensors, in one of several processes.
        save_embedding_layers: whether a frozen embedding table is written as well; "auto" for
            tables that were resized.

    Raises:
        InputError: without adapters, for a layer that has no name in transformers, or if something
            else is trained than adapters, modules and rows of the embedding table.
    """
    adapted = adapters(model)
    if not adapted:
        hint = "; call unmerge_lora first" if is_merged(model) else "; call enable_lora first"
        raise InputError(f"save_adapter found no LoRA adapters{hint}")
    saved, known = _trained_modules(model), modules.modules(model)
    linear, experts = linear_layers(model), expert_layers(model)
    names = modules.names(model, [*linear, *experts, *known])
    table, entries = _table_to_file(model, save_embedding_layers)
    if nameless := [path for path in (*adapted, *saved) if path not in names]:
        raise InputError(
            f"transformers has no name for {', '.join(nameless[:8])}, so that PEFT would load "
            "nothing there; leave them out of enable_lora's targets, freeze heads, or use "
            "save_to_preset"
        )
    tensors: dict[str, LazyArray] = {}
    wrappers = _wrappers(model, [names[path] for path in adapted if path in experts])
    for path, adapter in adapted.items():
        layer, name = adapter.layer, names[path]
        shapes = _expert_shapes(layer, adapter.settings.rank) if path in experts else {}
        for variable, part in zip(adapter.variables, _adapter_parts(layer), strict=False):
            array = _lazy(variable, transposed=path not in experts and part != PARTS[2])
            if path in experts:
                array = array.map(shapes[part], partial(_experts_to_file, part=part))
            tensors[f"{wrappers.get(name, name)}.{part}"] = array
    for path, parts in saved.items():
        within = f"{names[path]}{INNER if path in adapted else ''}"
        for part, variable in parts.items():
            tensors[f"{within}.{part}"] = _lazy(variable, known[path].transposed(part))
    heads = {names[path] for path, parts in saved.items() if WEIGHT in parts}
    for name in sorted(heads):
        if others := [x for x in names.values() if x.endswith(name) and x not in heads]:
            raise InputError(
                f"PEFT would take {name} of modules_to_save for {others[0]} too; save the adapter "
                "of a model with its head, whose names are longer, or use save_to_preset"
            )
    outside_blocks = [
        name for x in modules.name_tables(model) for name in x.values() if "{i}" not in name
    ]
    config = _config(
        {names[path]: adapter.settings for path, adapter in adapted.items()},
        others=[
            *(names[path] for path in linear if path in names and path not in adapted),
            *outside_blocks,
        ],
        heads=[*heads, *entries.pop("modules_to_save", [])],
        experts=[names[path] for path in experts if path in names],
        biases=[names[path] for path in saved if names[path] not in heads],
    )
    config |= entries

    with staged(directory) as (target, finish):

        def write(tensors: Mapping[str, LazyArray]) -> Path:
            refuse_to_replace(target, (CONFIG, WEIGHTS, "README.md"))
            with atomic_directory(target) as folder:
                text = json.dumps(config, indent=2, sort_keys=True) + "\n"
                (folder / CONFIG).write_text(text, encoding="utf-8")
                arrays = {name: tensor.read() for name, tensor in tensors.items()}
                read = {
                    name: replace(tensors[name], read=lambda array=array: array)
                    for name, array in arrays.items()
                }
                digest = settings(config, target).hash(arrays)
                write_safetensors(folder / WEIGHTS, read, {"format": "pt", HASH: digest})
            return finish(target)

        tensors |= table
        return write_by({PREFIX + name: array for name, array in tensors.items()}, write)


def _trained_modules(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Returns the trained variables of modules other than the table, by path and part."""
    trained = modules.trained(model)
    written = {id(v) for parts in trained.values() for v in parts.values()}
    written |= {id(v) for adapter in adapters(model).values() for v in adapter.variables}
    written |= {id(part.values) for part in rows(model).values()}
    if lost := [v.path for v in model.trainable_weights if id(v) not in written]:
        raise InputError(
            f"an adapter file has no place for the trained {', '.join(lost[:8])}; freeze them or "
            "use save_to_preset"
        )
    tables = modules.tables(model)
    return {path: parts for path, parts in trained.items() if path not in tables}


# === Reading ===


def load_adapter(model: keras.Model, directory: str | Path) -> None:
    """Loads the adapters of a directory; rank, alpha and targets come from the file.

    Everything is read and compared first; the model changes only if all of it fits. Adapters of the
    model are replaced. A changed bit in a directory of `save_adapter` is detected; files of other
    packages have no hash.

    Args:
        model: a backbone or task.
        directory: with adapter_config.json and adapter_model.safetensors.

    Raises:
        InputError: for a damaged directory, one that does not fit, with all problems, or a model
            with merged adapters.
    """
    directory = local_copy(directory)
    if not (directory / CONFIG).is_file():
        raise InputError(
            f"{directory} holds no {CONFIG}; give a directory written by PEFT or save_adapter"
        )
    if is_merged(model):
        raise InputError("the model has merged adapters; call unmerge_lora before load_adapter")
    content = read_json(directory / CONFIG)
    described = settings(content, directory)
    arrays = {name: tensor.read() for name, tensor in read_tensors(directory, STEM).items()}
    header = read_metadata(directory / WEIGHTS) if (directory / WEIGHTS).is_file() else {}
    if HASH in header and header[HASH] != described.hash(arrays):
        raise InputError(
            f"{directory} is damaged: settings or weights are not those that were saved (sha256); "
            "copy it again"
        )
    arrays = _without_adapter_name(arrays, directory)
    of_table, put_table, problems = _table_from_file(model, arrays, described)
    others = {name: array for name, array in arrays.items() if name not in of_table}
    fit = _match(model, others, described)
    if problems := [*problems, *fit.problems]:
        raise InputError(f"{directory} does not fit the model: {'; '.join(problems)}")
    if left_out := _left_out(content, arrays):
        log.warning(
            "%s holds adapters of %s, which its settings leave out; they are read, and PEFT would "
            "leave them out",
            directory,
            ", ".join(left_out[:8]),
        )
    for part in trained_parts(model):
        part.remove()
    put_adapters(getattr(model, "backbone", model), fit.chosen)
    put_table()
    modules.copy_parts((fit.modules[x], part) for x, part in fit.saved if x not in fit.frozen)
    for path, of_layer in fit.adapters.items():
        layer = fit.chosen[path][0]
        variables = dict(zip(_adapter_parts(layer), layer.adapter.variables, strict=False))
        for part, array in of_layer.items():
            experts = layer.groups
            array = array.T if experts is None else _experts_from_file(array, part, experts)
            variables[part].assign(np.ascontiguousarray(array, "float32"))
    for (path, part), array in fit.saved.items():
        module = fit.modules[path]
        array = array.T if module.transposed(part) else array
        module.variable(part).assign(np.ascontiguousarray(array, "float32"))


def _left_out(described: Mapping[str, Any], arrays: Iterable[str]) -> list[str]:
    """Returns the modules with LoRA matrices that the settings of the file do not choose."""
    ends = (f".{PARTS[0]}", f".{LOOKUP_PARTS[0]}")
    names = {
        name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in arrays if name.endswith(ends)
    }
    targets, layers = described.get("target_modules"), described.get("layers_to_transform")
    if not targets or described.get("target_parameters"):  # whose wrappers have other names
        return []

    def named(targets: str | list[str] | None) -> set[str]:
        if isinstance(targets, str):
            return set(matching(targets, sorted(names)))
        return {x for x in names if any(f".{x}".endswith(f".{end}") for end in targets or ())}

    chosen = names if targets == "all-linear" else named(targets)
    chosen = chosen - named(described.get("exclude_modules"))
    if layers is not None:
        blocks = {f".{i}." for i in (layers if isinstance(layers, list) else [layers])}
        chosen = {x for x in chosen if any(block in f".{x}" for block in blocks)}
    return sorted(names - chosen)


@dataclass(frozen=True)
class _Fit:
    """The match of the tensors of a file with a model.

    Args:
        modules: modules of the model that may be trained as a whole, by path.
        frozen: paths of output layers that a file may hold as its base, which replaces the model's.
        chosen: layers that get an adapter, with its settings, by path.
        adapters: arrays by path and part of the adapter.
        saved: arrays of modules that are trained as a whole, or by their bias, by path and part.
        problems: descriptions of modules that do not fit.
    """

    modules: Mapping[str, Module]
    frozen: Sequence[str]
    chosen: dict[str, tuple[Any, LoraSettings]] = field(default_factory=dict)
    adapters: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    saved: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _match(model: keras.Model, arrays: Mapping[str, np.ndarray], described: Described) -> _Fit:
    """Matches the tensors of a file with layers and modules of a model."""
    layers, known = adaptable_layers(model), modules.modules(model)
    head_is_trained = any(name.rpartition(".")[2] == HEAD for name in described.tables)
    fit = _Fit(known, [x for x in known if x.endswith(TABLES[1]) and not head_is_trained])
    paths = modules.paths(model, {**layers, **known})
    targets = described.settings.target_parameters
    of_experts = [
        name
        for name in modules.paths(model, expert_layers(model))
        if any(f".{name}".endswith(f".{target}") for target in targets)
    ]
    wrapped = {module: name for name, module in _wrappers(model, of_experts).items()}
    unknown: list[str] = []
    named: dict[str, str] = {}
    for name, array in arrays.items():
        stem = name.removeprefix(PREFIX).replace(".modules_to_save.", ".")
        stem = re.sub(r"\.base_layer\.(weight|bias)$", r".\1", stem)
        module, part = _split(stem, (*PARTS, *LOOKUP_PARTS, WEIGHT, BIAS))
        module = wrapped.get(module, module)
        path = paths.get(module, "")
        if path in layers and part in _adapter_parts(layers[path]):
            named[path] = module
            fit.adapters.setdefault(path, {})[part] = array
        elif part is not None and path in known and part in known[path].attributes:
            fit.saved[path, part] = array
        else:
            unknown.append(name)
    settings = described.of(named.values())
    # In the order of the model: the two tables of an embedding have their variables in one layer.
    fit.chosen.update({x: (layers[x], settings[named[x]]) for x in layers if x in named})
    if of_tables := [name for name in unknown if ".lora_" in name and _is_table(name)]:
        fit.problems.append(
            "LoRA matrices of an embedding table that is the output layer too are not supported "
            f"({of_tables[0]}); train it whole, by modules_to_save"
        )
    elif unknown:
        fit.problems.append(f"{len(unknown)} tensors without a layer: {', '.join(unknown[:8])}")
    for path, of_layer in fit.adapters.items():
        fit.problems.extend(_misfits(path, _shapes(*fit.chosen[path]), of_layer))
    for path, module in known.items():
        of_layer = {x: fit.saved[path, x] for x in module.attributes if (path, x) in fit.saved}
        shapes = {part: module.shape(part) for part in module.attributes}
        if WEIGHT not in of_layer:
            shapes = {part: shapes[part] for part in of_layer}
        elif path in fit.chosen and path not in fit.frozen:
            fit.problems.append(f"{path} has an adapter and is in modules_to_save")
        fit.problems.extend(_misfits(path, shapes, of_layer))
    looked_up = [path for path, (layer, _) in fit.chosen.items() if layer.is_lookup]
    if described.token_ids is not None and looked_up:
        fit.problems.append(
            f"it has both LoRA matrices and trained rows of {looked_up[0]}; write one of them"
        )
    if not fit.chosen and not fit.problems:
        fit.problems.append("it holds no adapters")
    return fit


def _shapes(layer: Adaptable, settings: LoraSettings) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of an adapter's arrays in a file, by part."""
    if layer.groups is not None:
        return _expert_shapes(layer, settings.rank)
    first, second, magnitude = _adapter_parts(layer)
    shapes: dict[str, tuple[int, ...]] = {
        first: (settings.rank, layer.input_dim),
        second: (layer.units, settings.rank),
    }
    return shapes | ({magnitude: (layer.units,)} if settings.dora else {})


def _misfits(
    path: str, wanted: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]
) -> list[str]:
    if not arrays:
        return []
    return [
        *(f"{path} has no {part}" for part in wanted if part not in arrays),
        *(f"{path} has no place for {part}" for part in arrays if part not in wanted),
        *(
            f"{path}'s {part} is {arrays[part].shape}, the model needs {shape}"
            for part, shape in wanted.items()
            if part in arrays and arrays[part].shape != shape
        ),
    ]
