"""A record as the text that a model sees, in parts to read and parts to learn."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kmodels.core.errors import InputError, check_names
from kmodels.text.chat_template import (
    REASONING,
    Rendered,
    check_fields,
    choose_template,
    variables,
)
from kmodels.text.records import (
    FIELDS,
    UNREAD,
    check_record,
    has_messages,
    has_value,
    unread_fields,
)
from kmodels.text.tokenizer import Tokenizer

_NEED_OWN = "need the tokenizer's own chat template, which it lacks or template= leaves out"
# The tokenizer's own chat template for whatever has a question and a reply, and for messages alone.
OWN, AUTO = "chat_template", "auto"


class Part(NamedTuple):
    """A stretch of text, and whether a model shall learn to write it."""

    text: str
    learn: bool


class Written(NamedTuple):
    """A record as text: parts in order, and whether the tokenizer's end token belongs behind it."""

    parts: list[Part]
    ends: bool


@dataclass(frozen=True)
class Turns:
    """The turn markers that a chat model was trained with.

    Args:
        user: a user's turn and the opening of the model's, with {content}.
        model: text after a reply, which is learnt, too.
        between: text between a reply and the next turn.
        tokens: tokens that the vocabulary must have.
        system: a turn of the system, with {content}; empty if its text comes before that of the
            user.
        prompt: text after the opening of the model's turn, in a prompt for a reply.
        aside: pattern of text that is left out of replies, such as reasoning.
        image: placeholder of an image; empty if contents are texts only.
    """

    user: str
    model: str
    between: str
    tokens: tuple[str, ...]
    system: str = ""
    prompt: str = ""
    aside: str = ""
    image: str = ""


# The templates with a context and without; each has {response} last.
INSTRUCTIONS = {
    "instruction": (
        "Instruction:\n{instruction}\n\nResponse:\n{response}",
        "Instruction:\n{instruction}\n\nContext:\n{context}\n\nResponse:\n{response}",
    ),
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n{response}",
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "{instruction}\n\n### Input:\n{context}\n\n### Response:\n{response}",
    ),
}


class Template:
    """Writes records as text.

    Args:
        spec: "auto" for messages by the tokenizer's own chat template (or by a format of `chats`
            that its vocabulary knows) and all else by "instruction"; "chat_template" for all by the
            tokenizer's own; "instruction", "alpaca", the name of a chat format, or a text with
            {instruction} and {response}, and {context} unless it follows the instruction.
        chats: chat formats by name.

    Raises:
        InputError: for an unknown name or a text without these fields.
    """

    def __init__(self, spec: str, chats: Mapping[str, Turns] | None = None):
        self.spec = spec
        self.chats = dict(chats or {})
        self.turns = self.chats.get(spec)
        if self.turns is not None or spec == OWN:
            return
        if spec in INSTRUCTIONS or spec == AUTO:
            self._bare, self._with_context = INSTRUCTIONS.get(spec, INSTRUCTIONS["instruction"])
            return
        if "{instruction}" not in spec or not spec.endswith("{response}"):
            names = ", ".join([AUTO, OWN, *INSTRUCTIONS, *self.chats])
            raise InputError(
                f"template is {spec!r}; choose {names}, or write a text with {{instruction}} "
                "that ends with {response}"
            )
        unknown = {*re.findall(r"\{(\w+)\}", spec)} & (FIELDS | UNREAD)
        if unknown := sorted(unknown - {"instruction", "context", "response"}):
            raise InputError(
                f"template has {{{unknown[0]}}}; its fields are {{instruction}}, {{context}} and "
                "{response}, whatever their names in a record"
            )
        self._bare = self._with_context = spec
        if "{context}" not in spec:
            self._with_context = spec.replace("{instruction}", "{instruction}\n\n{context}", 1)

    def __call__(
        self,
        record: object,
        reply: bool = True,
        tokenizer: Tokenizer | None = None,
        find_replies: bool = True,
    ) -> Written | Rendered:
        """Returns a record as text: its parts, or the whole of the tokenizer's own chat template.

        Args:
            record: a text, which is returned as it is, or a record of `read_records`.
            reply: False leaves out the last reply and opens the model's turn, to generate one;
                records need no response then.
            tokenizer: whose own chat template may write the record.
            find_replies: whether the spans of the replies are needed, which not every template
                marks.

        Raises:
            InputError: for a record that the template cannot write.
        """
        if isinstance(record, str):
            return Written([Part(record, True)], True)
        turns = self.turns
        if self.spec == OWN or (self.spec == AUTO and _has_messages(record)):
            turns = self.chat_format(tokenizer)
            if turns is None:
                assert tokenizer is not None
                return _by_own(record, reply, tokenizer, find_replies)
        record = _checked(record, reply)
        if "text" in record:
            return Written([Part(record["text"], True)], True)
        written = self._chat(record, turns) if turns else self._instruction(record)
        if reply:
            _check_weights(record, find_replies)
            _warn_of_reasoning(record.get("messages", ()), "")
            return written
        last = max(i for i, part in enumerate(written.parts) if part.learn)
        parts = written.parts[:last]
        return Written(
            [*parts, Part(turns.prompt, False)] if turns and turns.prompt else parts, False
        )

    def chat_format(self, tokenizer: Tokenizer | None) -> Turns | None:
        """Returns the format that writes messages, or None for the tokenizer's own template."""
        if self.turns is not None:
            return self.turns
        if tokenizer is not None and tokenizer.chat_template is not None:
            return None
        if self.spec == OWN:
            names = " or ".join(f"template={name!r}" for name in self.chats) or "'instruction'"
            raise InputError(f"the tokenizer has no chat template of its own; use {names}")
        core = tokenizer.core if tokenizer is not None else None
        for turns in self.chats.values():
            if core is None or all(core.token_to_id(text) is not None for text in turns.tokens):
                return turns
        lacking = ", ".join(text for turns in self.chats.values() for text in turns.tokens)
        raise InputError(
            "messages need a chat template: the tokenizer has none"
            + (f", and its vocabulary lacks {lacking}" if lacking else "")
            + "; set tokenizer.chat_template"
        )

    def _instruction(self, record: dict[str, Any]) -> Written:
        if "messages" in record:
            raise InputError(f"messages need a chat template; template is {self.spec!r}")
        if "prompts" in record:
            return Written([Part(record["prompts"], False), Part(record["responses"], True)], True)
        template = self._with_context if record["context"].strip() else self._bare
        prompt = re.sub(
            r"\{(instruction|context)\}",
            lambda match: record[match[1]],
            template.removesuffix("{response}"),
        )
        return Written([Part(prompt, False), Part(record["response"], True)], True)

    def _chat(self, record: dict[str, Any], turns: Turns) -> Written:
        if record.get("chat_template_kwargs"):
            raise InputError(f"chat_template_kwargs {_NEED_OWN}")
        messages = record.get("messages") or _as_messages(record)
        system, parts = "", []
        for message in messages:
            calls = message.get("tool_calls") or message.get("function_call")
            if message["role"] == "tool" or calls or "tools" in record:
                raise InputError(f"tools {_NEED_OWN}")
            content = _content(message["content"], turns)
            if message["role"] == "system" and turns.system:
                parts.append(Part(turns.system.replace("{content}", content), False))
            elif message["role"] == "system":
                system = content + "\n\n"
            elif message["role"] == "user":
                parts.append(Part(turns.user.replace("{content}", system + content), False))
                system = ""
            else:
                if turns.aside:
                    content = re.sub(turns.aside, "", content, flags=re.DOTALL).strip()
                learn = message.get("weight", 1) != 0
                parts += [Part(content + turns.model, learn), Part(turns.between, False)]
        if not any(part.learn for part in parts):
            raise InputError("field 'messages' has no reply to learn from")
        if not parts[-1].text or messages[-1]["role"] != "model":
            parts = parts[:-1]  # a question without a reply teaches nothing
        return Written(parts, False)


def _content(content: str | Sequence[Mapping[str, Any]], turns: Turns) -> str:
    """Returns the content of a message as one text, like templates of checkpoints with images."""
    if isinstance(content, str):
        return content.strip()
    if not turns.image:
        raise InputError("a message's content is in parts; give one text")
    return "".join(
        turns.image if part["type"] == "image" else part["text"].strip() for part in content
    )


def _checked(record: object, reply: bool) -> dict[str, Any]:
    """Returns a record in its usual form, and warns of fields that are not read."""
    record = record if reply else _with_reply(record)
    checked = check_record(record)
    if isinstance(record, Mapping) and (names := sorted(unread_fields(record))):
        warnings.warn(
            f"a record has {' and '.join(names)}, which kmodels does not read", stacklevel=2
        )
    return checked


def _has_messages(record: object) -> bool:
    return isinstance(record, Mapping) and has_messages(record)


def _by_own(record: object, reply: bool, tokenizer: Tokenizer, find_replies: bool) -> Rendered:
    """Returns a record as the tokenizer's own chat template writes it."""
    record = _checked(record, reply or _has_messages(record))
    if "text" in record:
        raise InputError("a chat template writes messages; field 'text' holds running text")
    messages = [
        {**message, "role": "assistant"} if message["role"] == "model" else message
        for message in record.get("messages") or _as_messages(record)
    ]
    learnt = [one.get("weight", 1) != 0 for one in messages if one["role"] == "assistant"]
    tools, values = record.get("tools"), record.get("chat_template_kwargs", {})
    template = choose_template(tokenizer.settings, None, tools)
    known = variables(template)
    if tools and "tools" not in known:
        raise InputError("the chat template does not write tools; give another, or no tools")
    check_names("the chat template", values, [name for name in known if name != "tools"])
    write = partial(tokenizer.apply_chat_template, tokenize=False, tools=tools, **values)
    check_fields(template, messages, write)
    if not reply:
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return Rendered(write(messages, add_generation_prompt=True), [])
    if not any(learnt):
        raise InputError("field 'messages' has no reply to learn from")
    _warn_of_reasoning(messages, template)
    if find_replies:
        return tokenizer.render_chat(messages, tools=tools, **values)
    _check_weights(record, find_replies)
    return Rendered(write(messages), [])


def _check_weights(record: dict[str, Any], find_replies: bool) -> None:
    replies = [one for one in record.get("messages", ()) if one["role"] == "model"]
    if not find_replies and any(one.get("weight") == 0 for one in replies):
        raise InputError("a reply has weight 0, so loss_on has to be 'responses'")


def _warn_of_reasoning(messages: Iterable[Mapping[str, Any]], template: str) -> None:
    names = {name for message in messages for name in REASONING if has_value(message, name)}
    if names and not any(name in template for name in REASONING):
        warnings.warn(
            f"a reply has {' and '.join(sorted(names))}, which the chat template does not write, "
            "so it is not learnt; put it into the content, or give a template that writes it",
            stacklevel=2,
        )


def _as_messages(record: dict[str, Any]) -> list[dict[str, str]]:
    if "prompts" in record:
        question, reply = record["prompts"], record["responses"]
    else:
        context = record["context"].strip()
        question = record["instruction"] + (f"\n\n{context}" if context else "")
        reply = record["response"]
    return [{"role": "user", "content": question}, {"role": "model", "content": reply}]


def _with_reply(record: object) -> Any:
    """Returns the record with some reply as the last, to be cut off again."""
    if not isinstance(record, Mapping):
        return record
    record = dict(record)
    if isinstance(record.get("messages"), list):
        messages = list(record["messages"])
        if messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") != "user":
            return record
        return {**record, "messages": [*messages, {"role": "model", "content": "."}]}
    for question, reply in (
        ("instruction", "response"),
        ("prompts", "responses"),
        ("prompt", "response"),
    ):
        if question in record:
            return {**record, reply: "."}
    return record
