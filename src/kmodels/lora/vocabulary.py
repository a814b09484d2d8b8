"""The embedding table beside adapters: some of its rows are trained, or all of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import TypeAlias

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers import Embedding
from kmodels.layers.rows import TrainedRows, shown

# The tokens as PEFT takes them: ids, or ids by name of the table.
Ids: TypeAlias = Iterable[int] | Mapping[str, Iterable[int]]
# Names of the table in transformers: as embedding and, being the same weights, as output layer.
TABLE, HEAD = "embed_tokens", "lm_head"


def tables(model: keras.Model) -> dict[str, Embedding]:
    """Returns every embedding table of a model by its path, without those beside a vocabulary."""
    return {
        layer.path: layer
        for layer in keras_internals.sublayers(model)
        if isinstance(layer, Embedding) and layer.is_vocabulary
    }


def rows(model: keras.Model, merged: bool = False) -> dict[str, TrainedRows]:
    """Returns trained rows by path of their table; with `merged` those that were merged."""
    name = "merged_rows" if merged else "rows"
    found = {path: getattr(layer, name) for path, layer in tables(model).items()}
    return {path: held for path, held in found.items() if held is not None}


def trained_whole(model: keras.Model) -> list[Embedding]:
    """Returns the tables of which all rows are trained."""
    return [layer for layer in tables(model).values() if layer.embeddings.trainable]


def choose(
    model: keras.Model, token_ids: Ids | None, modules_to_save: Sequence[str] | None
) -> Callable[[], None]:
    """Returns what is to be done to the table once the model is frozen; see `enable_lora`.

    Raises:
        InputError: for a model without a table, or without its values yet, unknown names, or tokens
            that it does not have.
    """
    if token_ids is None and not modules_to_save:
        return lambda: None
    layer = next(iter(tables(model).values()), None)
    if layer is None:
        raise InputError(
            "this model has no embedding table, which trainable_token_indices and modules_to_save "
            "are about; leave them out, a task's head is trained anyway"
        )
    if isinstance(modules_to_save, str):
        raise InputError(f"modules_to_save is {modules_to_save!r}; give a list of names")
    for name in modules_to_save or ():
        if not names_table(name, layer):
            raise InputError(
                f"modules_to_save names {name!r}; it takes the embedding table, {layer.name!r}, "
                "and a task's head is trained anyway"
            )
    if token_ids is None:
        return lambda: _train(layer)
    if modules_to_save:
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
    return lambda: put(layer, ids)


def _train(layer: Embedding) -> None:
    layer.embeddings.trainable = True


def put(layer: Embedding, ids: Iterable[int]) -> None:
    """Has rows of a table trained."""
    layer.rows = TrainedRows(layer, ids)


def names_table(name: str, layer: Embedding) -> bool:
    """Returns whether a module's name, with or without its path, means the table or head.

    A head with a table of its own is none of it.
    """
    known = (TABLE, layer.name, HEAD) if layer.tie_weights else (TABLE, layer.name)
    return name.rpartition(".")[2] in known


def ids_of(given: Ids, layer: Embedding) -> list[int]:
    """Returns the ids in a setting of PEFT's form, in its order.

    Raises:
        InputError: for what are no ids of the table, ids named twice, or other ids for the output
            layer than for the table.
    """
    try:
        if isinstance(given, Mapping):
            by_name = {str(name): [index(i) for i in held] for name, held in given.items()}
            ids = _of_one_table(by_name, layer)
        else:
            ids = [index(i) for i in given]
    except TypeError:
        raise InputError(f"trainable_token_indices is {given!r}; give a list of ids") from None
    wrong = [i for i in ids if not 0 <= i < layer.input_dim]
    if not ids or wrong or len(set(ids)) < len(ids):
        what = f"names {shown(wrong)}" if wrong else "names a token twice" if ids else "is empty"
        raise InputError(
            f"trainable_token_indices {what}; give ids from 0 to {layer.input_dim - 1}, each once"
        )
    return ids


def _of_one_table(by_name: Mapping[str, list[int]], layer: Embedding) -> list[int]:
    first = [ids for name, ids in by_name.items() if name.rpartition(".")[2] != HEAD]
    known = all(names_table(name, layer) for name in by_name)
    if not known or len(first) != 1 or any(ids != first[0] for ids in by_name.values()):
        raise InputError(
            f"trainable_token_indices is {dict(by_name)}; {layer.name} is embedding and output "
            f"layer in one, so give a list of ids, or the same ids by {TABLE!r} and {HEAD!r}"
        )
    return first[0]


def describe(model: keras.Model) -> dict[str, list[int]]:
    """Returns the ids of trained rows by path of their table; empty without."""
    return {path: list(held.ids) for path, held in rows(model).items()}


def restore(model: keras.Model, description: Mapping[str, Iterable[int]]) -> None:
    """Gives a new model the rows of `describe`, to be filled from a file."""
    for path, layer in tables(model).items():
        if path in description:
            put(layer, ids_of(description[path], layer))
