"""The call of an op, as the overrides are asked whether they serve it."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias


class OpCall:
    """The arguments of a call by the names of the op's parameters, defaults filled in.

    def supports(call: OpCall) -> str | None:
        return "there is no soft cap" if call.soft_cap is not None else None
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


Supports: TypeAlias = Callable[[OpCall], str | None]
# What `of_mode` marked.
OF_MODE: set[Supports] = set()


def of_mode(supports: Supports) -> Supports:
    """Marks a `supports` that asks for the mode of the framework alone, not for the arguments.

    Where it is known that nothing is compiled and nothing recorded, it is not asked.
    """
    OF_MODE.add(supports)
    return supports


def call_type(generic: Callable[..., Any]) -> type[OpCall]:
    """Makes the class of an op's calls: its constructor takes the parameters of the op.

    It is compiled once, as `dataclasses` does it, since ops are called for each layer and token:
    `inspect.Signature.bind` would take a hundred times as long.

    Args:
        generic: the op's body for all backends.
    """
    names = list(inspect.signature(generic).parameters)
    code = generic.__code__
    plain, keyword = names[: code.co_argcount], names[code.co_argcount :]
    given = ", ".join(["self", *plain, *(["*", *keyword] if keyword else [])])
    lines = [f"def __init__({given}):", *(f"    self.{name} = {name}" for name in names)]
    found: dict[str, Any] = {}
    # Names of parameters of our own functions, which Python has accepted as such.
    exec("\n".join(lines), found)  # nosec B102
    made = found["__init__"]
    made.__defaults__, made.__kwdefaults__ = generic.__defaults__, generic.__kwdefaults__
    return type("OpCall", (OpCall,), {"__slots__": tuple(names), "__init__": made})
