"""The layout: along which mesh axis each dimension of each variable is sharded.

A family names the dimensions of its variables (`layout` of its backbone) in the words of
`MESH_AXES`: "embed" is the width of all blocks, "heads" the heads of attention, "mlp" the width
inside an MLP, "experts" the experts of a mixture, "vocab" the rows of an embedding table. This
module derives the sharding on a mesh, for weights, LoRA matrices and optimizer slots.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.distribution.mesh import Mesh
from kmodels.layers.placement import family_of, granularity_of

logger = logging.getLogger(__name__)

# The mesh axis that shards each kind of dimension; a table may also name the axis itself.
MESH_AXES = {
    **{"embed": "fsdp", "heads": "model", "mlp": "model", "vocab": "model"},
    **{"experts": "model"},
    **{"fsdp": "fsdp", "model": "model"},
}
# By dimension; None for one that is never sharded.
Axes = tuple[str | None, ...]

# Tables that users registered, for all models.
_RULES: dict[str, Axes] = {}
_FAMILIES: dict[str, dict[str, Axes]] = {}
_said: set[tuple[str, str, str]] = set()


def register(rules: Mapping[str, Axes], family: str | None = None) -> None:
    r"""Registers a table: pattern of variable paths -> kind of each dimension.

    Patterns match whole paths, like `re.fullmatch`; the last registered one that matches counts. A
    family's table is registered when the family is imported, and applies to its own models, and to
    layers outside of any model. Your own table applies to every model whose paths it matches, and
    takes precedence. Register it before the model is built:

        register({r".*/expert_\d+/kernel": ("embed", "mlp")})

    Args:
        rules: for each pattern, a word of `MESH_AXES` or None for each dimension.
        family: folder name of the family; None for a table for all models.

    Raises:
        InputError: for another word.
    """
    for pattern, words in rules.items():
        if unknown := [word for word in words if word is not None and word not in MESH_AXES]:
            raise InputError(
                f"layout rule {pattern!r} names {unknown[0]!r}; write {', '.join(MESH_AXES)} or "
                "None for each dimension"
            )
    table = _RULES if family is None else _FAMILIES.setdefault(family, {})
    former = {pattern: words for pattern, words in table.items() if pattern not in rules}
    table.clear()
    table.update({pattern: tuple(words) for pattern, words in rules.items()} | former)


def dimensions(path: str, rank: int, family: str | None = None) -> Axes | None:
    """Returns the kinds of the dimensions of a variable, or None if no rule matches.

    Without a family, the tables of all families are searched.
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
    """Returns the mesh axis of each dimension of a variable, None for one that is not sharded.

    A dimension that its axis does not divide is not sharded, as a line on stderr says once. If no
    dimension of a matrix or larger array lies along `fsdp`, its largest free dimension that can be
    is sharded, so that `fsdp` works for every model. Vectors without a rule are not sharded: they
    are small, and gathering them costs a message. An axis of length 1 is never named.

    Args:
        path: path of the variable.
        shape: shape of the variable.
        mesh: filled, see `mesh.fill`.
        granularity: for each dimension the number of equal parts that cannot be split, None for its
            length. A kernel with one key/value head of 256 outputs has (None, 1): its outputs are
            never sharded.
        family: family of the variable, see `dimensions`.
    """
    result: list[str | None] = []
    known = dimensions(path, len(shape), family) or (None,) * len(shape)
    most = list(granularity or (None,) * len(shape))
    for dimension, size, part in zip(known, shape, most, strict=True):
        axis = MESH_AXES[dimension] if dimension else None
        length = mesh.lengths[axis] if axis else 1
        if length > 1 and not _fits(size, part, length):
            _say(f"{axis}={length}", path, size, part)
            axis = None
        result.append(axis if length > 1 else None)
    if mesh.fsdp > 1 and "fsdp" not in result and len(shape) > 1:
        free = [i for i, axis in enumerate(result) if axis is None and shape[i] % mesh.fsdp == 0]
        if free:
            result[max(free, key=lambda i: shape[i])] = "fsdp"
    return tuple(result)


def tokens_axis(shape: Sequence[int], mesh: Mesh) -> str | None:
    """Returns the mesh axis that shards the second dimension of an array of a batch, or None.

    Only arrays (rows, tokens) that the axis divides are sharded; for another length, a line on
    stderr says so once.
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
    """Logs once for all variables of a name that an axis does not shard them."""
    name = path.rpartition("/")[0].rpartition("/")[2] or path
    count = f"{size}" if part is None else f"{part} part{'s' * (part > 1)} of {size}"
    if size > 1 and (axis, name, count) not in _said:
        _said.add((axis, name, count))
        logger.warning("mesh axis %s leaves %s whole: it does not divide %s", axis, name, count)


def axes_of(variable: keras.Variable, mesh: Mesh) -> Axes:
    """Returns `axes` of a Keras variable, which may have no value yet."""
    granularity, family = granularity_of(variable), family_of(variable)
    return axes(variable.path, variable.shape, mesh, granularity, family)


def layout_map(
    device_mesh: keras.distribution.DeviceMesh, rules: Mapping[str, Axes], names: Mapping[str, str]
) -> Any:
    """Returns a family's table as a `keras.distribution.LayoutMap`, for use without `distribute`.

    `names` has the mesh's axis for each word of the table.
    """
    layouts = keras.distribution.LayoutMap(device_mesh)
    for pattern, words in rules.items():
        layouts[pattern] = tuple(names[word] if word else None for word in words)
    return layouts
