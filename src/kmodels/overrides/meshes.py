"""Facts about `keras.distribution` that overrides depend on."""

import math
from typing import Any, NamedTuple

import keras

from kmodels.core.types import Tensor


class Places(NamedTuple):
    """The mesh axes along which activations are sharded; `None` if not sharded."""

    rows: tuple[str, ...]
    heads: str | None
    tokens: str | None = None


def layers_are_cut() -> bool:
    """Returns True if a layer's arithmetic may be sharded by heads or vocabulary.

    It may under ModelParallel, except on a mesh of kmodels that shards only rows and weights, whose
    layers gather a weight before its use.
    """
    distribution = keras.distribution.distribution()
    return isinstance(distribution, keras.distribution.ModelParallel) and getattr(
        distribution, "cuts_layers", True
    )


def places() -> Places | None:
    """Returns the mesh axes of rows, heads and tokens under the current distribution.

    Returns:
        No axes without a distribution; `None` if they are unknown, under a user's own layout.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return Places((), None)
    axes = distribution.device_mesh.axis_names
    if isinstance(distribution, keras.distribution.DataParallel):
        return Places(tuple(axes[:1]), None)
    if hasattr(distribution, "cuts_layers"):  # a mesh of kmodels
        rows = tuple(axis for axis in axes if axis not in ("sequence", "model"))
        tokens = "sequence" if "sequence" in axes else None
        return Places(rows, "model" if distribution.cuts_layers else None, tokens)
    return None


def tokens() -> str | None:
    """Returns the mesh axis along which the tokens of a row are sharded, or None."""
    axes = places()
    return None if axes is None else axes.tokens


def merged(x: Tensor) -> Any:
    """(B, T, ...) -> (B * T, ...), in an order that leaves each device its own rows and tokens.

    If tokens are sharded, the order is that of devices: the tokens of one device stay adjacent.
    """
    whole = tuple(keras.ops.shape(x))
    rest = whole[2:]
    if (split := _split(*whole[:2])) is not None:
        x = keras.ops.swapaxes(keras.ops.reshape(x, (*split, *rest)), 1, 2)
    return keras.ops.reshape(x, (-1, *rest))


def unmerged(x: Tensor, batch: Any, tokens: Any) -> Any:
    """(B * T,) -> (B, T), the inverse of `merged`."""
    if (split := _split(batch, tokens)) is not None:
        rows, per_row, parts_of_tokens, per_part = split
        x = keras.ops.reshape(x, (rows, parts_of_tokens, per_row, per_part))
        x = keras.ops.swapaxes(x, 1, 2)
    return keras.ops.reshape(x, (batch, tokens))


def _split(batch: Any, length: Any) -> tuple[int, int, int, int] | None:
    """Returns (devices of rows, rows of each, devices of tokens, tokens of each).

    None if tokens are not sharded, or not evenly.
    """
    axes = places()
    if axes is None or axes.tokens is None:
        return None
    rows, tokens = parts(axes.rows), parts((axes.tokens,))
    if batch % rows or length % tokens:
        return None
    return rows, batch // rows, tokens, length // tokens


def parts(axes: tuple[str, ...]) -> int:
    """Returns the product of the lengths of these axes of the current mesh."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return 1
    lengths = dict(
        zip(distribution.device_mesh.axis_names, distribution.device_mesh.shape, strict=True)
    )
    return math.prod(lengths[axis] for axis in axes)
