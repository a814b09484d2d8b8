"""What is trained beside adapters: rows of the embedding table, and modules as a whole."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import TypeAlias

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers import Embedding
from kmodels.layers.rows import TrainedRows, shown
from kmodels.lora import peft, saved_modules
from kmodels.lora.saved_modules import HEAD, TABLE

# The tokens as PEFT takes them: ids, or ids by name of the table.
Ids: TypeAlias = Iterable[int] | Mapping[str, Iterable[int]]


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
    """Returns what is to be done to the model once it is frozen; see `enable_lora`.

    Raises:
        InputError: for a model without a table, or without its values yet, unknown names, or tokens
            that it does not have.
    """
    saved = modules_named(model, modules_to_save)
    if token_ids is None:
        return lambda: saved_modules.train(saved.values())
    layer = next(iter(tables(model).values()), None)
    if layer is None:
        raise InputError(
            "this model has no embedding table, which trainable_token_indices is about; leave it "
            "out"
        )
    if layer.path in saved:
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
        put(layer, ids)
        saved_modules.train(saved.values())

    return begin


def modules_named(
    model: keras.Model, names: Sequence[str] | None
) -> dict[str, saved_modules.Module]:
    """Returns the modules that `modules_to_save` names, by path.

    Args:
        model: where to look.
        names: ends of paths here, such as "mlp/down" or "final_norm", or of names in transformers.

    Raises:
        InputError: for a name that means no module with weights.
    """
    if isinstance(names, str):
        raise InputError(f"modules_to_save is {names!r}; give a list of names")
    held = saved_modules.modules(model) if names else {}
    known = {path: x for path, x in held.items() if saved_modules.WEIGHT in x.attributes}
    ends = {path: [path] for path in known}
    for name, path in peft.paths(model, known).items():
        ends[path].append(name.replace(".", "/"))
    found: dict[str, saved_modules.Module] = {}
    for name in names or ():
        end = "/" + name.replace(".", "/")
        meant = [path for path in known if any(f"/{x}".endswith(end) for x in ends[path])]
        if not meant:
            there = sorted({"/".join(path.split("/")[-2:]) for path in known})
            raise InputError(
                f"modules_to_save names {name!r}, no module of the backbone; there are "
                f" {', '.join(there)}; a task's head is trained anyway"
            )
        found |= {path: known[path] for path in meant}
    return found


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
    if not layer.tie_weights and not known:
        raise InputError(
            f"trainable_token_indices is {dict(by_name)}; single rows of an output layer with a "
            f"table of its own are not trained: give modules_to_save=[{HEAD!r}] for all rows"
        )
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
