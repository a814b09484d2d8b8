"""Vectorisation: a function of one example becomes one of a batch."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import keras

from kmodels.errors import InputError
from kmodels.transforms import trees
from kmodels.transforms.tracing import engine, tracing


def vmap(fun: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """A function that applies `fun` to each entry along an axis, all at once.

    Random numbers that `fun` draws are the same for all entries.

    Args:
        fun: takes and returns tensors or trees of them.
        in_axes: the axis along which arguments are mapped, `None` for those that every entry sees
            whole; a tuple with an entry per positional argument, which may be a tree of axes.
            Keyword arguments are mapped along their first axis.
        out_axes: where the mapped axis stands in results, `None` for results that do not depend on
            what is mapped; a tree of axes fits results that are trees.

    Returns:
        A function of the same arguments.

    Raises:
        InputError: when called, for axes that do not fit or differ in size, and for what the
            backend cannot trace.

    Example:
        >>> vmap(grad(loss), in_axes=(None, 0, 0))(weights, images, labels)  # one per example
    """

    @wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = trees.flat((args, kwargs))
        axes = _axes(in_axes, *spec.children())
        axes = [_place(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
        _check_sizes(leaves, axes)
        axes = [axis for leaf, axis in zip(leaves, axes, strict=True) if _is_tensor(leaf)]
        (tensors, join), results = trees.tensors_of(leaves, spec), _Results(out_axes)

        def flat(*tensors: Any) -> tuple[list[Any], list[Any]]:
            args, kwargs = join(tensors)
            return results.take(fun(*args, **kwargs))

        with tracing("vmap"):
            stacked, whole = engine.vmap(flat, tensors, axes)
            return results.put(list(stacked), list(whole))

    return mapped


def _axes(in_axes: Any, args: Any, kwargs: Any) -> list[Any]:
    """An axis for each leaf, from the structures of the arguments."""
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != args.num_children:
            raise InputError(
                f"vmap: in_axes is {in_axes!r}, but {args.num_children} positional arguments are "
                "given"
            )
        each = zip(in_axes, args.children(), strict=True)
    else:
        each = iter([(in_axes, args)])
    found = [axis for prefix, spec in each for axis in trees.spread(prefix, spec, "vmap: in_axes")]
    return found + [0] * kwargs.num_leaves


class _Results:
    """Results as two lists, of the mapped and of those that are no matter of the mapped axis."""

    axes: list[Any]
    join: trees.Join

    def __init__(self, out_axes: Any) -> None:
        self.out_axes = tuple(out_axes) if isinstance(out_axes, list) else out_axes

    def take(self, output: Any) -> tuple[list[Any], list[Any]]:
        """Takes what the function returned for one entry apart."""
        leaves, spec = trees.flat(output, numbers=True)
        axes = trees.spread(self.out_axes, spec, "vmap: out_axes")
        self.axes = [axis for leaf, axis in zip(leaves, axes, strict=True) if _is_tensor(leaf)]
        tensors, self.join = trees.tensors_of(leaves, spec)
        pairs = list(zip(tensors, self.axes, strict=True))
        stacked = [tensor for tensor, axis in pairs if axis is not None]
        return stacked, [tensor for tensor, axis in pairs if axis is None]

    def put(self, stacked: list[Any], whole: list[Any]) -> Any:
        """Puts the results for all entries together, the new axes where they belong."""
        found = []
        for axis in self.axes:
            if axis is None:
                found.append(whole.pop(0))
            else:
                tensor = stacked.pop(0)
                _place(tensor, axis, "out_axes")
                found.append(keras.ops.moveaxis(tensor, 0, axis) if axis else tensor)
        return self.join(found)


def _place(leaf: Any, axis: Any, name: str = "in_axes") -> int | None:
    """The axis counted from the front."""
    if axis is None:
        return None
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise InputError(f"vmap: {name} holds {axis!r}; give whole numbers or None")
    shape = tuple(leaf.shape) if _is_tensor(leaf) else ()
    if not -len(shape) <= axis < len(shape):
        given = f"shape {shape}" if _is_tensor(leaf) else type(leaf).__name__
        raise InputError(f"vmap: {name} asks for axis {axis} of {given}; give one it has, or None")
    return axis % len(shape)


def _check_sizes(leaves: list[Any], axes: list[Any]) -> None:
    mapped = [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    if not mapped:
        raise InputError("vmap: in_axes maps no argument; give at least one an axis")
    sizes = {leaf.shape[axis] for leaf, axis in mapped} - {None}
    if len(sizes) > 1:
        raise InputError(
            f"vmap: the mapped axes have the sizes {', '.join(map(str, sorted(sizes)))}; "
            "give arguments of one size"
        )


def _is_tensor(leaf: Any) -> bool:
    return keras.ops.is_tensor(leaf)
