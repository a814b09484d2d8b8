"""A record as the text that a model sees, in parts to read and parts to learn."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kmodels.core.errors import InputError
from kmodels.text.records import check_record


class Part(NamedTuple):
    """A stretch of text.

    Attributes:
        text: the text.
        learn: whether a model shall learn to write it.
    """

    text: str
    learn: bool


class Written(NamedTuple):
    """A record as text.

    Attributes:
        parts: in order.
        ends: whether the tokenizer's end token belongs behind it.
    """

    parts: list[Part]
    ends: bool


@dataclass(frozen=True)
class Turns:
    """The turn markers that a chat model was trained with.

    Args:
        user: a user's turn and the opening of the model's, with {content}.
        model: what follows a reply and is learnt.
        between: what stands between a reply and the next turn.
        tokens: tokens that the vocabulary must have.
    """

    user: str
    model: str
    between: str
    tokens: tuple[str, ...]


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
        spec: "instruction", "alpaca", the name of a chat format, or a text with {instruction} and
            {response}, and {context} where it shall not follow the instruction.
        chats: chat formats by name.

    Raises:
        InputError: for an unknown name or a text without these fields.
    """

    def __init__(self, spec: str, chats: Mapping[str, Turns] | None = None):
        self.spec = spec
        self.turns = (chats or {}).get(spec)
        if self.turns is not None:
            return
        if spec in INSTRUCTIONS:
            self._bare, self._with_context = INSTRUCTIONS[spec]
            return
        if "{instruction}" not in spec or not spec.endswith("{response}"):
            names = ", ".join([*INSTRUCTIONS, *(chats or {})])
            raise InputError(
                f"template is {spec!r}; choose {names}, or write a text with {{instruction}} "
                "that ends with {response}"
            )
        self._bare = self._with_context = spec
        if "{context}" not in spec:
            self._with_context = spec.replace("{instruction}", "{instruction}\n\n{context}", 1)

    def __call__(self, record: object, reply: bool = True) -> Written:
        """Returns a record as text.

        Args:
            record: a text, or what `read_records` gives. Texts go through as they are.
            reply: False leaves out the last reply and opens the model's turn, to generate one;
                records need no response then.

        Returns:
            The parts in order.

        Raises:
            InputError: for a record that the template cannot write.
        """
        if isinstance(record, str):
            return Written([Part(record, True)], True)
        record = check_record(record if reply else _with_reply(record))
        if "text" in record:
            return Written([Part(record["text"], True)], True)
        written = self._chat(record) if self.turns else self._instruction(record)
        if reply:
            return written
        last = max(i for i, part in enumerate(written.parts) if part.learn)
        return Written(written.parts[:last], False)

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

    def _chat(self, record: dict[str, Any]) -> Written:
        assert self.turns is not None
        messages = record.get("messages") or _as_messages(record)
        system, parts = "", []
        for message in messages:
            content = message["content"].strip()
            if message["role"] == "system":
                system = content + "\n\n"
            elif message["role"] == "user":
                parts.append(Part(self.turns.user.replace("{content}", system + content), False))
                system = ""
            else:
                parts += [Part(content + self.turns.model, True), Part(self.turns.between, False)]
        if not any(part.learn for part in parts):
            raise InputError("field 'messages' has no reply to learn from")
        if not parts[-1].text or not parts[-2].learn:
            parts = parts[:-1]  # a question without a reply teaches nothing
        return Written(parts, False)


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
        return {"messages": [*messages, {"role": "model", "content": "."}]}
    for question, reply in (
        ("instruction", "response"),
        ("prompts", "responses"),
        ("prompt", "response"),
    ):
        if question in record:
            return {**record, reply: "."}
    return record
