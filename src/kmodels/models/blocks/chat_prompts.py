"""Chats as the token ids that a model answers."""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kmodels.core.errors import InputError, check_names
from kmodels.generation.task import Generates
from kmodels.text import Example, Template, Tokenizer, Turns
from kmodels.text.chat import MODEL_ROLES
from kmodels.text.chat_template import Rendered, choose_template, variables
from kmodels.text.records import has_picture
from kmodels.text.templates import AUTO, Written


class ChatPrompts:
    """Adds the prompts of chats to a preprocessor.

    Attributes:
        chats: the family's chat formats by name.
        reader: name of the model, for errors.
        takes_images: whether messages may hold images.
    """

    chats: ClassVar[Mapping[str, Turns]] = {}
    reader: ClassVar[str] = "the model"
    takes_images: ClassVar[bool] = False
    tokenizer: Tokenizer
    template: str

    @property
    def chat_format(self) -> str | None:
        """The family's format that chats are written in; None for the tokenizer's own template.

        The tokenizer's template takes precedence, unless `template` names a format.

        Raises:
            InputError: if there is neither.
        """
        if self.template in self.chats:
            return self.template
        turns = Template(AUTO, self.chats).chat_format(self.tokenizer)
        return next((name for name, one in self.chats.items() if one is turns), None)

    @property
    def chat_stop_token_ids(self) -> list[int]:
        """Ids that end a reply: those that end any text, and the end of a turn."""
        token_ids = (self.tokenizer.core.token_to_id(turns.model) for turns in self.chats.values())
        ends = [i for i in token_ids if i is not None]
        return list(dict.fromkeys([*self.tokenizer.stop_token_ids, *ends]))

    def chat_token_ids(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **values: Any,
    ) -> list[list[int]]:
        """Returns token ids of chats whose next message is the model's, not padded.

        The tokenizer's own chat template writes them, with the ids of transformers; if
        `chat_format` is set, a format of the family does. A last message of the model is continued.

        Args:
            chats: each a list of messages with "role" and "content".
            tools: JSON schemas of functions, for templates that know them.
            chat_template: another template, or the name of one of several.
            **values: further variables of the template, such as enable_thinking.

        Raises:
            InputError: if there is no template, it refuses a chat, or it does not use a value.
        """
        options = {"tools": tools, "chat_template": chat_template, **values}
        return [example.ids for example in self.chat_examples(chats, **options)]

    def chat_examples(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], **options: Any
    ) -> list[Example]:
        """Same as `chat_token_ids`, but returns examples."""
        if any(map(has_picture, itertools.chain(*chats))):
            raise InputError(f"{self.reader} takes only text here; leave images out of messages")
        return [Example(ids, []) for ids in self._prompt_ids(self._chats_written(chats, **options))]

    def _chats_written(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **values: Any,
    ) -> list[Written | Rendered]:
        """Returns chats as texts, each with the model's turn opened or continued."""
        form = self.chat_format if chat_template is None else None
        if form is not None:
            arguments = [*(["tools"] if tools is not None else []), *values]
            if arguments:
                raise InputError(
                    f"the chat format {form!r} does not support {', '.join(arguments)}; give "
                    "the template of the checkpoint as chat_template="
                )
            return [self._by_format(form, chat) for chat in chats]
        return [self._by_own(chat, tools, chat_template, values) for chat in chats]

    def _by_format(self, form: str, chat: Sequence[Mapping[str, Any]]) -> Written | Rendered:
        if _goes_on(chat):
            raise InputError(
                f"the last message is the model's own, which the chat format {form!r} does not "
                "continue; end with a message of the user"
            )
        record = {"messages": [dict(message) for message in chat]}
        return Template(form, self.chats)(record, reply=False)

    def _by_own(
        self,
        chat: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        values: Mapping[str, Any],
    ) -> Rendered:
        template = choose_template(self.tokenizer.settings, chat_template, tools)
        names = [*values, *(["tools"] if tools else [])]
        arguments = [
            name for name in inspect.signature(Generates.chat).parameters if name != "self"
        ]
        check_names("the chat template", names, variables(template), arguments)
        text = self.tokenizer.apply_chat_template(
            chat,
            tokenize=False,
            add_generation_prompt=not _goes_on(chat),
            continue_final_message=_goes_on(chat),
            chat_template=chat_template,
            tools=tools,
            **values,
        )
        return Rendered(text, [])

    def _prompt_ids(self, written: list[Any]) -> list[list[int]]:
        """Returns token ids of texts that `Template` wrote, with the start token in front."""
        texts = [
            one.text if isinstance(one, Rendered) else "".join(part.text for part in one.parts)
            for one in written
        ]
        start = [] if self.tokenizer.start_token_id is None else [self.tokenizer.start_token_id]
        return [
            # What the tokenizer's own template writes is complete.
            tokens if isinstance(one, Rendered) or tokens[:1] == start else start + tokens
            for one, tokens in zip(written, self.tokenizer.encode_batch(texts), strict=True)
        ]


def _goes_on(chat: Sequence[Mapping[str, Any]]) -> bool:
    return bool(chat) and chat[-1].get("role") in MODEL_ROLES
