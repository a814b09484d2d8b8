"""Functions that are traced as a whole: `jit`, `trace` and `remat`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from kmodels.core import traced
from kmodels.core.dispatch import paths_now
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor, Tree
from kmodels.transforms import trees
from kmodels.transforms.engine import engine, tracing

Function = Callable[..., Any]


def jit(
    fun: Function,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | tuple[str, ...] = (),
) -> Function:
    """Returns a function that is traced once, and then runs without Python.

    It is traced again for each structure, shape and dtype of its arguments, each value of a static
    one, each choice of `kmodels.generic_only`, and after adapters of a model were added, merged or
    disabled. Tensors that are not arguments of `fun` may be read only while it is traced. XLA
    compiles the trace on JAX; it is a graph on TensorFlow. On torch, `torch.compile` compiles it
    for an accelerator; on a CPU it runs with torch's kernels, since compiling takes longer than it
    saves. A `jit` inside of another becomes a part of it on torch and TensorFlow.

    Args:
        fun: takes and returns tensors or trees of them.
        static_argnums: positional arguments that Python sees by value; they have a hash. Arguments
            that are neither tensors nor numbers are static anyway.
        static_argnames: the same for keyword arguments.

    Returns:
        A function of the same arguments.

    Raises:
        InputError: when called, if a static argument has no hash, and for functions that the
            backend cannot trace: Python's `if` by a tensor's value, say.
    """
    places = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    made: dict[Any, tuple[Function, list[trees.Join]]] = {}
    seen = [traced.changes()]

    @wraps(fun)
    def staged(*args: Tree, **kwargs: Tree) -> Any:
        fixed = {place % len(args) for place in places if -len(args) <= place < len(args)}
        arguments: Any = [_Static(x) if i in fixed else x for i, x in enumerate(args)]
        named = {name: _Static(x) if name in names else x for name, x in kwargs.items()}
        leaves, join = trees.apart((arguments, named), numbers=True)
        key = _key(leaves, join)
        if seen[0] != traced.changes():
            made.clear()
        if key not in made:
            structure: list[trees.Join] = []

            def flat(*leaves: Tensor) -> list[Any]:
                args, kwargs = trees.mapped(_value, join(leaves))
                tensors, put = trees.apart(fun(*args, **kwargs), numbers=True)
                structure[:] = [put]
                return tensors

            made[key] = engine.jit(flat), structure
        run, structure = made[key]
        with tracing("jit"):
            outputs = run(*leaves)
        seen[0] = traced.changes()  # what `fun` itself changed, and took back, is in the trace
        return structure[0](list(outputs))

    return staged


class Trace:
    """The intermediate form of a function on its backend; `print` shows it.

    Attributes:
        form: a `ClosedJaxpr` on JAX, a `torch.fx.GraphModule` on torch, the graph of a
            `tf.function` on TensorFlow.
    """

    def __init__(self, form: Any) -> None:
        self.form = form

    def __str__(self) -> str:
        return engine.show(self.form)

    __repr__ = __str__


def trace(fun: Function) -> Callable[..., Trace]:
    """Returns a function that returns the intermediate form of `fun` for its arguments.

    JAX gives a jaxpr, torch an FX graph of ATen operations, TensorFlow the nodes of a graph.

    Args:
        fun: takes and returns tensors or trees of them; it may be the result of transforms.

    Returns:
        A function of the same arguments. It returns a `Trace`.

    Raises:
        InputError: when called, for functions that the backend cannot trace.

    Example:
        >>> print(trace(grad(f))(2.0))
    """

    @wraps(fun)
    def traced(*args: Tree, **kwargs: Tree) -> Trace:
        leaves, join = trees.apart((args, kwargs), numbers=True)

        def flat(*leaves: Tensor) -> list[Any]:
            args, kwargs = join(list(leaves))
            return trees.apart(fun(*args, **kwargs), numbers=True)[0]

        with tracing("trace"):
            return Trace(engine.trace(flat, leaves))

    return traced


def remat(fun: Function) -> Function:
    """Returns a function that recomputes activations in the backward pass, to save memory.

    On TensorFlow every tensor that `fun` uses must be an argument, including weights, and it has no
    forward-mode derivatives. On torch it has no effect inside other transforms.

    Args:
        fun: takes and returns tensors or trees of them.

    Returns:
        A function of the same arguments.

    Raises:
        InputError: when called, on TensorFlow for float tensors that are not arguments.
    """

    @wraps(fun)
    def again(*args: Tree, **kwargs: Tree) -> Any:
        leaves, join = trees.apart((args, kwargs))
        structure: list[trees.Join] = []

        def flat(*leaves: Tensor) -> list[Any]:
            args, kwargs = join(list(leaves))
            tensors, put = trees.apart(fun(*args, **kwargs), numbers=True)
            structure[:] = [put]
            return tensors

        with tracing("remat"):
            outputs = engine.remat(flat, leaves)
        return structure[0](list(outputs))

    return again


class _Static:
    """A static argument, which is always a leaf."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Static)
            and type(self.value) is type(other.value)
            and (self.value == other.value)
        )

    def __hash__(self) -> int:
        return hash(self.value)


def _value(leaf: object) -> Any:
    return leaf.value if isinstance(leaf, _Static) else leaf


def _key(leaves: list[Any], join: trees.Join) -> Any:
    """Returns the key of a trace: it is valid for arguments with an equal key."""
    kinds = tuple((tuple(x.shape), x.dtype) for x in leaves)
    key = paths_now(), join.spec, join.places, join.rest, kinds
    try:
        hash(key)
    except TypeError:
        named = ", ".join(type(_value(leaf)).__name__ for leaf in join.rest if leaf is not None)
        raise InputError(
            f"jit: a static argument has no hash, among {named}; give a tuple or a number"
        ) from None
    return key
