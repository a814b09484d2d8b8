"""Layers and modules by name: targets of adapters, and modules that are trained along with them.

A target is a name, the end of a path, or a regular expression. A pattern such as "(a+)+" may
backtrack for years, and `re` holds the interpreter's lock meanwhile, so no thread can stop it. A
pattern with groups or with more than a few repetitions is therefore matched in a child process with
a time limit.

A family's `peft_names` gives one or more tables from a path such as "block_{i}/attention/query" to
the module's name in transformers. Names are written by the first table and read by all of them,
since they changed between versions.

Beside adapters, PEFT trains whole modules (`modules_to_save`), biases, and single rows of the
embedding table (`trainable_token_indices`). Their layers have trained copies of the variables while
the originals are kept, see `kmodels.layers.copies`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, TypeAlias

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers.base import Layer
from kmodels.layers.changes import adaptable_layers
from kmodels.layers.copies import Copies, TrainedRows, check_ids, has_original
from kmodels.layers.dense import Dense, GroupedDense
from kmodels.layers.embedding import Embedding, Table
from kmodels.layers.norm import LayerNorm, RMSNorm

WEIGHT, BIAS = "weight", "bias"
# Names of the table in transformers: as embedding, and as output layer.
TABLE, HEAD = "embed_tokens", "lm_head"
TABLES = ("embeddings", "reverse_embeddings")
# Token ids as PEFT takes them: a list, or lists by name of the table.
Ids: TypeAlias = Iterable[int] | Mapping[str, Iterable[int]]
ALL = "all-linear"
# A pattern without groups and with this many repetitions takes at most cubic time.
SIMPLE = 3
SECONDS = 10.0
_CHILD = (
    "import json, re, sys\n"
    "pattern, names = json.load(sys.stdin)\n"
    "print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))"
)


# === Names in transformers ===


def name_tables(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """Returns the tables of the model's family, none for a model without names there."""
    find = getattr(getattr(model, "backbone", model), "peft_names", None)
    return () if find is None else find(model)


def names(model: keras.Model, paths: Iterable[str]) -> dict[str, str]:
    """Returns the name in transformers by path, for each path that has one."""
    table = next(iter(name_tables(model)), {})
    by_path = {path: _name(path, table) for path in paths}
    return {path: name for path, name in by_path.items() if name is not None}


def paths(model: keras.Model, layers: Iterable[str]) -> dict[str, str]:
    """Returns the path of the layer by its name, in any of the family's spellings."""
    by_name: dict[str, str] = {}
    tables = name_tables(model)
    for path in layers:
        for name in (_name(path, table) for table in tables):
            if name is not None:
                by_name.setdefault(name, path)
    return by_name


def _name(path: str, table: Mapping[str, str]) -> str | None:
    number = re.search(r"\d+", path)
    name = table.get(path.replace(number[0], "{i}", 1) if number else path)
    return name and name.replace("{i}", number[0] if number else "")


# === Targets of adapters ===


def linear_layers(model: keras.Model) -> dict[str, Dense]:
    """Returns every linear layer of a model by its path."""
    layers = keras_internals.sublayers(model)
    return {layer.path: layer for layer in layers if isinstance(layer, Dense)}


def expert_layers(model: keras.Model) -> dict[str, GroupedDense]:
    """Returns every layer with one kernel per expert by its path."""
    layers = keras_internals.sublayers(model)
    return {layer.path: layer for layer in layers if isinstance(layer, GroupedDense)}


def choose(model: keras.Model, targets: str | Sequence[str]) -> dict[str, Dense | Table]:
    """Returns the linear layers and embedding tables that the targets mean, by path.

    Args:
        model: a built model.
        targets: "all-linear", a name ("query"), the end of a path ("mlp/up"), a regular expression
            for whole paths (r"block_[0-3]/.*"), or several of those.

    Raises:
        InputError: for a target that means no layer.
    """
    adaptable = adaptable_layers(model).items()
    layers = {path: layer for path, layer in adaptable if isinstance(layer, Dense | Table)}
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        paths = meant(layers, target)
        if not paths:
            raise InputError(
                f"LoRA target {target!r} is not a linear layer of this model; there are "
                f"{', '.join(ends(layers))}; or give {ALL!r}"
            )
        chosen |= {path for path in paths if target != ALL or layers[path].in_all_linear}
    return {path: layer for path, layer in layers.items() if path in chosen}


def choose_experts(
    model: keras.Model, targets: str | Sequence[str], names: Mapping[str, str]
) -> dict[str, GroupedDense]:
    """Returns the layers of experts that `target_parameters` means, by path.

    Targets are those of `choose` without "all-linear", or the ends of names in transformers.

    Raises:
        InputError: for a target that means no such layer.
    """
    layers = expert_layers(model)
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        paths = {path for path in layers if f".{names.get(path)}".endswith(f".{target}")}
        paths |= meant(layers, target) if target != ALL else set()
        if not paths:
            known = ", ".join(ends(layers))
            there = f"there are {known}" if known else "it has none; leave it out"
            raise InputError(
                f"target_parameters {target!r} is no kernel of experts of this model; {there}"
            )
        chosen |= paths
    return {path: layer for path, layer in layers.items() if path in chosen}


def ends(paths: Iterable[str]) -> list[str]:
    """Returns the last two parts of each path, for a message."""
    return sorted({"/".join(path.split("/")[-2:]) for path in paths})


def meant(paths: Iterable[str], target: str) -> set[str]:
    """Returns the paths that a target means, by name, end of the path, or pattern.

    Raises:
        InputError: for an invalid pattern, or one that takes too long.
    """
    paths = list(paths)
    if target == ALL:
        return set(paths)
    named = {path for path in paths if f"/{path}".endswith(f"/{target}")}
    return named | matching(target, paths)


def matching(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Returns the names that a regular expression of `re` matches as a whole.

    Raises:
        InputError: for an invalid pattern, or one that takes too long.
    """
    return _matching(pattern, tuple(names))


@lru_cache(maxsize=1024)
def _matching(pattern: str, names: tuple[str, ...]) -> frozenset[str]:
    shown = repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}...")
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as problem:
        raise InputError(f"{shown} is not a pattern: {problem}") from None
    if sum(map(pattern.count, "*+?{")) <= SIMPLE and "(" not in pattern:
        return frozenset(name for name in names if compiled.fullmatch(name))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([pattern, names]),
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the pattern {shown} takes more than {SECONDS:.0f} s to match; simplify it: "
            "a repetition inside a repetition, such as (a+)+, takes exponential time"
        ) from None
    except (OSError, subprocess.CalledProcessError) as problem:
        raise InputError(
            f"the pattern {shown} could not be matched in a child process "
            f"({type(problem).__name__}); give names instead"
        ) from None
    return frozenset(json.loads(done.stdout))


# === Whole modules ===


@dataclass(frozen=True)
class Module:
    """A layer, or one table of an embedding, that is one module in transformers.

    Args:
        attributes: its attribute for each part of the module that it has, "weight" or "bias".
    """

    layer: Any
    attributes: Mapping[str, str]

    def variable(self, part: str) -> Any:
        """Returns the variable in use for a part: the copy if there is one.

        It is None for a quantized kernel without a copy.
        """
        return getattr(self.layer, self.attributes[part])

    def shape(self, part: str) -> tuple[int, ...]:
        """Returns the shape of a part in transformers."""
        variable, layer = self.variable(part), self.layer
        shape = (layer.input_dim, layer.units) if variable is None else tuple(variable.shape)
        return shape[::-1] if self.transposed(part) else shape

    def transposed(self, part: str) -> bool:
        """Returns True if transformers stores the part transposed."""
        return self.attributes[part] == "kernel"


def modules(model: keras.Model) -> dict[str, Module]:
    """Returns every module that may be trained as a whole, by path.

    An untied output layer is "token_embedding/reverse_embeddings".
    """
    by_path: dict[str, Module] = {}
    for layer in keras_internals.sublayers(model):
        if not isinstance(layer, Layer) or not layer.built:
            continue
        if isinstance(layer, Embedding):
            if layer.is_vocabulary:
                by_path[layer.path] = Module(layer, {WEIGHT: TABLES[0]})
                if not layer.tie_weights:
                    by_path[f"{layer.path}/{TABLES[1]}"] = Module(layer, {WEIGHT: TABLES[1]})
            continue
        weight = "kernel" if isinstance(layer, Dense) else "scale"
        named = {WEIGHT: weight} if isinstance(layer, Dense | LayerNorm | RMSNorm) else {}
        named[BIAS] = "bias"
        parts = {part: name for part, name in named.items() if has_original(layer, name)}
        if parts:
            by_path[layer.path] = Module(layer, parts)
    return by_path


def chosen_modules(model: keras.Model, names: Sequence[str] | None) -> dict[str, Module]:
    """Returns the modules that `modules_to_save` names, by path.

    Names are ends of paths, such as "mlp/down" or "final_norm", or of names in transformers.

    Raises:
        InputError: for a name that means no module with weights.
    """
    if isinstance(names, str):
        raise InputError(f"modules_to_save is {names!r}; give a list of names")
    if not names:
        return {}
    known = {path: x for path, x in modules(model).items() if WEIGHT in x.attributes}
    spellings = {path: [f"/{path}"] for path in known}
    for name, path in paths(model, known).items():
        spellings[path].append("/" + name.replace(".", "/"))
    chosen: dict[str, Module] = {}
    for name in names:
        end = "/" + name.replace(".", "/")
        meant = {
            path: module
            for path, module in known.items()
            if any(spelling.endswith(end) for spelling in spellings[path])
        }
        if not meant:
            raise InputError(
                f"modules_to_save names {name!r}, no module of the model; there are "
                f"{', '.join(ends(known))}"
            )
        chosen |= meant
    return chosen


def copy_parts(parts: Iterable[tuple[Module, str]]) -> None:
    """Gives layers trained copies of these parts of modules."""
    by_layer: dict[int, tuple[Any, list[str]]] = {}
    for module, part in parts:
        names = by_layer.setdefault(id(module.layer), (module.layer, []))[1]
        names.append(module.attributes[part])
    for layer, names in by_layer.values():
        if layer.copies is None:
            Copies(layer, names)
        else:
            layer.copies.add(names)


def trained(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Returns the trained variables of modules, copies or not, by path and part."""
    by_path = {}
    for path, module in modules(model).items():
        parts = {part: module.variable(part) for part in module.attributes}
        parts = {part: v for part, v in parts.items() if v is not None}
        # A module is written whole if its weight is trained.
        if WEIGHT not in parts or not parts[WEIGHT].trainable:
            parts = {part: v for part, v in parts.items() if v.trainable}
        if parts:
            by_path[path] = parts
    return by_path


# === The embedding table ===


def tables(model: keras.Model) -> dict[str, Embedding]:
    """Returns the embeddings of the vocabulary by path."""
    return {
        layer.path: layer
        for layer in keras_internals.sublayers(model)
        if isinstance(layer, Embedding) and layer.is_vocabulary
    }


def trained_tables(model: keras.Model) -> list[Embedding]:
    """Returns the embeddings of which all rows are trained."""
    return [layer for layer in tables(model).values() if layer.embeddings.trainable]


def prepare(
    model: keras.Model, token_ids: Ids | None, modules_to_save: Sequence[str] | None
) -> Callable[[], None]:
    """Checks rows and modules to be trained, see `enable_lora`.

    Returns:
        A function that starts to train them, to be called after the model is frozen.

    Raises:
        InputError: for a model without an embedding table, or whose table has no values yet, and
            for unknown modules or tokens.
    """
    chosen = chosen_modules(model, modules_to_save)
    parts = [(module, part) for module in chosen.values() for part in module.attributes]
    if token_ids is None:
        return lambda: copy_parts(parts)
    layer = next(iter(tables(model).values()), None)
    if layer is None:
        raise InputError(
            "this model has no embedding table, which trainable_token_indices is about; leave it "
            "out"
        )
    if layer.path in chosen:
        raise InputError(
            f"modules_to_save trains all rows of {layer.name} already; leave it or "
            "trainable_token_indices out"
        )
    if not keras_internals.has_value(layer.embeddings):
        raise InputError(
            f"trained rows begin as those of {layer.path}, which plan.prepare loads only later; "
            "load a model that was saved with such rows"
        )
    ids = ids_of(token_ids, layer)

    def begin() -> None:
        layer.rows = TrainedRows(layer, ids)
        copy_parts(parts)

    return begin


def ids_of(rows: Ids, layer: Embedding) -> list[int]:
    """Returns the ids of `trainable_token_indices`, in its order.

    Raises:
        InputError: for values that are not ids of the table, ids named twice, or different ids for
            output layer and table.
    """
    try:
        if isinstance(rows, Mapping):
            by_name = {str(name): [index(i) for i in ids] for name, ids in rows.items()}
            ids = _of_one_table(by_name, layer)
        else:
            ids = [index(i) for i in rows]
    except TypeError:
        raise InputError(f"trainable_token_indices is {rows!r}; give a list of ids") from None
    check_ids(ids, layer.input_dim)
    return ids


def _of_one_table(by_name: Mapping[str, list[int]], layer: Embedding) -> list[int]:
    own = (TABLE, layer.name, HEAD) if layer.tie_weights else (TABLE, layer.name)
    ends = [name.rpartition(".")[2] for name in by_name]
    known = set(ends) <= set(own)
    if not layer.tie_weights and not known:
        raise InputError(
            f"trainable_token_indices is {dict(by_name)}; single rows of an output layer with a "
            f"table of its own are not trained: give modules_to_save=[{HEAD!r}] for all rows"
        )
    first = [ids for end, ids in zip(ends, by_name.values(), strict=True) if end != HEAD]
    if not known or len(first) != 1 or any(ids != first[0] for ids in by_name.values()):
        raise InputError(
            f"trainable_token_indices is {dict(by_name)}; {layer.name} is embedding and output "
            f"layer in one, so give a list of ids, or the same ids by {TABLE!r} and {HEAD!r}"
        )
    return first[0]
