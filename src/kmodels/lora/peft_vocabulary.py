"""The embedding table in PEFT's files: some of its rows, or all of it.

Transformers and PEFT see two modules, the table and the head, that share their weights; here they
are one. A file has to say the same of both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.lora import peft
from kmodels.lora.enable import values
from kmodels.lora.saved_modules import HEAD, TABLE
from kmodels.lora.targets import is_lookup
from kmodels.lora.vocabulary import choose, ids_of, tables
from kmodels.lora.vocabulary import rows as rows_of
from kmodels.weights import LazyArray

ROWS = "token_adapter.trainable_tokens_delta"
# A frozen table stands by the first name where rows of it are trained, by the second where it has
# an adapter, else by the third.
BASE, ADAPTED, WEIGHT = "token_adapter.base_layer.weight", "base_layer.weight", "weight"
# If all of the table is trained, PEFT may write it twice, and the table as it was.
COPY, BEFORE = "modules_to_save.weight", "original_module.weight"
PARTS = (ROWS, BASE, ADAPTED, COPY, BEFORE, WEIGHT)


def lazy(variable: keras.Variable, transposed: bool = False) -> LazyArray:
    """Returns a variable as PEFT writes it, in float32, read when it is written."""
    shape = tuple(variable.shape)
    array = LazyArray(shape, np.dtype("float32"), lambda: np.asarray(values(variable), "float32"))
    return array.map(shape[::-1], np.transpose) if transposed else array


def described(
    model: keras.Model, save_embedding_layers: bool | str
) -> tuple[dict[str, LazyArray], dict[str, Any]]:
    """Tensors by name, and entries of adapter_config.json, that describe the table.

    Args:
        model: with adapters.
        save_embedding_layers: True, False or "auto", see `save_adapter`.

    Raises:
        InputError: for another setting, or a table that has no name in transformers.
    """
    if save_embedding_layers not in (True, False, "auto"):
        raise InputError(
            f"save_embedding_layers is {save_embedding_layers!r}; give True, False or 'auto'"
        )
    entries: dict[str, Any] = {}
    held = tables(model)
    names = peft.names(model, held)
    tensors = {}
    for path, layer in held.items():
        rows, whole = layer.rows, layer.embeddings.trainable
        wanted = layer.resized if save_embedding_layers == "auto" else save_embedding_layers
        if not (rows or whole or wanted):
            continue
        if (name := names.get(path)) is None:
            raise InputError(
                f"transformers has no name for {path}, so that PEFT would load nothing there; use "
                "save_to_preset"
            )
        if rows is not None:
            tensors[f"{name}.{ROWS}"] = lazy(rows.values)
            entries["trainable_token_indices"] = list(rows.ids)
        if whole:
            entries["modules_to_save"] = [name]
            tensors[f"{name}.{WEIGHT}"] = lazy(layer.embeddings)
            if layer.tie_weights and getattr(model, "backbone", model) is not model:
                tensors[f"{HEAD}.{WEIGHT}"] = lazy(layer.embeddings)
                entries["ensure_weight_tying"] = True
        elif wanted:
            adapted = any(is_lookup(table) and table.adapter for table in layer.tables)
            end = BASE if rows is not None else ADAPTED if adapted else WEIGHT
            tensors[f"{name}.{end}"] = lazy(layer.embeddings)
        for table in layer.tables:
            if wanted and table.is_output and not table.kernel.trainable:
                end = WEIGHT if table.adapter is None else ADAPTED
                tensors[f"{HEAD}.{end}"] = lazy(table.kernel)
    return tensors, entries


@dataclass(frozen=True)
class PeftVocabulary:
    """The rows of the embedding table that a file holds.

    Args:
        names: names of the tensors that are about it.
        put: does to the model what they say, once it is frozen.
    """

    names: frozenset[str] = frozenset()
    put: Callable[[], None] = lambda: None


def read(
    model: keras.Model, arrays: Mapping[str, np.ndarray], described: peft.Described
) -> tuple[PeftVocabulary, Sequence[str]]:
    """Returns what a file says of the table, and what is wrong with that.

    Args:
        model: to be changed by `PeftVocabulary.put`.
        arrays: arrays of the file, by name.
        described: its settings.
    """
    held = tables(model)
    by_name = peft.paths(model, held)
    found: dict[str, dict[str, np.ndarray]] = {part: {} for part in PARTS}
    used = set()
    for name, array in arrays.items():
        module, part = _split(name.removeprefix(peft.PREFIX))
        if part is not None and module in by_name:
            found[part][module] = array
            used.add(name)
    layer: Any = next(iter(held.values()), None)
    named = described.tables
    if layer is not None and not layer.tie_weights:  # the head is a module like any other
        named = [name for name in named if name.rpartition(".")[2] != HEAD]
    if not used and described.token_ids is None and not named:
        return PeftVocabulary(), []
    about = frozenset(used)
    if layer is None:
        return PeftVocabulary(about), ["it trains an embedding table, and this model has none"]
    weights = {**found[WEIGHT], **found[BASE], **found[ADAPTED], **found[COPY]}
    rows, table = (next(iter(x.values()), np.zeros(0)) for x in (found[ROWS], weights))
    size = (layer.input_dim, layer.output_dim)
    if weights and table.shape != size:
        return PeftVocabulary(about), [
            f"the embedding table is {table.shape}, the model's {size}: call "
            f"resize_token_embeddings({table.shape[0]}) first"
        ]
    try:
        begin = choose(model, described.token_ids, [layer.path] if named else None)
        ids = ids_of(described.token_ids, layer) if described.token_ids else []
    except InputError as problem:
        return PeftVocabulary(about), [str(problem)]
    problems = [
        *_lacking(found[ROWS], weights, described.token_ids, named),
        *_two("rows", found[ROWS]),
        *_two("a table", weights),
        *(_apart(weights, described) if layer.tie_weights else ()),
    ]
    if ids and found[ROWS] and rows.shape != (len(ids), size[1]):
        problems.append(f"the trained rows are {rows.shape}, the model needs {(len(ids), size[1])}")

    def put() -> None:
        if named:  # the copies take what was trained, and the table stays
            begin()
        if weights:
            layer.embeddings.assign(np.asarray(table, "float32"))
        if not named:
            begin()
        for trained in rows_of(layer).values():
            trained.values.assign(np.asarray(rows, "float32")[np.argsort(ids)])

    return PeftVocabulary(about, put), problems


def _split(name: str) -> tuple[str, str | None]:
    for part in PARTS:
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return name, None


def _lacking(
    rows: Mapping[str, Any], weights: Mapping[str, Any], token_ids: Any, named: Sequence[str]
) -> list[str]:
    problems = []
    if bool(rows) != (token_ids is not None):
        sides = "rows of tokens", "trainable_token_indices"
        problems.append("it has {} and no {}".format(*(sides if rows else sides[::-1])))
    if named and not weights:
        problems.append(f"modules_to_save names {', '.join(named)}, which it does not hold")
    return problems


def _two(what: str, held: Mapping[str, np.ndarray]) -> list[str]:
    arrays = list(held.values())
    if all(np.array_equal(arrays[0], other) for other in arrays[1:]):
        return []
    return [f"{' and '.join(held)} have {what} each, and here they are one"]


def _apart(weights: Mapping[str, np.ndarray], described: peft.Described) -> list[str]:
    """PEFT without `ensure_weight_tying` trains a copy of what it is told, and not the other."""
    if not described.tables or described.tied or len(weights) > 1:
        return []
    # A file of a model without a head has nothing else to be trained.
    if list(weights) == [TABLE]:
        return []
    return [
        f"modules_to_save={list(described.tables)} without ensure_weight_tying left the other of "
        f"table and {HEAD} as it was, and here they are one"
    ]
