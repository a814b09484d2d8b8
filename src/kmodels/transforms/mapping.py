"""Vectorization: applies a function of one example to a batch."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras
import optree

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor, Tree
from kmodels.transforms import trees
from kmodels.transforms.engine import engine, tracing


def vmap(fun: Callable[..., Any], in_axes: Tree = 0, out_axes: Tree = 0) -> Callable[..., Any]:
    """Returns a function that applies `fun` to each entry along an axis, all at once.

    Random numbers that `fun` draws are the same for all entries.

    Args:
        fun: takes and returns tensors or trees of them.
        in_axes: the axis along which arguments are mapped, `None` for those that are not
            mapped; a tuple with an entry per positional argument, which may be a tree of axes.
            Keyword arguments are mapped along their first axis.
        out_axes: position of the mapped axis in results, `None` for results that do not depend on
            mapped arguments; a tree of axes fits results that are trees.

    Returns:
        A function of the same arguments.

    Raises:
        InputError: when called, for axes that do not fit or differ in size, and for functions that
            the backend cannot trace.

    Example:
        >>> vmap(grad(loss), in_axes=(None, 0, 0))(weights, images, labels)  # one per example
    """

    @wraps(fun)
    def mapped(*args: Tree, **kwargs: Tree) -> Any:
        tensors, join = trees.apart((args, kwargs))
        axes = _places(tensors, _axes(in_axes, *join.spec.children()), join)
        _check_sizes(tensors, axes)
        results = _Results(out_axes)

        def flat(*tensors: Tensor) -> Any:
            args, kwargs = join(tensors)
            return results.take(fun(*args, **kwargs))

        with tracing("vmap"):
            return results.put(engine.vmap(flat, tensors, axes, results.some_whole))

    return mapped


def _axes(in_axes: Tree, args: optree.PyTreeSpec, kwargs: optree.PyTreeSpec) -> list[Any]:
    """Returns an axis for each leaf, from the structures of the arguments."""
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != args.num_children:
            raise InputError(
                f"vmap: in_axes is {in_axes!r}, but {args.num_children} positional arguments are "
                "given"
            )
        each = zip(in_axes, args.children(), strict=True)
    else:
        each = iter([(in_axes, args)])
    axes = [axis for prefix, spec in each for axis in trees.spread(prefix, spec, "vmap: in_axes")]
    return axes + [0] * kwargs.num_leaves


class _Results:
    """Results as a list of mapped ones and a list of those without the mapped axis.

    Attributes:
        some_whole: True if there is a second list.
    """

    axes: list[Any]
    join: trees.Join

    def __init__(self, out_axes: Tree) -> None:
        self.out_axes = tuple(out_axes) if isinstance(out_axes, list) else out_axes
        leaves = optree.tree_leaves(out_axes, **trees.OPTIONS)  # type: ignore[arg-type]
        self.some_whole = None in leaves

    def take(self, output: Tree) -> Any:
        """Flattens the result of the function for one entry."""
        tensors, self.join = trees.apart(output, numbers=True)
        axes = trees.spread(self.out_axes, self.join.spec, "vmap: out_axes")
        self.axes = [axes[place] for place in self.join.places]
        if not self.some_whole:
            return tensors
        pairs = list(zip(tensors, self.axes, strict=True))
        stacked = [tensor for tensor, axis in pairs if axis is not None]
        return stacked, [tensor for tensor, axis in pairs if axis is None]

    def put(self, results: Sequence[Any]) -> Any:
        """Joins the results for all entries, and moves the mapped axes to their positions."""
        stacked, whole = map(list, results) if self.some_whole else (list(results), [])
        placed = []
        for axis in self.axes:
            if axis is None:
                placed.append(whole.pop(0))
            else:
                tensor = stacked.pop(0)
                axis = _place(tensor, axis, "out_axes")
                placed.append(keras.ops.moveaxis(tensor, 0, axis) if axis else tensor)
        return self.join(placed)


def _places(tensors: list[Any], axes: list[Any], join: trees.Join) -> list[int | None]:
    """Returns the axis of each tensor; other leaves must not be mapped."""
    for place, axis in enumerate(axes):
        if axis is not None and place not in join.places:
            raise InputError(
                f"vmap: in_axes asks for axis {axis} of {type(join.rest[place]).__name__}; give "
                "one it has, or None"
            )
    pairs = zip(tensors, join.places, strict=True)
    return [None if axes[i] is None else _place(x, axes[i], "in_axes") for x, i in pairs]


def _place(tensor: Tensor, axis: object, name: str) -> int:
    """Returns the axis counted from the front."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise InputError(f"vmap: {name} holds {axis!r}; give whole numbers or None")
    rank = len(tensor.shape)
    if not -rank <= axis < rank:
        raise InputError(
            f"vmap: {name} asks for axis {axis} of shape {tuple(tensor.shape)}; give one it has, "
            "or None"
        )
    return axis % rank


def _check_sizes(tensors: list[Any], axes: list[int | None]) -> None:
    sizes = {x.shape[i] for x, i in zip(tensors, axes, strict=True) if i is not None}
    if not sizes:
        raise InputError("vmap: in_axes maps no argument; give at least one an axis")
    if len(sizes - {None}) > 1:
        raise InputError(
            f"vmap: the mapped axes have the sizes {', '.join(map(str, sorted(sizes - {None})))}; "
            "give arguments of one size"
        )
