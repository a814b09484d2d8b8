"""Which dimension of which variable lies along which axis of a mesh.

A family says once what the dimensions of its variables are (`models/<family>/sharding.py`), in the
words of `MESH_AXES`: "embed" is the width that all blocks share, "heads" the heads of attention,
"mlp" the width inside an MLP, "vocab" the rows of an embedding table. What follows for a mesh is
decided here, for weights, LoRA's matrices and slots alike.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kmodels.distribution.mesh import Mesh

logger = logging.getLogger(__name__)

# What a dimension is -> the mesh axis that cuts it.
MESH_AXES = {"embed": "fsdp", "heads": "model", "mlp": "model", "vocab": "model"}
# By dimension; None for one that is never cut.
Axes = tuple[str | None, ...]

_RULES: dict[str, Axes] = {}
_said: set[tuple[str, int, int]] = set()


def register(rules: Mapping[str, Axes]) -> None:
    """Makes a family's table known: pattern of variable paths -> what each dimension is.

    Patterns match whole paths, as `re.fullmatch` does. A table is registered when its family is
    imported, and serves every model whose paths it matches.
    """
    _RULES.update(rules)


def dimensions(path: str, rank: int) -> Axes | None:
    """What the dimensions of a variable are, or None where no rule names it."""
    for pattern, axes in _RULES.items():
        if len(axes) == rank and re.fullmatch(pattern, path):
            return axes
    return None


def axes(
    path: str, shape: Sequence[int], mesh: Mesh, parts: Sequence[int | None] | None = None
) -> Axes:
    """The mesh axis along which each dimension of a variable lies, None for one that stays whole.

    An axis that does not divide a dimension leaves it whole; a line on stderr says so once. On
    `fsdp`, a matrix or larger array of which no dimension lies along that axis has its largest
    free dimension cut that can be: so every model works there, a user's own too. Vectors that no
    rule names stay whole: they are small, and cutting them costs a message.

    Args:
        path: of the variable.
        shape: of the variable.
        mesh: filled, see `mesh.fill`.
        parts: by dimension, how many equal parts belong together, None for as many as it is long.
            A kernel with one key/value head of 256 outputs has (None, 1): it is never cut there.

    Returns:
        By dimension one of "fsdp", "model" or None; an axis of length 1 is never named.
    """
    raise NotImplementedError


def axes_of(variable: Any, mesh: Mesh) -> Axes:
    """`axes` of a Keras variable, one that exists or one that is being made."""
    raise NotImplementedError
