"""Trees of tensors: lists, tuples and dictionaries, flattened and joined.

All other files of the transforms use flat lists. optree is called directly, since Keras' own
functions traverse a tree in Python on torch, several times per call.
"""

from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

import keras
import numpy as np
import optree

from kmodels.core.errors import InputError
from kmodels.core.types import Tree

# Keras' definition of a tree.
OPTIONS: Any = {"none_is_leaf": True, "namespace": "keras"}


class Join:
    """A function that joins tensors to a tree.

    Attributes:
        spec: the structure; equal for equal structures, with a hash.
        places: places of the tensors among the leaves.
        rest: the other leaves, None in the tensors' places.
    """

    def __init__(
        self, spec: optree.PyTreeSpec, places: tuple[int, ...], rest: tuple[Any, ...]
    ) -> None:
        self.spec, self.places, self.rest = spec, places, rest

    def __call__(self, tensors: Iterable[Any]) -> Any:
        """Returns the tree with these tensors, or other values, as leaves."""
        filled = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            filled[place] = tensor
        return optree.tree_unflatten(self.spec, filled)


def mapped(function: Callable[..., Any], tree: Tree, *trees: Tree) -> Any:
    """Returns a tree of the function's results for the leaves of one or several trees."""
    return optree.tree_map(function, tree, *trees, **OPTIONS)  # type: ignore[arg-type]


def _tensor(leaf: object, numbers: bool) -> Any:
    """Returns a leaf as a tensor, or None for other leaves."""
    if keras.ops.is_tensor(leaf):
        return leaf
    made = (keras.Variable, np.ndarray, np.generic)
    if isinstance(leaf, made) or (numbers and isinstance(leaf, Number)):
        return keras.ops.convert_to_tensor(leaf)
    return None


def taken(tree: Tree, numbers: bool = False) -> Any:
    """Returns the tree with arrays, variables and, if `numbers`, numbers as tensors."""
    tensors, join = apart(tree, numbers)
    return join(tensors)


def apart(tree: Tree, numbers: bool = False) -> tuple[list[Any], Join]:
    """Returns the tensors of a `taken` tree, and the function that joins others to such a tree.

    Leaves are in order, those of dictionaries by their sorted keys. Other leaves are in `Join`.
    """
    leaves, spec = optree.tree_flatten(tree, **OPTIONS)  # type: ignore[arg-type]
    tensors, places = [], []
    for place, leaf in enumerate(leaves):
        tensor = _tensor(leaf, numbers)
        if tensor is not None:
            tensors.append(tensor)
            places.append(place)
            # A Join can outlive the trace of its tensors.
            leaves[place] = None
    return tensors, Join(spec, tuple(places), tuple(leaves))


def spread(prefix: Tree, spec: optree.PyTreeSpec, name: str) -> list[Any]:
    """Returns a prefix tree's leaf for each leaf, such as one axis for a dictionary.

    Args:
        prefix: a leaf, or a tree with a leaf for each part of the tree.
        spec: structure of the tree.
        name: name of the prefix, for the message.

    Raises:
        InputError: if they do not fit.
    """
    if prefix is None or isinstance(prefix, int):
        return [prefix] * spec.num_leaves
    tree = spec.unflatten("*" * spec.num_leaves)
    try:
        return optree.broadcast_prefix(prefix, tree, **OPTIONS)  # type: ignore[arg-type]
    except ValueError:
        raise InputError(
            f"{name} is {prefix!r}, which does not fit {tree!r}; give an axis, or a tree of axes "
            "of the same form"
        ) from None


def _form(tree: Tree) -> str:
    return repr(mapped(lambda _: "*", tree))


def floats(tree: Tree, what: str) -> tuple[list[Any], Join]:
    """Same as `apart`, for a tree to differentiate by.

    Raises:
        InputError: for a leaf that is not a tensor of floats.
    """
    tensors, join = apart(tree, numbers=True)
    wrong = [x.dtype for x in tensors if "float" not in str(x.dtype)]
    wrong = [keras.backend.standardize_dtype(dtype) for dtype in wrong]
    if len(tensors) < len(join.rest):
        wrong += [type(x).__name__ for i, x in enumerate(join.rest) if i not in join.places]
    if wrong:
        raise InputError(f"{what} holds {wrong[0]}; only floats have derivatives, cast it")
    return tensors, join


def like(tree: Tree, tensors: list[Any], join: Join, what: str) -> list[Any]:
    """Returns the leaves of a tree with the structure, shapes and dtypes of the tensors of a join.

    Raises:
        InputError: if structure or shapes differ.
    """
    leaves, spec = optree.tree_flatten(tree, **OPTIONS)  # type: ignore[arg-type]
    if spec != join.spec:
        raise InputError(f"{what} have the form {_form(tree)}; give {_form(join(tensors))}")
    cast_leaves = []
    for place, tensor in zip(join.places, tensors, strict=True):
        leaf = keras.ops.convert_to_tensor(leaves[place])
        if tuple(leaf.shape) != tuple(tensor.shape):
            raise InputError(
                f"{what} hold the shape {tuple(leaf.shape)}; give {tuple(tensor.shape)}"
            )
        cast_leaves.append(keras.ops.cast(leaf, keras.backend.standardize_dtype(tensor.dtype)))
    return cast_leaves
