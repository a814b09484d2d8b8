"""Jinja's sandbox with limits: a chat template comes with a download, and may never end."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Loop steps, calls, filters and arithmetic of one rendering.
STEPS = 1_000_000
# Characters of one text or list, and of all that is written.
CHARACTERS = 100_000_000
# The largest number that a function may get, such as a width, and bits of a whole number.
NUMBER = 1_000_000
_BITS = 100_000
# Characters that an element of a list counts for.
_ELEMENT = 100
# Steps and characters that are left to the rendering that runs here.
_LEFT: ContextVar[list[int]] = ContextVar("left")
_WIDE = re.compile(r"\d{7,}")
# A width that is itself an argument.
_WIDTH_ARGUMENT = re.compile(r"\*|\{[^{}]*\{")


class TooMuchError(Exception):
    """A template takes more steps or writes more characters than any chat needs."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox that counts steps and characters; `render` starts the count."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=_written)
        del self.globals["lipsum"]  # writes as many paragraphs as it is asked for
        self.filters["kmodels_steps"] = _each
        self.filters["kmodels_size"] = _sized

    def limit_filters(self) -> None:
        """Adds the limits to all filters and tests; call it when all are defined."""
        for table in (self.filters, self.tests):
            for name, function in table.items():
                if function not in (_each, _sized):
                    table[name] = _counted(function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            text = sum(len(part.data) for part in loop.find_all(nodes.TemplateData))
            size = nodes.Const(text, lineno=loop.lineno)
            loop.iter = _filter("kmodels_steps", loop.iter, [size])
        _wrap_concatenations(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculates, unless the result would be too large."""
        _spend(1)
        if operator == "%" and isinstance(left, str):
            _check_format(left, (right,))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return _sized(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function with arguments of an allowed size."""
        owner = getattr(obj, "__self__", None)
        # The sandbox's own function for str.format has no owner.
        wrapped = getattr(getattr(obj, "__wrapped__", None), "__self__", owner)
        is_format = getattr(obj, "__name__", "") in ("format", "format_map")
        if isinstance(wrapped, str) and is_format:
            _check_format(wrapped, (args, kwargs))
        else:
            _check_arguments(args, kwargs)
        if isinstance(owner, str | bytes):
            _sized(owner)
            if args and getattr(obj, "__name__", "") == "replace":
                _check_replace(owner, *args)
            if getattr(obj, "__name__", "") == "join":
                _check_join(owner, *args)
            if getattr(obj, "__name__", "") == "expandtabs":
                size = args[0] if args else kwargs.get("tabsize", 8)
                _check_size(len(owner) * size)
        return _sized(super().call(context, obj, *args, **kwargs))


def render(template: Any, values: Mapping[str, Any]) -> str:
    """Returns the text that a template of a `LimitedEnvironment` writes.

    Raises:
        TooMuchError: if it takes too many steps or writes too much.
    """
    token = _LEFT.set([STEPS, CHARACTERS])
    try:
        return template.render(values)
    finally:
        _LEFT.reset(token)


def _spend(steps: int, characters: int = 0) -> None:
    left = _LEFT.get(None)
    if left is None:  # a constant that is folded while the template is compiled
        return
    left[0] -= steps
    left[1] -= characters
    if left[0] < 0:
        raise TooMuchError(f"it takes more than {STEPS:,} steps; give another chat_template=")
    if left[1] < 0:
        _check_size(CHARACTERS + 1)


def _check_size(size: int) -> None:
    if size > CHARACTERS:
        raise TooMuchError(
            f"it makes more than {CHARACTERS:,} characters; give another chat_template="
        )


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise TooMuchError(f"it computes a number of more than {_BITS:,} bits")


def _each(values: Iterable[Any], text: int = 0) -> Iterator[Any]:
    """Counts the steps of a loop, each with the text that stands in it."""
    iterator = iter(values)

    def steps() -> Iterator[Any]:
        for value in iterator:
            _spend(1, text)
            yield value

    return steps()


def _weigh(value: Any, left: int) -> int:
    """Returns a number of characters minus the size of a value; negative if that is larger."""
    if isinstance(value, str | bytes):
        return left - len(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        if len(value) * _ELEMENT > left:
            return -1
        for part in value:
            left = _weigh(part, left - _ELEMENT)
            if left < 0:
                break
    return left


def _sized(value: Any) -> Any:
    if isinstance(value, int):
        _check_bits(value.bit_length())
    _check_size(CHARACTERS - _weigh(value, CHARACTERS))
    return value


def _written(value: Any) -> Any:
    """Counts the characters that an expression writes."""
    left = _LEFT.get(None)
    if left is not None:
        _spend(1, left[1] - _weigh(value, left[1]))
    return value


def _check_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    values = [*args, *kwargs.values()]
    sizes = (len(value) for value in values if isinstance(value, list | tuple | dict | range))
    _spend(1 + sum(sizes))
    for value in values:
        if isinstance(value, int) and abs(value) > NUMBER:
            raise TooMuchError(f"it gives a function a number over {NUMBER:,}")


def _check_format(text: str, args: Any) -> None:
    _spend(1)
    if _WIDE.search(text) or (_WIDTH_ARGUMENT.search(text) and _has_wide(args)):
        raise TooMuchError(f"it formats with a width over {NUMBER:,}")
    _check_size((text.count("%") + text.count("{") + 1) * (CHARACTERS - _weigh(args, CHARACTERS)))


def _has_wide(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_has_wide, value))
    return (isinstance(value, int) and abs(value) > NUMBER) or (
        isinstance(value, str) and _WIDE.search(value) is not None
    )


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    many, count = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(many, str | bytes | list | tuple) and isinstance(count, int):
        _check_size(max(CHARACTERS - _weigh(many, CHARACTERS), len(many)) * count)


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        _check_size(len(text) + text.count(old) * len(new))


def _check_join(text: Any, parts: Any = (), *_: Any) -> None:
    if isinstance(parts, list | tuple | range):
        _check_size(len(text) * len(parts) + CHARACTERS - _weigh(parts, CHARACTERS))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter or test that checks its arguments before and its result after."""
    # A context or environment comes first in some.
    first = int(hasattr(function, "jinja_pass_arg"))
    name = function.__name__

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        value, others = args[first], args[first + 1 :]
        if name == "do_format":
            _check_format(str(value), (others, kwargs))
        else:
            _check_arguments(others, kwargs)
        if isinstance(value, list | tuple | dict | range):
            _spend(len(value))
        _sized(value)
        if name == "do_replace":
            _check_replace(str(value), *others)
        if name == "do_join":
            _check_join(str(others[0] if others else kwargs.get("d", "")), value)
        if name == "do_indent":
            width = others[0] if others else kwargs.get("width", 4)
            size = width if isinstance(width, int) else len(width)
            _check_size(str(value).count("\n") * size)
        if name == "do_batch" and others:
            _spend(others[0])
        result = _sized(function(*args, **kwargs))
        _spend(0, len(result) if isinstance(result, str) else 0)
        return result

    return counted


def _filter(name: str, value: Any, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None, lineno=value.lineno)


def _wrap_concatenations(node: nodes.Node) -> None:
    """Adds a check of the size of each `a ~ b`."""
    for child in list(node.iter_child_nodes()):
        _wrap_concatenations(child)
    for field, value in list(node.iter_fields()):
        if isinstance(value, nodes.Concat):
            setattr(node, field, _filter("kmodels_size", value, []))
        elif isinstance(value, list):
            value[:] = [
                _filter("kmodels_size", part, []) if isinstance(part, nodes.Concat) else part
                for part in value
            ]
