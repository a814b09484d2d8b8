"""Chats as a checkpoint's own template writes them, in Jinja's language and in a sandbox."""

import datetime
import functools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import jinja2
import numpy as np
from jinja2 import meta, nodes
from jinja2.ext import Extension

from kmodels.core.errors import InputError, one_line
from kmodels.text import template_limits
from kmodels.text.settings import DEFAULT, token_text

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

Span = tuple[int, int]
# A function that a model may call: its JSON schema, or the function itself.
Tool: TypeAlias = Mapping[str, Any] | Callable[..., Any]
# Variables and functions of a template that no caller gives a value.
OWN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
# The names under which a message may hold its reasoning; the first is the one templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")
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
    return _render(template, messages, settings, continue_final_message, values)


def render_with_generation(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    **values: object,
) -> Rendered:
    """Returns a chat and the spans inside {% generation %}; arguments are those of `render`.

    Raises:
        InputError: as `render`, and if the template changes the text that it marks.
    """
    text = _render(template, messages, settings, False, values)
    # Nobody's text holds these, as they are drawn again each time.
    start, end = (f"\x02{secrets.token_hex(8)}{side}\x03" for side in "<>")
    marked = _render(template, messages, settings, False, {**values, _MARKS: (start, end)})
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


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    is_open: bool,
    values: Mapping[str, object],
) -> str:
    special = {key: token_text(settings[key]) for key in settings if key.endswith("_token")}
    special = {key: text for key, text in special.items() if text is not None}
    context = {**special, **{key: _plain(value, key) for key, value in values.items()}}
    chat = [_message(message) for message in messages]
    if not chat:
        raise InputError("the chat is empty; give at least one message")
    tag = secrets.token_hex(16)
    if is_open:
        chat[-1] = _with_tag(chat[-1], tag)
    try:
        text = template_limits.render(_compiled(template), {**context, "messages": chat})
    except Exception as error:  # a template is a program and may fail in any way
        reason = one_line(error)
        raise InputError(f"the chat template cannot write this chat: {reason}") from error
    return _before_tag(text, tag) if is_open else text


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
        reason = " ".join(str(error).split())
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


def _environment() -> template_limits.LimitedEnvironment:
    environment = template_limits.LimitedEnvironment(
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

    def parse(self, parser: "Parser") -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, as in transformers: what is set inside is unknown behind it.
        call = nodes.CallBlock(self.call_method("_marked"), [], [], body)
        return call.set_lineno(line)

    @jinja2.pass_context
    def _marked(self, context: "Context", caller: Callable[[], str]) -> str:
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
