"""Trees of tensors: lists, tuples and dictionaries, taken apart and put together.

The one place that knows how. The rest of the transforms, and each backend's part, sees flat lists.
"""

from collections.abc import Callable
from numbers import Number
from typing import Any

import keras
import numpy as np

from kmodels.errors import InputError

Join = Callable[[list[Any]], Any]


def taken(tree: Any, numbers: bool = False) -> Any:
    """The tree with its NumPy arrays and variables, and Python's numbers if told so, as tensors."""

    def take(leaf: Any) -> Any:
        plain = isinstance(leaf, Number) and not isinstance(leaf, np.generic)
        if isinstance(leaf, (np.ndarray, np.generic, keras.Variable)) or (numbers and plain):
            return keras.ops.convert_to_tensor(leaf)
        return leaf

    return keras.tree.map_structure(take, tree)


def apart(tree: Any) -> tuple[list[Any], Join]:
    """The tensors of a tree, in order, and what puts others in their places.

    Leaves that are no tensors stay in the tree that `Join` makes.
    """
    leaves = keras.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if keras.ops.is_tensor(leaf)]
    tensors = [leaves[place] for place in places]
    # Without the tensors, for a tree can outlive what traced them.
    rest = [None if keras.ops.is_tensor(leaf) else leaf for leaf in leaves]
    skeleton = keras.tree.map_structure(lambda _: 0, tree)

    def join(tensors: list[Any]) -> Any:
        filled = list(rest)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return keras.tree.pack_sequence_as(skeleton, filled)

    return tensors, join


def spread(prefix: Any, tree: Any, name: str) -> list[Any]:
    """A prefix tree's leaf for each leaf of a tree, such as one axis for a whole dictionary.

    Args:
        prefix: a leaf, or a tree whose leaves stand for parts of `tree`.
        tree: what it is spread over.
        name: of the prefix, for the message.

    Raises:
        InputError: if they do not fit.
    """
    # In a box, for to some of Keras' functions None is no leaf.
    boxes = keras.tree.map_structure(lambda leaf: lambda: leaf, prefix)

    def below(box: Any, part: Any) -> Any:
        return keras.tree.map_structure(lambda _: box, part)

    try:
        spread = keras.tree.map_structure_up_to(boxes, below, boxes, tree)
        return [box() for box in keras.tree.flatten(spread)]
    except (TypeError, ValueError):
        skeleton = keras.tree.map_structure(lambda _: "*", tree)
        raise InputError(
            f"{name} is {prefix!r}, which does not fit {skeleton!r}; give an axis, or a tree of "
            "axes of the same form"
        ) from None


def floats(tree: Any, what: str) -> tuple[list[Any], Join]:
    """`apart`, of a tree by which is differentiated.

    Raises:
        InputError: for a leaf that is no tensor of floats.
    """
    tree = taken(tree, numbers=True)
    for leaf in keras.tree.flatten(tree):
        dtype = keras.backend.standardize_dtype(leaf.dtype) if keras.ops.is_tensor(leaf) else None
        if dtype is None or "float" not in dtype:
            given = dtype or type(leaf).__name__
            raise InputError(f"{what} holds {given}; only floats have derivatives, cast it")
    return apart(tree)


def like(tree: Any, tensors: list[Any], join: Join, what: str) -> list[Any]:
    """The leaves of a tree that has the structure, shapes and dtypes of other tensors.

    Args:
        tree: as given.
        tensors: what its leaves are to be like.
        join: makes of `tensors` the tree that is expected.
        what: it is, for the message.

    Raises:
        InputError: if structure or shapes differ.
    """
    expected = join(tensors)
    given = keras.tree.map_structure(lambda _: "*", tree)
    wanted = keras.tree.map_structure(lambda _: "*", expected)
    if given != wanted:
        raise InputError(f"{what} have the form {given!r}; give {wanted!r}")
    found = []
    for leaf, tensor in zip(keras.tree.flatten(tree), keras.tree.flatten(expected), strict=True):
        if not keras.ops.is_tensor(tensor):
            continue
        leaf = keras.ops.convert_to_tensor(leaf)
        if tuple(leaf.shape) != tuple(tensor.shape):
            raise InputError(
                f"{what} hold the shape {tuple(leaf.shape)}; give {tuple(tensor.shape)}"
            )
        found.append(keras.ops.cast(leaf, keras.backend.standardize_dtype(tensor.dtype)))
    return found
