"""keras-hub's order of positional arguments, and its classes with or without images."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from kmodels import registry
from kmodels.core.arguments import check_arguments
from kmodels.core.errors import InputError


def in_order(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives positional arguments of an `__init__` the names that keras-hub's class has there."""

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def named(self: Any, /, *args: Any, **kwargs: Any) -> None:
            arguments = by_name(type(self).__name__, names, args, kwargs)
            check_arguments(type(self), (), arguments)
            init(self, **arguments)

        # Keras reads the signature of `__init__` without unwrapping it.
        named.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
        return named

    return decorate


def by_name(
    owner: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns all arguments by their names."""
    if len(args) > len(names):
        raise InputError(
            f"{owner} got {len(args)} arguments without a name; it takes {len(names)} "
            f"({', '.join(names)}): name the others"
        )
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise InputError(
            f"{owner} got {', '.join(twice)} by position and by name; give each argument once"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


class TextOrImages:
    """First base of a text-only class whose keras-hub counterpart also supports images.

    A call with images creates the subclass that supports them.

    Attributes:
        order: positional arguments of keras-hub's class.
        takes_images: True in the subclass.
        image_family: name of the family that has the subclass.
        image_argument: argument that asks for images unless it is None.
    """

    image_family: ClassVar[str]
    image_argument: ClassVar[str]
    order: ClassVar[tuple[str, ...]] = ()
    takes_images: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Returns an object of the class, or of its subclass that takes images."""
        arguments = by_name(cls.__name__, cls.names_of(args), args, kwargs)
        if not cls.takes_images and cls.asks(arguments):
            registry.family(cls.image_family)  # whose module may not be loaded yet
            cls = next(one for one in cls.__subclasses__() if one.takes_images)  # type: ignore[assignment]
        return super().__new__(cls, *args, **kwargs)

    @classmethod
    def names_of(cls, args: tuple[Any, ...]) -> tuple[str, ...]:
        """Returns the names of positional arguments."""
        return cls.order

    @classmethod
    def asks(cls, arguments: Mapping[str, Any]) -> bool:
        """Returns True if these arguments ask for images."""
        return arguments.get(cls.image_argument) is not None
