"""Records to train on in their usual form, with errors that name the field."""

import json
from dataclasses import dataclass, field
from typing import Any

from kmodels.core.errors import InputError

Record = dict[str, Any]
_PAIRS = (
    ("prompts", "responses"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "response"),
    ("instruction", "output"),
)
# The names of the images of a record, one or a list.
PICTURES = ("images", "image")
FORMS = (
    "instruction and response (or output), prompts and responses, messages, conversations, or text"
)
ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "model",
    "model": "model",
    "tool": "tool",
}
# What ShareGPT's files call a turn's author.
AUTHORS = {
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "claude"), "assistant"),
    "observation": "tool",
}
# Fields of a turn that change nothing of its text.
_UNUSED = ("markdown", "text")
# LLaVA's mark in a text where an image belongs.
IMAGE = "<image>"


@dataclass(frozen=True)
class Records:
    """The records of a file or a folder.

    Attributes:
        rows: each one of {"text"}, {"prompts", "responses"}, {"instruction", "context",
            "response"} or {"messages": [{"role", "content"}, ...]}, the last with "tools" where the
            line has them, and each with "images" or "image" where the line has these. A message
            keeps what else it has, such as "tool_calls".
        skipped: one line for each bad record that was left out.
    """

    rows: list[Record] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


def check_record(value: object) -> Record:
    """Returns one record in its usual form.

    Args:
        value: what a line of a file holds.

    Returns:
        A dictionary as in `Records.rows`.

    Raises:
        InputError: naming the field that lacks, is no text, or is empty.
    """
    if not isinstance(value, dict):
        raise InputError(f"a {type(value).__name__} where an object belongs, with {FORMS}")
    if "conversations" in value and "messages" not in value:
        value = _of_conversations(value)
    return {**_texts(value), **{name: value[name] for name in PICTURES if _held(value, name)}}


def _of_conversations(value: dict[str, Any]) -> dict[str, Any]:
    """Returns a record of ShareGPT or LLaVA as one with messages."""
    turns = value["conversations"]
    if not (isinstance(turns, list) and turns and all(isinstance(one, dict) for one in turns)):
        raise InputError("field 'conversations' is not a list of objects with from and value")
    messages = []
    for place, turn in enumerate(turns):
        at = f"conversations[{place}]."
        author, said = (n if n in turn else m for n, m in (("from", "role"), ("value", "content")))
        role = AUTHORS.get(_text(turn, author, at=at))
        if role is None:
            raise InputError(
                f"field '{at}{author}' is {turn[author]!r}; known are {', '.join(AUTHORS)}"
            )
        rest = {key: part for key, part in turn.items() if key not in (author, said, *_UNUSED)}
        messages.append({**rest, "role": role, "content": _text(turn, said, at=at)})
    system = value.get("system")
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": _text(value, "system")})
    tools = value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"field 'tools' is not JSON: {error}") from error
    return {**value, "tools": tools, **_placed(value, messages)}


def _placed(value: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns messages whose marks of images are parts with the record's images."""
    name = next((name for name in PICTURES if _held(value, name)), None)
    if name is None:
        return {"messages": messages}
    given = value[name] if isinstance(value[name], list) else [value[name]]
    marks = sum(message["content"].count(IMAGE) for message in messages)
    if not marks:
        return {"messages": messages}
    if marks != len(given):
        raise InputError(f"there are {len(given)} images and {marks} marks {IMAGE}")
    images = iter(given)
    for message in messages:
        texts = message["content"].split(IMAGE)
        if len(texts) == 1:
            continue
        parts: list[dict[str, Any]] = []
        for i, text in enumerate(texts):
            if i:
                parts.append({"type": "image", "path": next(images)})
            if text.strip():
                parts.append({"type": "text", "text": text.strip("\n")})
        message["content"] = parts
    return {"messages": messages, **dict.fromkeys(PICTURES)}


def _held(value: dict[str, Any], name: str) -> bool:
    """Returns whether a record has images of this name."""
    given = value.get(name)
    return given is not None and not (isinstance(given, list | tuple | str) and not given)


def holds_pictures(record: object) -> bool:
    """Returns whether a record has images, beside its texts or in a message."""
    if not isinstance(record, dict):
        return False
    messages = record.get("messages")
    return any(_held(record, name) for name in PICTURES) or (
        isinstance(messages, list | tuple) and any(map(has_picture, messages))
    )


def has_picture(message: object) -> bool:
    """Returns whether a message's content is in parts of which one is an image."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list | tuple) and any(
        isinstance(part, dict) and part.get("type") == "image" for part in content
    )


def _texts(value: dict[str, Any]) -> Record:
    if "messages" in value:
        messages, tools = _messages(value["messages"]), value.get("tools")
        if tools is None:
            return {"messages": messages}
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InputError("field 'tools' is not a list of JSON schemas")
        return {"messages": messages, "tools": tools}
    pair = next((pair for pair in _PAIRS if all(name in value for name in pair)), None)
    if pair is None:
        if "text" in value:
            return {"text": _text(value, "text")}
        raise InputError(_lacking(value))
    prompt, response = pair
    if prompt != "instruction":
        return {"prompts": _text(value, prompt), "responses": _text(value, response)}
    context = next((name for name in ("context", "input") if value.get(name) is not None), None)
    return {
        "instruction": _text(value, "instruction"),
        "context": _text(value, context, may_be_empty=True) if context else "",
        "response": _text(value, response),
    }


def _lacking(value: dict[str, Any]) -> str:
    for prompt, response in _PAIRS:
        if prompt in value:
            others = [second for first, second in _PAIRS if first == prompt]
            return f"field {' or '.join(others)!r} is missing beside {prompt!r}"
        if response in value:
            return f"field {prompt!r} is missing beside {response!r}"
    return f"the fields {', '.join(value) or 'of an empty object'} are not a record: give {FORMS}"


def _text(value: dict[str, Any], name: str, may_be_empty: bool = False, at: str = "") -> str:
    text = value.get(name)
    if not isinstance(text, str):
        kind = "missing" if name not in value else f"a {type(text).__name__}, not text"
        raise InputError(f"field '{at}{name}' is {kind}")
    if not text.strip() and not may_be_empty:
        raise InputError(f"field '{at}{name}' is empty")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"field '{at}{name}' holds half of a surrogate pair")
    return text


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InputError("field 'messages' is not a list of messages")
    checked = []
    for place, message in enumerate(messages):
        at = f"messages[{place}]."
        if not isinstance(message, dict):
            raise InputError(f"field 'messages[{place}]' is not an object with role and content")
        role = _text(message, "role", at=at)
        if role not in ROLES:
            raise InputError(f"field '{at}role' is {role!r}; known are {', '.join(ROLES)}")
        kept = {name: value for name, value in message.items() if value is not None}
        checked.append({**kept, "role": ROLES[role], **_content(kept, at)})
    if any(m["role"] == "tool" or "tool_calls" in m for m in checked):
        return checked  # their order is the template's matter
    turns = [m["role"] for m in checked if m["role"] != "system"]
    if any(m["role"] == "system" for m in checked[1:]):
        raise InputError("field 'messages' has a system message that is not the first")
    if turns != (["user", "model"] * len(turns))[: len(turns)] or not turns:
        raise InputError("field 'messages' must go user, assistant, user, assistant")
    return checked


def _content(message: dict[str, Any], at: str) -> dict[str, Any]:
    """Returns what a message says: a text, or parts of one, or nothing where it calls tools."""
    content = message.get("content")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        return {}
    if content is None and message.get("tool_calls"):
        return {}
    return {"content": _text(message, "content", bool(message.get("tool_calls")), at)}
