"""Checks arguments by their annotations: numbers, flags, texts, choices, and sequences of these."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

import numpy as np

from kmodels.core.errors import InputError

# A test of a value, and the words for what passes.
Kind: TypeAlias = tuple[Callable[[Any], bool], str]
Function = TypeVar("Function", bound=Callable[..., Any])


def check_arguments(cls: type, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raises `InputError` for an argument of a constructor that is of another kind than it says.

    Arguments that a class hands to its parents are checked as those of the parents. An annotation
    that is not a number, a flag, a text, a choice among texts, a sequence of these, or None says
    nothing.
    """
    kinds = _kinds_of(cls)
    _check({**dict(zip(_positional(cls), args, strict=False)), **kwargs}, kinds)


class Checked:
    """Base of classes whose constructor and public methods check their arguments.

    Sequences are checked in constructors only, since those of a method may be long. Methods with an
    argument `training` or `caches` and those of callbacks run in every step, and check nothing.

    Attributes:
        checks_methods: class attribute; False if only the constructor checks.
    """

    checks_methods: ClassVar[bool] = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Checks arguments by their annotations."""
        check_arguments(cls, args, kwargs)
        new: Any = super().__new__
        return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)

    if TYPE_CHECKING:  # The other bases have constructors.

        def __init__(self, *args: Any, **kwargs: Any): ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.checks_methods or not cls.__module__.startswith("kmodels."):
            return  # a user's annotations may be loose
        for name, method in list(vars(cls).items()):
            if name.startswith(("_", "on_")):
                continue
            if inspect.isfunction(method):
                setattr(cls, name, checked(method))
            elif isinstance(method, classmethod):
                setattr(cls, name, classmethod(checked(method.__func__)))


class Constructed(type):
    """Metaclass whose instances record in `_is_constructed` that all constructors have returned."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a new instance, marked as constructed."""
        instance = super().__call__(*args, **kwargs)
        object.__setattr__(instance, "_is_constructed", True)
        return instance

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's; without it that of `__call__` would be shown."""
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def checked(function: Function) -> Function:
    """Returns a function that raises `InputError` for arguments of another kind than it says."""
    parameters = inspect.signature(function).parameters
    kinds = {
        name: kind
        for name, kind in _kinds_of_call(function).items()
        if _is_single(parameters[name].annotation)
    }
    if not kinds or not parameters.keys().isdisjoint(("training", "caches")):
        return function
    names = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check({**dict(zip(names, args, strict=False)), **kwargs}, kinds)
        return function(*args, **kwargs)

    return cast(Function, call)


def _is_single(annotation: Any) -> bool:
    union = get_origin(annotation) in (Union, UnionType)
    parts = get_args(annotation) if union else (annotation,)
    return not any(get_origin(part) in (list, tuple, Sequence) for part in parts)


def check_fields(instance: Any) -> None:
    """Raises `InputError` for a field of a dataclass that is of another kind than it says."""
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    _check(values, _kinds_of(type(instance)))


def _check(values: Mapping[str, object], kinds: Mapping[str, Kind]) -> None:
    for name, value in values.items():
        if name in kinds and not kinds[name][0](value):
            shown = value.__name__ if isinstance(value, type) else repr(value)
            raise InputError(f"{name} is {shown}; give {kinds[name][1]}")


@cache
def _positional(cls: type) -> tuple[str, ...]:
    if hasattr(cls.__init__, "__wrapped__"):
        return ()  # another order, see `kmodels.models.blocks.hub_order`
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


@cache
def _kinds_of(cls: type) -> dict[str, Kind]:
    """Returns the kinds of a constructor's arguments by name, as far as their annotations tell."""
    kinds: dict[str, Kind] = {}
    for base in reversed(cls.__mro__):
        if inspect.isfunction(init := vars(base).get("__init__")):
            named = set(inspect.signature(init).parameters)
            others = {name: kind for name, kind in kinds.items() if name not in named}
            kinds = others | _kinds_of_call(init)
    return kinds


@cache
def _kinds_of_call(function: Callable[..., Any]) -> dict[str, Kind]:
    kinds = {
        parameter.name: _kind(parameter.annotation)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind(annotation: Any) -> Kind | None:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None:
        return _SIMPLE.get(annotation) if isinstance(annotation, type) else None
    if origin is Literal:
        if not all(isinstance(choice, str) for choice in parts):
            return None
        return lambda x: isinstance(x, str) and x in parts, " or ".join(map(repr, parts))
    if origin in (dict, Mapping):
        return lambda x: isinstance(x, Mapping), "a dictionary"
    kinds = [_kind(part) for part in parts if part is not ...]
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds) or not known:
        return None
    if origin in (Union, UnionType):
        return lambda x: any(fits(x) for fits, _ in known), " or ".join(words for _, words in known)
    if origin is tuple and ... not in parts:
        return lambda x: _is_sequence(x, known), _of_several([words for _, words in known])
    if origin in (tuple, list, Sequence):
        fits, words = known[0]
        plural = words.removeprefix("a ").replace("number", "numbers").replace("text", "texts")
        return lambda x: _is_sequence(x) and all(map(fits, x)), f"a sequence of {plural}"
    return None


def _is_sequence(value: Any, kinds: Sequence[Kind] | None = None) -> bool:
    # Sets too, and arrays of any package, which have one axis.
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        return False
    if getattr(value, "ndim", 1) != 1:
        return False
    if kinds is None:
        return True
    return len(value) == len(kinds) and all(
        fits(x) for x, (fits, _) in zip(value, kinds, strict=True)
    )


def _of_several(words: Sequence[str]) -> str:
    if len(set(words)) > 1:
        return f"({', '.join(words)})"
    return f"{len(words)} {words[0].removeprefix('a ').replace('number', 'numbers')}"


def _is_number(value: Any) -> bool:
    if isinstance(value, Real):
        return not isinstance(value, bool) and math.isfinite(value)
    return hasattr(value, "__float__") and len(np.shape(value)) == 0  # a tensor


_SIMPLE: dict[type, Kind] = {
    # Files of other packages have 0 and 1 too.
    bool: (lambda x: isinstance(x, Integral | np.bool_) and x in (0, 1), "True or False"),
    int: (lambda x: hasattr(x, "__index__") and not isinstance(x, bool), "a whole number"),
    float: (_is_number, "a finite number"),
    str: (lambda x: isinstance(x, str), "a text"),
    NoneType: (lambda x: x is None, "None"),
}
