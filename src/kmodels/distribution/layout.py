"""The layout: along which mesh axis each dimension of each variable is sharded.

A family says once what the dimensions of its variables are (`layout` of its backbone), in the
words of `MESH_AXES`: "embed" is the width that all blocks share, "heads" the heads of attention,
"mlp" the width inside an MLP, "experts" the experts of a mixture, "vocab" the rows of an embedding
table. This module decides what follows for a mesh, for weights, LoRA's matrices and slots alike.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.distribution.mesh import Mesh
from kmodels.layers.layout_family import family_of
from kmodels.layers.shard_granularity import granularity_of

logger = logging.getLogger(__name__)

# Maps what a dimension is to the mesh axis that cuts it; a table may also name the axis itself.
MESH_AXES = {
    **{"embed": "fsdp", "heads": "model", "mlp": "model", "vocab": "model"},
    **{"experts": "model"},
    **{"fsdp": "fsdp", "model": "model"},
}
# By dimension; None for one that is never cut.
Axes = tuple[str | None, ...]

# The tables of users, for all models.
_RULES: dict[str, Axes] = {}
_FAMILIES: dict[str, dict[str, Axes]] = {}
_said: set[tuple[str, str, str]] = set()


def register(rules: Mapping[str, Axes], family: str | None = None) -> None:
    r"""Makes a table known: pattern of variable paths -> what each dimension is.

    Patterns match whole paths, as `re.fullmatch` does; of several that match, the one that was
    registered last counts. A family's table is registered when the family is imported, and serves
    its own models alone, and layers that were made outside of any. A table of yours serves every
    model whose paths it matches, and counts before those of families. Register it before the model
    is built:

        register({r".*/expert_\d+/kernel": ("embed", "mlp")})

    Args:
        rules: by pattern a word of `MESH_AXES`, or None, for each dimension.
        family: name of the folder of the family whose table it is; None for one for all models.

    Raises:
        InputError: for another word.
    """
    for pattern, words in rules.items():
        if unknown := [word for word in words if word is not None and word not in MESH_AXES]:
            raise InputError(
                f"layout rule {pattern!r} names {unknown[0]!r}; write {', '.join(MESH_AXES)} or "
                "None for each dimension"
            )
    held = _RULES if family is None else _FAMILIES.setdefault(family, {})
    former = {pattern: words for pattern, words in held.items() if pattern not in rules}
    held.clear()
    held.update({pattern: tuple(words) for pattern, words in rules.items()} | former)


def dimensions(path: str, rank: int, family: str | None = None) -> Axes | None:
    """Returns what the dimensions of a variable are, or None if no rule names it.

    Args:
        path: path of the variable.
        rank: number of its dimensions.
        family: that it belongs to; None asks the tables of all.
    """
    known = _FAMILIES.values() if family is None else [_FAMILIES.get(family, {})]
    for table in (_RULES, *known):
        for pattern, words in table.items():
            if len(words) == rank and re.fullmatch(pattern, path):
                return words
    return None


def axes(
    path: str,
    shape: Sequence[int],
    mesh: Mesh,
    granularity: Sequence[int | None] | None = None,
    family: str | None = None,
) -> Axes:
    """Returns the mesh axis of each dimension of a variable, None for one that stays whole.

    An axis that does not divide a dimension leaves it whole; a line on stderr says so once. A
    matrix or larger array of which no dimension lies along `fsdp` has its largest free dimension
    cut that can be, so that every model works there, a user's own too. Vectors that no rule names
    stay whole: they are small, and cutting them costs a message.

    Args:
        path: path of the variable.
        shape: shape of the variable.
        mesh: filled, see `mesh.fill`.
        granularity: by dimension, how many equal parts belong together, None for as many as it is
            long.
            A kernel with one key/value head of 256 outputs has (None, 1): it is never cut there.
        family: that the variable belongs to, see `dimensions`.

    Returns:
        One of "fsdp", "model" or None for each dimension; an axis of length 1 is never named.
    """
    found: list[str | None] = []
    known = dimensions(path, len(shape), family) or (None,) * len(shape)
    most = list(granularity or (None,) * len(shape))
    for dimension, size, part in zip(known, shape, most, strict=True):
        axis = MESH_AXES[dimension] if dimension else None
        length = mesh.lengths[axis] if axis else 1
        if length > 1 and not _fits(size, part, length):
            _say(f"{axis}={length}", path, size, part)
            axis = None
        found.append(axis if length > 1 else None)
    if mesh.fsdp > 1 and "fsdp" not in found and len(shape) > 1:
        free = [i for i, axis in enumerate(found) if axis is None and shape[i] % mesh.fsdp == 0]
        if free:
            found[max(free, key=lambda i: shape[i])] = "fsdp"
    return tuple(found)


def tokens_axis(shape: Sequence[int], mesh: Mesh) -> str | None:
    """Returns the mesh axis over which the second dimension of a batch lies, or None for whole.

    Arrays (rows, tokens) alone are cut, where the axis divides them; a line on stderr says once of
    a length that it does not.

    Args:
        shape: shape of an array of the batch.
        mesh: filled.
    """
    if mesh.sequence == 1 or len(shape) != 2 or shape[1] == 1:
        return None
    if shape[1] % mesh.sequence == 0:
        return "sequence"
    _say(f"sequence={mesh.sequence}", "rows of a batch", shape[1], None)
    return None


def check_tokens(model: keras.Model, mesh: Mesh) -> None:
    """Raises `InputError` for a model without token ids, whose rows `sequence` cannot cut."""
    if mesh.sequence == 1:
        return
    for one in keras.tree.flatten(getattr(model, "inputs", None) or []):
        if len(one.shape) == 2 and "int" in keras.backend.standardize_dtype(one.dtype):
            return
    raise InputError(
        f"the mesh {mesh} cuts rows by their tokens and {model.name} takes no token ids (rows, "
        "tokens); leave sequence out, and give its devices to data or fsdp"
    )


def _fits(size: int, part: int | None, length: int) -> bool:
    return size % length == 0 and (part is None or part % length == 0)


def _say(axis: str, path: str, size: int, part: int | None) -> None:
    """Tells once for all variables of a name that an axis does not cut them."""
    name = path.rpartition("/")[0].rpartition("/")[2] or path
    count = f"{size}" if part is None else f"{part} part{'s' * (part > 1)} of {size}"
    if size > 1 and (axis, name, count) not in _said:
        _said.add((axis, name, count))
        logger.warning("mesh axis %s leaves %s whole: it does not divide %s", axis, name, count)


def axes_of(variable: keras.Variable, mesh: Mesh) -> Axes:
    """`axes` of a Keras variable, one that exists or one that is being made."""
    granularity, family = granularity_of(variable), family_of(variable)
    return axes(variable.path, variable.shape, mesh, granularity, family)


def layout_map(
    device_mesh: keras.distribution.DeviceMesh, rules: Mapping[str, Axes], names: Mapping[str, str]
) -> Any:
    """Returns a `keras.distribution.LayoutMap` of a table, for use without `distribute`.

    Args:
        device_mesh: a `keras.distribution.DeviceMesh`.
        rules: a family's table.
        names: the mesh's axis for each word of the table.
    """
    made = keras.distribution.LayoutMap(device_mesh)
    for pattern, words in rules.items():
        made[pattern] = tuple(names[word] if word else None for word in words)
    return made
