"""Chats as a checkpoint's own template writes them, in Jinja's language and in a sandbox."""

import datetime
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jinja2
import numpy as np
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kmodels.core.errors import InputError, one_line
from kmodels.text.settings import DEFAULT, token_text

Span = tuple[int, int]
# A function that a model may call: its JSON schema, or the function itself.
Tool: TypeAlias = Mapping[str, Any] | Callable[..., Any]
# Variables and functions of a template that no caller gives a value.
OWN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
# The names under which a message may hold its reasoning; the first is the one templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Roles of messages that the model writes.
MODEL_ROLES = ("assistant", "model")
# The variable of a template that holds what stands around {% generation %} while it is looked for.
_MARKS = "kmodels_generation_marks"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A chat as one text.

    Attributes:
        text: the whole chat, with every special token that the template writes.
        replies: spans of the model's own words, as (first character, end).
    """

    text: str
    replies: list[Span]


def is_chat(x: object) -> TypeGuard[Sequence[Any]]:
    """Returns True if x is a list of messages with roles, or a list of such lists."""
    if not isinstance(x, list | tuple) or not x:
        return False
    first = x[0]
    if isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, Mapping) and "role" in first


def as_chats(x: Sequence[Any]) -> tuple[list[Sequence[Mapping[str, Any]]], bool]:
    """Returns a list of chats, and True if x is a list of chats, not one chat."""
    return ([x], False) if isinstance(x[0], Mapping) else (list(x), True)


def choose_template(
    settings: Mapping[str, Any], wanted: str | None, tools: Sequence[Tool] | None
) -> str:
    """Returns the template for a chat: `wanted`, the checkpoint's of that name, or its default.

    Raises:
        InputError: if there is no template, or there are several and none is named.
    """
    templates = settings.get("chat_template")
    if not isinstance(templates, Mapping):
        if (template := wanted or templates) is None:
            raise InputError(
                "the tokenizer has no chat template; give one as chat_template=, or write the "
                "turns with the preprocessor's template='gemma'"
            )
        return template
    if wanted is not None:
        return templates.get(wanted, wanted)
    name = "tool_use" if tools is not None and "tool_use" in templates else DEFAULT
    if name not in templates:
        raise InputError(
            f"there are chat templates {', '.join(templates)}: choose with chat_template="
        )
    return templates[name]


def variables(template: str) -> list[str]:
    """Returns the names of the variables that a caller may give a template, sorted.

    Args:
        template: in Jinja's language; of one with a mistake, which `render` names, there are none.
    """
    try:
        names = meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateError:
        return []
    return sorted(name for name in names - OWN if not name.endswith("_token"))


def has_generation(template: str) -> bool:
    """Returns True if a template marks the model's own words with {% generation %}."""
    return _GENERATION.search(template) is not None


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    continue_final_message: bool = False,
    **values: object,
) -> str:
    """Returns a chat as a template writes it, equal to transformers' text.

    Args:
        template: in Jinja's language.
        messages: with "role", "content" and other fields of the template. Names whose value is
            None are left out, and reasoning is there under each of its names.
        settings: whose special tokens the template may use.
        continue_final_message: leaves the last message open, to be continued.
        **values: further variables of the template.

    Raises:
        InputError: for a template that is damaged, a chat that it refuses, or values other than
            texts, numbers, lists and dictionaries.
    """
    special = {key: token_text(settings[key]) for key in settings if key.endswith("_token")}
    special = {key: text for key, text in special.items() if text is not None}
    context = {**special, **{key: _plain(value, key) for key, value in values.items()}}
    chat = [_message(message) for message in messages]
    if not chat:
        raise InputError("the chat is empty; give at least one message")
    tag = secrets.token_hex(16)
    if continue_final_message:
        chat[-1] = _with_tag(chat[-1], tag)
    try:
        compiled = _compiled(template)
        token = _LEFT.set([STEPS, CHARACTERS])
        try:
            text = compiled.render({**context, "messages": chat})
        finally:
            _LEFT.reset(token)
    except Exception as error:  # a template is a program and may fail in any way
        reason = one_line(error)
        raise InputError(f"the chat template cannot write this chat: {reason}") from error
    return _before_tag(text, tag) if continue_final_message else text


def render_with_generation(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    **values: Any,
) -> Rendered:
    """Returns a chat and the spans inside {% generation %}; arguments are those of `render`.

    Raises:
        InputError: as `render`, and if the template changes the text that it marks.
    """
    text = render(template, messages, settings, **values)
    # Nobody's text holds these, as they are drawn again each time.
    start, end = (f"\x02{secrets.token_hex(8)}{side}\x03" for side in "<>")
    marked = render(template, messages, settings, **{**values, _MARKS: (start, end)})
    replies, clean, begun = [], "", 0
    for piece in re.split(f"({re.escape(start)}|{re.escape(end)})", marked):
        if piece == start:
            begun = len(clean)
        elif piece == end:
            replies.append((begun, len(clean)))
        else:
            clean += piece
    if clean != text:
        raise InputError(
            "the chat template changes what it marks with {% generation %}; take it out of filters"
        )
    return Rendered(text, replies)


def check_fields(
    template: str, messages: Sequence[Mapping[str, Any]], write: Callable[[list[Any]], str]
) -> None:
    """Checks that a template writes the calls of tools and each part of a content.

    A template skips parts and fields that it does not read, or writes a list as Python does.

    Args:
        template: in Jinja's language.
        messages: of one chat.
        write: returns messages as the template writes them.

    Raises:
        InputError: names the message of which something would be missing.
    """
    tags: dict[str, int] = {}
    tagged: list[Any] = []
    for place, message in enumerate(messages):
        fields = dict(message) if isinstance(message, Mapping) else {}
        for name in ("tool_calls", "function_call"):
            if fields.get(name) and name not in template:
                raise InputError(
                    f"the chat template does not write the {name} of messages[{place}]; give "
                    "another template"
                )
        if isinstance(fields.get("content"), list | tuple):
            parts = []
            for part in map(_part, fields["content"]):
                kind = part.get("type")
                if isinstance(part.get("text"), str):
                    part = {**part, "text": secrets.token_hex(16)}
                    tags[part["text"]] = place
                elif kind == "text" or not isinstance(kind, str) or kind not in template:
                    lacks = "has no text" if kind == "text" else "the chat template does not write"
                    raise InputError(
                        f"messages[{place}] has a part of type {kind!r}, which {lacks}; give "
                        '{"type": "text", "text": ...}'
                    )
                parts.append(part)
            message = {**fields, "content": parts}
        tagged.append(message)
    text = write(tagged) if tags else ""
    for tag, place in tags.items():
        if tag not in text or f"'text': '{tag}'" in text:
            raise InputError(
                f"the chat template does not write all parts of messages[{place}]; give its "
                "content as one text"
            )


def _part(part: object) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InputError(f"a part of a message is a {type(part).__name__}; give an object")
    return dict(part)


def schemas(tools: Sequence[Tool] | None) -> Any:
    """Returns tools with the JSON schema of each function, by its signature and docstring.

    Raises:
        InputError: for a function without a schema, or if transformers is not installed.
    """
    if not isinstance(tools, list | tuple) or not any(map(callable, tools)):
        return tools
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        first = next(tool for tool in tools if callable(tool))
        raise InputError(
            f"tools holds the function {getattr(first, '__name__', first)!s}; give its JSON schema "
            "or install transformers, which reads it from the function: pip install transformers"
        ) from None
    try:
        return [get_json_schema(tool) if callable(tool) else tool for tool in tools]
    except Exception as error:  # its own classes of errors, for docstrings and annotations
        reason = one_line(error)
        raise InputError(f"a function among the tools has no JSON schema: {reason}") from error


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(
            f'a message is a {type(message).__name__}; give {{"role": ..., "content": ...}}'
        )
    fields = {key: _plain(value, key) for key, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _plain(value: Any, name: object) -> Any:
    """Returns a value of a built-in type, without methods that a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), name)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, name) for part in value]
    if isinstance(value, tuple):
        return tuple(_plain(part, name) for part in value)
    raise InputError(
        f"{name} holds a {type(value).__name__}; a chat takes texts, numbers, lists and "
        "dictionaries alone"
    )


def _with_tag(message: dict[str, Any], tag: str) -> dict[str, Any]:
    content = message.get("content")
    # The blank tells whether the template trims.
    if isinstance(content, str):
        return {**message, "content": f"{content}{tag} "}
    if isinstance(content, list):
        texts = [place for place, part in enumerate(content) if "text" in part]
        if texts:
            parts = list(content)
            parts[texts[-1]] = {**parts[texts[-1]], "text": f"{parts[texts[-1]]['text']}{tag} "}
            return {**message, "content": parts}
    raise InputError("the last message has no text to continue")


def _before_tag(text: str, tag: str) -> str:
    if tag not in text:
        raise InputError("the chat template leaves the last message out; it cannot be continued")
    before, _, behind = text.rpartition(tag)
    return before if behind.startswith(" ") else before.rstrip()


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> "LimitedEnvironment":
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.limit_filters()
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """Writes the content of {% generation %}, between marks if there are any."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, as in transformers: what is set inside is unknown behind it.
        call = nodes.CallBlock(self.call_method("_marked"), [], [], body)
        return call.set_lineno(line)

    @jinja2.pass_context
    def _marked(self, context: Context, caller: Callable[[], str]) -> str:
        start, end = context.get(_MARKS) or ("", "")
        return start + caller() + end


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


# === Limits of the sandbox: a template comes with a download, and may never end ===

# Loop steps, calls, filters and arithmetic of one rendering.
STEPS = 1_000_000
# Largest number of characters of a text, of a list, and of the output.
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
    """Jinja's sandbox that counts steps and characters; `_limited_render` starts the count."""

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
            loop.iter = _filter_node("kmodels_steps", loop.iter, [size])
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


def _filter_node(name: str, value: Any, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None, lineno=value.lineno)


def _wrap_concatenations(node: nodes.Node) -> None:
    """Adds a check of the size of each `a ~ b`."""
    for child in list(node.iter_child_nodes()):
        _wrap_concatenations(child)
    for field, value in list(node.iter_fields()):
        if isinstance(value, nodes.Concat):
            setattr(node, field, _filter_node("kmodels_size", value, []))
        elif isinstance(value, list):
            value[:] = [
                _filter_node("kmodels_size", part, []) if isinstance(part, nodes.Concat) else part
                for part in value
            ]
