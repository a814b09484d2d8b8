"""`kmodels.override`: your own body of an op for one backend."""

import difflib
import inspect
import logging
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from kmodels import ops
from kmodels.core import dispatch
from kmodels.core.dispatch import Op, OpCall, Supports
from kmodels.core.environment import BACKENDS
from kmodels.core.errors import (
    InputError,
    check_choice,
    is_out_of_memory,
    one_line,
    same_shape,
)
from kmodels.core.files import local_path

log = logging.getLogger("kmodels")

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def override(
    op: str, *, backend: str, supports: Supports | None = None
) -> Callable[[Callable[..., Any]], "UserOverride"]:
    """Registers your own body of an op for one backend.

        @kmodels.override("attention", backend="torch")
        def my_attention(query, key, value, causal, scale):
            ...

    It comes before the override of kmodels. A call that it does not take goes to that override, or
    to the op's generic body. Layers call it wherever they call the op; `fit`, `evaluate`, `predict`
    and `generate` of kmodels' models are traced again after a registration, while other compiled
    code keeps the body that it was traced with. `generic_only`, `KMODELS_GENERIC_OPS`, transforms
    of `torch.func` and layers that are split over devices leave it out.

    The function takes the op's parameters by name, or some of them: a call that gives a parameter
    that the function does not have another value than its default is not for this function. It gets
    and returns tensors of the backend, of the op's shapes and dtypes, and must be differentiable if
    you train with it. Registering again replaces the function; `remove()` of the result undoes it.

    Args:
        op: name of an op, as in `kmodels.ops`.
        backend: "jax", "torch" or "tensorflow". On another running backend nothing is registered,
            so that one file may hold functions for several.
        supports: takes an `OpCall`, which has the op's arguments by name; returns None, or a clause
            that says why the function does not take the call.

    Returns:
        A decorator, which returns a `UserOverride`.

    Raises:
        InputError: for an unknown op or backend, parameters that the op does not have, or required
            parameters of the op that are missing.
    """
    names = ops.__all__
    if op not in names:
        near = difflib.get_close_matches(op, names, 1)
        advice = f"did you mean {near[0]}?" if near else f"ops are {', '.join(names)}"
        raise InputError(f"override got unknown op {op!r}; {advice}")
    check_choice("backend", backend, BACKENDS)

    def register(function: Callable[..., Any]) -> UserOverride:
        body = UserOverride(dispatch.ops()[op], function, supports)
        if backend == dispatch.backend():
            body.op.set_user(body)
        else:
            log.info("%s is for %s; %s runs", body, backend, dispatch.backend())
        return body

    return register


class UserOverride:
    """A function that was registered with `kmodels.override`; calling it calls the function.

    Args:
        function: takes some of the op's parameters by name.
        supports: as in `override`.

    Raises:
        InputError: for wrong parameters.
    """

    def __init__(self, op: Op[Any, Any], function: Callable[..., Any], supports: Supports | None):
        self.op, self.function, self.supports = op, function, supports
        self.name = self.__name__ = getattr(function, "__name__", type(function).__name__)
        try:
            taken = inspect.signature(function).parameters
        except (TypeError, ValueError):
            raise InputError(f"{self} has no signature; call it in a function of yours") from None
        known = inspect.signature(op.generic).parameters
        required = [name for name, p in known.items() if p.default is p.empty]
        if (
            any(p.kind not in _NAMED for p in taken.values())
            or set(taken) - set(known)
            or set(required) - set(taken)
        ):
            others = ", ".join(name for name in known if name not in required)
            raise InputError(
                f"{self} takes ({', '.join(map(str, taken.values()))}); it must take "
                f"{', '.join(required)} by name, and may take {others or 'nothing else'}"
            )
        if supports is not None and len(inspect.signature(supports).parameters) != 1:
            raise InputError(f"{self}: supports must take one parameter, the OpCall")
        self._taken = tuple(taken)
        self._defaults = {name: p.default for name, p in known.items() if name not in taken}
        # Maps shapes and dtypes of the arguments to those of the result.
        self._results: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"override {self.name} of {self.op.name}"

    def remove(self) -> None:
        """Undoes the registration, if the function was not replaced already."""
        if self.op.user is self:
            self.op.set_user(None)

    def declines(self, call: OpCall) -> str | None:
        """Returns the reason why the function does not take a call, or None."""
        for name, default in self._defaults.items():
            value = getattr(call, name)
            if value is not default and (default is None or value != default):
                return f"{self.name} has no {name}"
        reason = None if self.supports is None else self.supports(call)
        return reason if reason is None else f"{self.name}: {reason}"

    def run(self, call: OpCall) -> Any:
        """Returns the function's result.

        Raises:
            InputError: if the function fails, returns another shape or dtype than the op, or drops
                the gradient (torch).
        """
        arguments = {name: getattr(call, name) for name in self._taken}
        if dispatch.compiles():
            return self.function(**arguments)
        try:
            result = self.function(**arguments)
        except Exception as error:
            if isinstance(error, InputError) or is_out_of_memory(error):
                raise
            raise InputError(
                f"{self} failed: {type(error).__name__}: {one_line(error)}; decline such calls in "
                "supports, or correct the function"
            ) from error
        self._check(call, result)
        return result

    def _check(self, call: OpCall, result: Any) -> None:
        """Raises `InputError` for a result that the op would not return."""
        arguments = {name: _spec(getattr(call, name)) for name in type(call).__slots__}
        key = tuple(
            (tuple(x.shape), x.dtype) if isinstance(x, keras.KerasTensor) else repr(x)
            for x in arguments.values()
        )
        if key not in self._results:
            generic = keras.Operation()
            generic.call = self.op.generic
            # Shapes do not depend on dropout, which would need a seed.
            rates = dict.fromkeys({"dropout", "rate"} & arguments.keys(), 0.0)
            with dispatch.uncounted(), dispatch.generic_only():
                spec = generic.compute_output_spec(**{**arguments, **rates})
            self._results[key] = _tensors(spec)
        expected, tensors = self._results[key], _tensors(result)
        if len(tensors) != len(expected) or not all(map(_fits, tensors, expected)):
            tensors, expected = (" and ".join(map(_words, x)) for x in (tensors, expected))
            raise InputError(f"{self} returned {tensors}; the op returns {expected}")
        first = result[0] if isinstance(result, tuple) else result
        if dispatch.lost_gradient((getattr(call, name) for name in self._taken), first):
            raise InputError(
                f"{self} returned a tensor without gradient; use differentiable functions of torch "
                "or a torch.autograd.Function"
            )


def _spec(value: Any) -> Any:
    """Returns a symbolic tensor in place of a tensor, and None in place of a seed."""
    if isinstance(value, keras.random.SeedGenerator):
        return None
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))
    return value


def _tensors(result: Any) -> list[tuple[str, tuple[int | None, ...]]]:
    """Returns dtype and shape of each tensor; the dtype of anything else is its class."""
    return [
        (keras.backend.standardize_dtype(x.dtype), tuple(x.shape))
        if hasattr(x, "shape")
        else (type(x).__name__, ())
        for x in keras.tree.flatten(result)
    ]


def _fits(tensor: tuple[str, Any], expected: tuple[str, Any]) -> bool:
    """Returns True if a tensor has the expected dtype and shape; unknown sizes fit."""
    return tensor[0] == expected[0] and same_shape(tensor[1], expected[1])


def _words(tensor: tuple[str, Any]) -> str:
    return f"{tensor[0]} {tensor[1]}"


def load(file: str | Path) -> None:
    """Runs a Python file that registers overrides.

    Raises:
        InputError: if there is no such file, or it fails.
    """
    path = local_path(file)
    if not path.is_file():
        raise InputError(f"--override {path} does not exist; give a Python file")
    try:
        runpy.run_path(str(path), run_name="kmodels_override")
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} failed: {type(error).__name__}: {one_line(error)}") from error
