"""The dispatcher: an op finds the faster body that the running backend has for it.

An op is a function in `ops/`, written with `keras.ops`, right on every backend. An override is a
function `<op>_<backend>` with the same signature in a file `overrides/*_<backend>.py`. Importing
`kmodels.ops` imports the files of the running backend only. `kmodels.override` in
`kmodels.overrides.user` registers a user's body, which comes before the override.

The path is chosen when Python runs the op, which for a compiled step means when it is traced.
Steps of kmodels' models are traced again if `generic_only()` changed, see `kmodels.core.traced`;
around other compiled code it must surround building *and* the first call. To turn off overrides for
a whole run, set the environment variable `KMODELS_GENERIC_OPS` to `all` or to a comma separated
list of ops.
"""

import importlib
import importlib.util
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

import keras

from kmodels.core.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
# A backend's body says in place of `Tensor` what a tensor is there.
Own = ParamSpec("Own")
Seam = TypeVar("Seam")

ENVIRONMENT = "KMODELS_GENERIC_OPS"
OVERRIDE, GENERIC = "override", "generic"

_OPS: dict[str, "Op[Any, Any]"] = {}
_users: tuple["UserBody", ...] = ()
_DECISIONS: dict[str, Counter[str]] = {}
_ALL = frozenset({"all"})
_switched_off: ContextVar[frozenset[str]] = ContextVar("kmodels_generic_ops", default=frozenset())
_environment_off: frozenset[str] = frozenset()
_environment_error: str | None = None
_off_for_all: str | None = None


def backend() -> str:
    """Returns the running Keras backend: `"jax"`, `"torch"` or `"tensorflow"`."""
    return keras.backend.backend()


class _Unsupported:
    """Stands for the file that a backend would need which Keras has and kmodels has not."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InputError(f"Backend {backend()!r} is not supported; use jax, torch or tensorflow.")


@overload
def backend_module(stem: str, seam: type[Seam], *, of: str = "") -> Seam: ...
@overload
def backend_module(stem: str, seam: type[Seam], optional: Literal[True]) -> Seam | None: ...
def backend_module(stem: str, seam: type[Seam], optional: bool = False, of: str = "") -> Any:
    """Imports the part of a module that only the running backend has.

        precision = backend_module("kmodels.core.runtime", PrecisionBackend)

    Args:
        stem: dotted name without the suffix.
        seam: the `typing.Protocol` of such a file. The type checker compares each file
            with it, see `tests/unit/core/seam_bodies.py`; here nothing is compared.
        optional: True if a backend may have no such file.
        of: another backend than the running one, for processes that are started with it.

    Returns:
        The module `<stem>_<backend>`; without it None if `optional`, or an object that raises.
    """
    name = f"{stem}_{of or backend()}"
    if importlib.util.find_spec(name) is None:
        return None if optional else _Unsupported()
    return importlib.import_module(name)


class _Settled(threading.local):
    """A thread's flags: an op's arguments alone decide; nothing is compiled or recorded either."""

    def __init__(self):
        # Not on the class: torch.compile of 2.11 and older reads that value, not the thread's.
        self.overrides = self.eager = False


_settled = _Settled()


def _count(name: str, outcome: str) -> None:
    counts = _DECISIONS.get(name)
    if counts is None:  # Counter() takes longer than all else here
        counts = _DECISIONS.setdefault(name, Counter())
    counts[outcome] += 1


def decline_all(reason: str | None) -> None:
    """Turns all overrides off in the process, for this reason (a clause); `None` undoes it.

    It holds in every thread, as `generic_only` does not: torch runs backward passes in its own, and
    a recomputed layer must take the same path as the first time.
    """
    global _off_for_all
    _off_for_all = reason


def _is_special() -> bool:
    """Returns True if something else than the arguments and the switches decides."""
    return False


def _has_switches() -> bool:
    return bool(_off_for_all is not None or _environment_off or _switched_off.get())


def _transformed() -> str | None:
    return None


def _autocasts(args: tuple) -> bool:
    return False


def switched_off(name: str) -> str | None:
    """Returns the reason why the op's override is off (a clause), or None if it is on."""
    if _off_for_all is not None:
        return _off_for_all
    block = _switched_off.get()
    if block and (name in block or "all" in block):
        return "turned off by generic_only()"
    if _environment_off and (name in _environment_off or "all" in _environment_off):
        return f"turned off by {ENVIRONMENT}"
    return _transformed()


def _is_abstract(values: Iterable[object]) -> bool:
    return any(isinstance(value, keras.KerasTensor) for value in values)


def compiles() -> bool:
    """Returns True if torch.compile is tracing; JAX and TensorFlow trace plain Python."""
    return False


def lost_gradient(arguments: Iterable[object], result: object) -> bool:
    """Returns True if autograd would silently take the gradient of a result for zero."""
    return False


if backend() == "torch":
    import torch

    from kmodels.core import internals_torch
    from kmodels.core.internals_torch import autocasts as _autocasts
    from kmodels.core.internals_torch import is_special as _is_special
    from kmodels.core.internals_torch import transformed as _transformed
    from kmodels.core.internals_torch import without_autocast

    compiles = torch.compiler.is_compiling
    lost_gradient = internals_torch.lost_gradient

    # Both run while torch.compile traces and leave nothing in the graph. Traced themselves, the
    # counter would be guarded by value and recompile at each call; the ContextVar breaks the graph.
    _count = torch.compiler.assume_constant_result(_count)
    switched_off = torch.compiler.assume_constant_result(switched_off)

    def _is_abstract(values: Iterable[object]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_meta:
                    return True
            elif isinstance(value, keras.KerasTensor):
                return True
        return False


class OpCall:
    """The arguments of an op's call by name, with defaults; `supports` of an override takes it.

    def supports(call: OpCall) -> str | None:
        return "there is no soft cap" if call.soft_cap is not None else None
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


Supports: TypeAlias = Callable[[OpCall], str | None]
# The functions that `of_mode` marked.
_OF_MODE: set[Supports] = set()


def of_mode(supports: Supports) -> Supports:
    """Marks a `supports` that depends on the mode of the framework alone, not on the arguments.

    It is not called if nothing is compiled or recorded, see `settle`.
    """
    _OF_MODE.add(supports)
    return supports


def _call_type(generic: Callable[..., Any]) -> type[OpCall]:
    """Returns the class of an op's calls; its constructor takes the parameters of the op.

    It is compiled once, as in `dataclasses`, since ops are called for each layer and token:
    `inspect.Signature.bind` would take a hundred times as long.
    """
    names = list(inspect.signature(generic).parameters)
    code = generic.__code__
    plain, keyword = names[: code.co_argcount], names[code.co_argcount :]
    parameters = ", ".join(["self", *plain, *(["*", *keyword] if keyword else [])])
    lines = [f"def __init__({parameters}):", *(f"    self.{name} = {name}" for name in names)]
    namespace: dict[str, Any] = {}
    # Names of parameters of our own functions, which Python has accepted as such.
    exec("\n".join(lines), namespace)  # nosec B102
    init = namespace["__init__"]
    init.__defaults__, init.__kwdefaults__ = generic.__defaults__, generic.__kwdefaults__
    return type("OpCall", (OpCall,), {"__slots__": tuple(names), "__init__": init})


class UserBody(Protocol):
    """A body of an op that the user registered, see `kmodels.override`."""

    name: str

    def declines(self, call: OpCall) -> str | None:
        """Returns the reason why it does not take a call, or None."""
        ...

    def run(self, call: OpCall) -> Any:
        """Returns the op's result."""
        ...


class Op(Generic[P, R]):
    """A function with a body for all backends and, maybe, faster ones for the running backend.

    Attributes:
        name: the function's name.
        generic: the `keras.ops` body.
        override: the backend's own body, `None` if there is none.
        user: the user's body, which comes before `override`; `None` if there is none.
        supports: takes an `OpCall`; returns `None` or why the override declines it.
        bind: makes the `OpCall` of the op's arguments.
        plain: True if there is the generic body alone.
        always: True if the override serves all calls that are not compiled or recorded.
    """

    def __init__(self, generic: Callable[P, R]) -> None:
        self.name = generic.__name__
        self.generic = generic
        self.override: Callable[..., R] | None = None
        self.user: UserBody | None = None
        self.plain = True
        self.supports: Supports | None = None
        self.bind: Callable[..., OpCall] = _call_type(generic)
        self.always = False
        self.__name__ = self.name
        self.__doc__ = generic.__doc__
        self.__module__ = generic.__module__
        self.__wrapped__ = generic

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: D102, wraps the op's own
        if self.always and _settled.eager:
            _count(self.name, OVERRIDE)
            return self.override(*args, **kwargs)  # type: ignore[misc]
        if self.plain or not _settled.overrides:
            if _environment_error is not None:
                raise InputError(_environment_error)
            if _is_abstract(args) or (kwargs and _is_abstract(kwargs.values())):
                return self.generic(*args, **kwargs)
            # Nearly always nothing but the arguments decides; the rest is asked only where it may.
            if self.plain or _is_special() or _has_switches():
                if _autocasts(args):
                    return without_autocast(self, self.generic, args, kwargs)
                if self.plain or switched_off(self.name) is not None:
                    _count(self.name, GENERIC)
                    return self.generic(*args, **kwargs)
        if self.user is not None:
            call = self.bind(*args, **kwargs)
            reason = self.user.declines(call)
            _count(self.name, reason or self.user.name)
            if reason is None:
                return self.user.run(call)
            if self.override is None:
                _count(self.name, GENERIC)
                return self.generic(*args, **kwargs)
        if self.supports is not None:
            reason = self.supports(self.bind(*args, **kwargs))
            if reason is not None:
                _count(self.name, reason)
                return self.generic(*args, **kwargs)
        _count(self.name, OVERRIDE)
        return self.override(*args, **kwargs)  # type: ignore[misc]

    def set_user(self, body: UserBody | None) -> None:
        """Registers the user's body in place of an earlier one, or removes it."""
        global _users
        self.user = body
        self.plain = self.override is None and body is None
        of_mode = self.supports is None or self.supports in _OF_MODE
        self.always = self.override is not None and body is None and of_mode
        _users = tuple(op.user for op in _OPS.values() if op.user is not None)

    def declines(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Returns why `override` would not take a call with these arguments, or `None`.

        A body of the user is not considered.
        """
        if self.override is None:
            return f"no override for {backend()}"
        reason = switched_off(self.name)
        if reason is None and self.supports is not None:
            reason = self.supports(self.bind(*args, **kwargs))
        return reason

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def settle(eager: bool) -> None:
    """Asks once for all ops up to `unsettle`: all tensors have numbers, and no switch changes.

    Args:
        eager: whether it is known, too, that the framework neither compiles nor records the calls.
    """
    _settled.overrides = not (_is_special() or _has_switches() or _environment_error)
    _settled.eager = eager and _settled.overrides


def unsettle() -> None:
    """Ends `settle`."""
    _settled.overrides = _settled.eager = False


def op(function: Callable[P, R]) -> Op[P, R]:
    """Makes a `keras.ops` function an op.

    Raises:
        TypeError: if another function has registered under this name.
    """
    if function.__name__ in _OPS:
        raise TypeError(f"There is an op named {function.__name__!r} already; choose another name.")
    made = Op(function)
    _OPS[made.name] = made
    return made


def override(
    target: Op[..., R], supports: Supports | None = None
) -> Callable[[Callable[Own, R]], Callable[Own, R]]:
    """Registers the running backend's own body of an op; the function itself stays callable.

    Args:
        target: the op, not its name, so that tools can follow it.
        supports: takes an `OpCall`, which has the op's arguments by name; returns `None`, or one
            clause saying why not.

    Raises:
        TypeError: if the function is not named `<op>_<backend>`, if its parameters differ from the
            op's in name, kind or default, if `supports` takes anything but one `call`, or if there
            is an override already.
    """

    def register(function: Callable[Own, R]) -> Callable[Own, R]:
        expected = f"{target.name}_{backend()}"
        if function.__name__ != expected:
            raise TypeError(
                f"An override is named <op>_<backend>: {expected!r}, not {function.__name__!r}."
            )
        if target.override is not None:
            raise TypeError(f"Op {target.name!r} has an override on {backend()} already.")
        if _parameters(function) != _parameters(target.generic):
            raise TypeError(
                f"{function.__name__}{inspect.signature(function)} must take the "
                f"parameters of {target.name}{inspect.signature(target.generic)}."
            )
        if supports is not None and list(inspect.signature(supports).parameters) != ["call"]:
            raise TypeError(
                f"{supports.__name__}{inspect.signature(supports)} must take one parameter, "
                f"call: an OpCall with the arguments of {target.name}."
            )
        target.override = function
        target.supports = supports
        target.set_user(target.user)
        return function

    return register


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@contextmanager
def generic_only(*names: "str | Op[Any, Any]") -> Iterator[None]:
    """Takes the generic path inside the block: for the ops named, or for all when none is named.

    `fit`, `evaluate`, `predict` and `generate` of kmodels' models follow it, in and out of the
    block. Other compiled code chooses while it is traced, so the block must surround its first
    call.

    Raises:
        InputError: for a name that is no op.
    """
    chosen = frozenset(name.name if isinstance(name, Op) else name for name in names) or _ALL
    problem = _unknown(chosen, "generic_only()")
    if problem is not None:
        raise InputError(problem)
    token = _switched_off.set(_switched_off.get() | chosen)
    try:
        yield
    finally:
        _switched_off.reset(token)


def paths_now() -> tuple[frozenset[str], tuple[UserBody, ...]]:
    """Returns what decides the paths of traced code, apart from arguments.

    Returns:
        The names of the ops that are turned off here, or "all", and the user's bodies.
    """
    off = _switched_off.get() | _environment_off
    return off if _off_for_all is None else off | _ALL, _users


def ops() -> dict[str, Op[Any, Any]]:
    """Returns all ops by name."""
    return dict(_OPS)


def decisions() -> dict[str, dict[str, int]]:
    """Counts the paths of the calls of each op since the start or `reset_decisions()`.

    Keys of the inner dictionary: `"override"`, `"generic"` (there is no override, or it is turned
    off), the name of your own body (see `kmodels.override`) and each reason for declining. A call
    that your own body declines counts twice: with the reason, and with the path that it then takes.
    Shape inference is not counted; a compiled step counts when it is traced.
    """
    return {
        name: {OVERRIDE: 0, GENERIC: 0} | dict(_DECISIONS.get(name, {})) for name in sorted(_OPS)
    }


def reset_decisions() -> None:
    """Forgets all counts."""
    _DECISIONS.clear()


@contextmanager
def uncounted() -> Iterator[None]:
    """Forgets the counts of the block."""
    counts = {name: Counter(paths) for name, paths in _DECISIONS.items()}
    try:
        yield
    finally:
        _DECISIONS.clear()
        _DECISIONS.update(counts)


def summary() -> dict[str, str]:
    """Returns the path of most calls of each op.

    Returns:
        For each op `"override"`, `"generic"`, the name of the user's body, the reason for
        declining, or `"not called"`.
    """
    return {
        name: _DECISIONS[name].most_common(1)[0][0] if name in _DECISIONS else "not called"
        for name in sorted(_OPS)
    }


def load_overrides() -> None:
    """Imports `overrides/*_<backend>.py` of the running backend and reads `KMODELS_GENERIC_OPS`.

    `kmodels.ops` calls it once, after its ops exist, rather than each op at its first call: an
    import inside a traced function would break torch.compile's graph. An unknown name in the
    environment is reported by the first op that is called, so that a program can show it as its
    own error.
    """
    folder = Path(__file__).parents[1] / "overrides"
    for path in sorted(folder.glob(f"[!_]*_{backend()}.py")):
        importlib.import_module(f"kmodels.overrides.{path.stem}")
    load_environment()


def load_environment(strict: bool = False) -> None:
    """Reads `KMODELS_GENERIC_OPS`.

    Args:
        strict: report an unknown name at once rather than at the next call of an op.

    Raises:
        InputError: with `strict`, if the variable names an unknown op.
    """
    global _environment_off, _environment_error
    names = os.environ.get(ENVIRONMENT, "").split(",")
    _environment_off = frozenset(name.strip() for name in names) - {""}
    _environment_error = _unknown(_environment_off, ENVIRONMENT)
    if strict and _environment_error is not None:
        raise InputError(_environment_error)


def _unknown(names: frozenset[str], where: str) -> str | None:
    unknown = sorted(names - set(_OPS) - _ALL)
    if not unknown:
        return None
    return f"{where} names unknown ops {', '.join(unknown)}; known: all, {', '.join(sorted(_OPS))}."
