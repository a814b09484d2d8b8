"""Classes of text alone that have a counterpart with images, as one class of keras-hub has both."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from kmodels.models.common.hub_order import by_name


class TextOrImages:
    """First base of a class of text alone, by a name under which keras-hub reads images too.

    A call that asks for images makes the subclass that takes them.

    Attributes:
        order: the positional arguments of keras-hub's class.
        takes_images: True in the subclass.
    """

    order: ClassVar[tuple[str, ...]] = ()
    takes_images: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Returns an object of the class, or of its subclass that takes images."""
        given = by_name(cls.__name__, cls.names_of(args), args, kwargs)
        if not cls.takes_images and cls.asks(given):
            cls = next(one for one in cls.__subclasses__() if one.takes_images)  # type: ignore[assignment]
        return super().__new__(cls, *args, **kwargs)

    @classmethod
    def names_of(cls, args: tuple[Any, ...]) -> tuple[str, ...]:
        """Returns the names of positional arguments."""
        return cls.order

    @classmethod
    def asks(cls, given: Mapping[str, Any]) -> bool:
        """Returns True if these arguments ask for images."""
        return False
