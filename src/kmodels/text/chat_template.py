"""Chats as a checkpoint's own template writes them, in Jinja's language and in a sandbox."""

import datetime
import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jinja2
import numpy as np
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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
# Characters of an error that are shown; the message of raise_exception may be any text.
LONGEST_REASON = 1000


class Rendered(NamedTuple):
    """A chat as one text, and spans (first character, end) of the model's own words in it."""

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
    chats, is_batch = ([x], False) if isinstance(x[0], Mapping) else (list(x), True)
    for chat in chats:
        if not isinstance(chat, list | tuple) or not all(isinstance(m, Mapping) for m in chat):
            raise InputError(
                'a chat holds something else than messages; give {"role": ..., "content": ...} each'
            )
    return chats, is_batch


def choose_template(
    settings: Mapping[str, Any], wanted: str | None, tools: Sequence[Tool] | None
) -> str:
    """Returns the template for a chat: `wanted`, the checkpoint's of that name, or its default."""
    templates = settings.get("chat_template")
    if not isinstance(templates, Mapping):
        if (template := templates if wanted is None else wanted) is None:
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


@functools.lru_cache(maxsize=64)
def variables(template: str) -> tuple[str, ...]:
    """Returns the names of the variables that a caller may give a template, sorted.

    For one with a mistake, which `render` names, there are none.
    """
    try:
        with _limited():
            names = meta.find_undeclared_variables(_environment().parse(template))
    except Exception:  # also for one that is nested too deeply
        return ()
    return tuple(sorted(name for name in names - OWN if not name.endswith("_token")))


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

    Messages have "role", "content" and other fields of the template: names whose value is None are
    left out, and reasoning is there under each of its names. The template may use the special
    tokens of the settings.

    Raises:
        InputError: for a template that is damaged, a chat that it refuses, or values other than
            texts, numbers, lists and dictionaries.
    """
    special = {key: token_text(settings[key]) for key in settings if key.endswith("_token")}
    special = {key: text for key, text in special.items() if text is not None}
    tag = secrets.token_hex(16)
    try:
        context = {**special, **{key: _plain(value, key) for key, value in values.items()}}
        chat = [_message(message) for message in messages]
        if not chat:
            raise InputError("the chat is empty; give at least one message")
        if continue_final_message:
            chat[-1] = _with_tag(chat[-1], tag)
        with _limited():
            text = _compiled(template).render({**context, "messages": chat})
    except InputError:
        raise
    except Exception as error:  # a template is a program and may fail in any way
        reason = one_line(error)[:LONGEST_REASON]
        raise InputError(f"the chat template cannot write this chat: {reason}") from error
    return _before_tag(text, tag) if continue_final_message else text


def render_with_generation(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    **values: Any,
) -> Rendered:
    """Returns a chat and the spans inside {% generation %}; arguments are those of `render`.

    A template that changes the text that it marks is refused.
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
    """Raises `InputError` for calls of tools and parts of a content that a template does not write.

    A template skips parts and fields that it does not read, or writes a list as Python does.
    `write` returns messages as the template writes them.
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
    """Returns tools with the JSON schema of each function, by its signature and docstring."""
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


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
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
    environment.globals |= {"raise_exception": _refuse, "strftime_now": strftime_now}
    return environment


def strftime_now(form: str) -> str:
    """Returns the time in the form of `strftime`."""
    return datetime.datetime.now().strftime(form)


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

# Loop steps, calls, filters and arithmetic of one rendering, and its seconds of computing.
STEPS, SECONDS = 1_000_000, 5
# Largest number of characters in a template, in one value, and in all values of a rendering.
SOURCE, CHARACTERS, MADE = 200_000, 20_000_000, 300_000_000
# The largest width or count that a function may get, and bits of a whole number.
NUMBER, BITS = 1_000_000, 100_000
# Characters that an element of a list counts for.
_ELEMENT = 100
# Largest input of functions whose time or memory grows faster than their input, and of a format.
LONGEST = {
    **dict.fromkeys(("pprint", "striptags", "urlize", "wordwrap", "format", "format_map"), 10_000),
    **dict.fromkeys(("encode", "decode", "strftime_now"), 1_000),
    **dict.fromkeys(("sum", "title", "urlencode", "wordcount"), 1_000_000),
}
# Functions that make as much as a number says.
NUMBERED = {"batch", "center", "ljust", "rjust", "round", "slice", "to_bytes", "wordwrap", "zfill"}
# Characters by which the result of a function may be larger than its input.
GROWTH: dict[str, Callable[..., int]] = {
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "indent": lambda text, width=4, *_, **__: len(str(text).splitlines()) * _width(width),
    "join": lambda parts, d="", *_, **__: len(parts) * len(str(d)),
    "replace": lambda text, old, new, *_, **__: str(text).count(str(old)) * len(str(new)),
    "tojson": lambda value, *_, indent=0, **__: _size(value) * _width(indent or 0),
    "translate": lambda text, table: len(text) * _size(table),
}
# The budget of the rendering that runs here.
_LEFT: ContextVar["_Budget"] = ContextVar("left")
_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #\d.]*|\{[^{}]*\}")
# A width that is itself an argument.
_WIDTH_ARGUMENT = re.compile(r"%(?:\([^)]*\))?[-+ #\d.]*\*|\{[^{}]*\{")


class TooMuchError(Exception):
    """A template takes more steps or writes more characters than any chat needs."""

    def __init__(self, problem: str):
        super().__init__(f"it {problem}; give another chat_template=")


class _Budget:
    def __init__(self) -> None:
        self.steps, self.characters = STEPS, MADE
        self.end = time.thread_time() + SECONDS


@contextmanager
def _limited() -> Iterator[None]:
    token = _LEFT.set(_Budget())
    try:
        yield
    finally:
        _LEFT.reset(token)


class _Namespace(Namespace):
    # Jinja's `repr` never ends for a namespace that contains itself.
    __repr__ = object.__repr__


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox that counts steps and characters inside `_limited`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any):
        super().__init__(**options, optimized=False, finalize=_written)
        del self.globals["lipsum"]  # writes as many paragraphs as it is asked for
        self.globals["namespace"] = _Namespace
        self.filters["tojson"] = _to_json
        for table in (self.filters, self.tests):
            for name, function in table.items():
                table[name] = _counted(name, function)
        self.filters |= {"kmodels_steps": _each, "kmodels_size": _sized, "kmodels_join": _joined}
        self.text = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        _check_size(len(source), SOURCE, "has")
        tree = super()._parse(source, name, filename)
        self.text = _text_of(tree)
        for loop in list(tree.find_all(nodes.For)):
            size = nodes.Const(_text_of(loop), lineno=loop.lineno)
            loop.iter = _filter_node("kmodels_steps", loop.iter, [size])
        _wrap_expressions(tree)
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
        # The sandbox's own function for str.format has no owner.
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        name = getattr(obj, "__name__", "")
        if isinstance(obj, LoopContext):  # of a recursive loop
            args = tuple(_each(one, self.text) for one in args)
        if isinstance(owner, str) and name == "join":
            args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
            _check_call(name, *args, owner)
        elif owner is not None:
            _check_call(name, owner, *args, **kwargs)
        else:
            _check_call(name, args)
        return _sized(super().call(context, obj, *args, **kwargs))


def _spend(steps: int, characters: int = 0) -> None:
    left = _LEFT.get()
    left.steps -= steps
    left.characters -= characters
    if left.steps < 0:
        raise TooMuchError(f"takes more than {STEPS:,} steps")
    if left.characters < 0:
        _check_size(MADE + 1, MADE)
    if time.thread_time() > left.end:
        raise TooMuchError(f"takes more than {SECONDS} seconds")


def _check_size(size: int, most: int = CHARACTERS, what: str = "makes") -> None:
    if size > most:
        raise TooMuchError(f"{what} more than {most:,} characters")


def _check_bits(bits: int) -> None:
    if bits > BITS:
        raise TooMuchError(f"computes a number of more than {BITS:,} bits")


def _each(values: Iterable[Any], text: int = 0) -> Iterator[Any]:
    """Counts the steps of a loop, each with the text that stands in it."""
    for value in values:
        _spend(1, text)
        yield value


def _size(value: Any, most: int = CHARACTERS) -> int:
    """Counts the characters in a value and its elements, and stops once they exceed `most`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if not isinstance(value, Collection) or isinstance(value, range):
        return 0
    size = len(value) * _ELEMENT
    for part in value:
        if size > most:
            break
        size += _size(part, most - size)
    return size


def _sized(value: Any) -> Any:
    """Returns a new value, unless it is too large."""
    if isinstance(value, bytes):
        raise TooMuchError("makes bytes, which no chat has")
    if isinstance(value, int):
        _check_bits(value.bit_length())
    _check_size(_size(value))
    if isinstance(value, str | list | tuple | dict):
        _spend(0, len(value) * (1 if isinstance(value, str) else _ELEMENT))
    return value


@jinja2.pass_context
def _written(context: Context, value: Any) -> Any:
    """Counts the characters that an expression writes."""
    _spend(1, _size(value))
    return value


@jinja2.pass_eval_context
def _joined(context: nodes.EvalContext, parts: list[Any]) -> str:
    """Returns `a ~ b ~ c`."""
    return _sized((markup_join if context.autoescape else str_join)(_sized(parts)))


def _check_call(name: str, value: Any, /, *args: Any, **kwargs: Any) -> None:
    """Checks the arguments of a filter, test, method or function before it is called."""
    _spend(1)
    numbers = (one for one in (*args, *kwargs.values()) if isinstance(one, int))
    if name in NUMBERED and any(abs(one) > NUMBER for one in numbers):
        raise TooMuchError(f"gives {name} a number over {NUMBER:,}")
    if name in LONGEST:
        _check_size(_size(value), LONGEST[name], f"gives {name}")
    if name in ("format", "format_map"):
        _check_format(str(value), (args, kwargs))
    if name in GROWTH:
        _check_size(_size(value) + GROWTH[name](value, *args, **kwargs))


def _check_format(text: str, args: Any) -> None:
    _check_size(len(text), LONGEST["format"], "gives format")
    if _WIDTH_ARGUMENT.search(text.replace("{{", "")):
        raise TooMuchError("formats with a width that is an argument")
    widths = map(int, re.findall(r"\d+", " ".join(_FIELD.findall(text))))
    _check_size((text.count("%") + text.count("{") + 1) * _size(args) + sum(widths))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    many, count = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(many, str | list | tuple) and isinstance(count, int):
        _check_size(_size(many) * count)


def _width(width: Any) -> int:
    return width if isinstance(width, int) else len(width)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter or test that checks its arguments before and its result after."""
    # A context or environment comes first in some.
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        value, others = args[first], args[first + 1 :]
        if isinstance(value, Iterator) and (name in LONGEST or name in GROWTH):
            value = list(value)
        _check_call(name, value, *others, **kwargs)
        return _sized(function(*args[:first], value, *others, **kwargs))

    return counted


def _filter_node(name: str, value: Any, args: Sequence[nodes.Expr] = ()) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _text_of(node: nodes.Node) -> int:
    return sum(len(part.data) for part in node.find_all(nodes.TemplateData))


def _wrap_expressions(node: nodes.Node) -> None:
    """Adds a check of the size of each text, list and object that no function makes."""

    def wrapped(part: Any) -> Any:
        if isinstance(part, nodes.Concat):
            return _filter_node("kmodels_join", nodes.List(part.nodes, lineno=part.lineno))
        is_slice = isinstance(part, nodes.Getitem) and isinstance(part.arg, nodes.Slice)
        is_tuple = isinstance(part, nodes.Tuple) and part.ctx == "load"
        if is_slice or is_tuple or isinstance(part, nodes.List | nodes.Dict):
            return _filter_node("kmodels_size", part)
        return part

    for child in list(node.iter_child_nodes()):
        _wrap_expressions(child)
    for field, value in list(node.iter_fields()):
        is_list = isinstance(value, list)
        setattr(node, field, [wrapped(one) for one in value] if is_list else wrapped(value))
