"""Chats as token ids, and which of these are the model's own words."""

import difflib
import inspect
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from kmodels.core.errors import InputError, check_names
from kmodels.text import chat_template as templates
from kmodels.text import settings as described
from kmodels.text.chat_template import Rendered, Tool, as_chats, is_chat

# How alike a name and a misspelled one are.
NEAR = 0.8
MODEL_ROLES = ("assistant", "model")
# What transformers' method takes besides, and what does it here.
ELSEWHERE = {
    "padding": "the preprocessor pads",
    "truncation": "a chat is never cut",
    "max_length": "a chat is never cut",
    "return_tensors": "ids are lists",
    "tokenizer_kwargs": "there are none",
    "sanitize_control_tokens": "texts may hold control tokens",
}


class ChatTokenizer:
    """Adds the checkpoint's chat template to a tokenizer; the base of `Tokenizer`."""

    core: tokenizers.Tokenizer
    settings: dict[str, Any]
    stop_token_ids: list[int]

    @property
    def chat_template(self) -> Any:
        """The chat template that came with the checkpoint, several by name, or None."""
        return self.settings.get("chat_template")

    @chat_template.setter
    def chat_template(self, template: str | Mapping[str, str] | None) -> None:
        self.settings = {**self.settings, "chat_template": template}

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        continue_final_message: bool = False,
        return_dict: bool = False,
        return_assistant_tokens_mask: bool = False,
        **values: Any,
    ) -> Any:
        """Returns a chat as the checkpoint's own template writes it, equal to transformers' method.

        Args:
            conversation: messages with "role" and "content", or several such lists.
            tokenize: gives ids; False the text.
            add_generation_prompt: opens the model's turn behind it.
            chat_template: another template, or the name of one of several.
            tools: functions that the model may call, for templates that know them: their JSON
                schemas, or Python functions with annotations and Google docstrings, which
                transformers reads.
            continue_final_message: leaves the last message open, to be continued.
            return_dict: gives {"input_ids", "attention_mask"}.
            return_assistant_tokens_mask: adds "assistant_masks" to these, 1 for the model's own
                words: those in {% generation %}, or if the template has no such mark, those that
                the template writes after the opened turn, through the token that ends it.
            **values: further variables of the template, such as documents and enable_thinking.

        Returns:
            A list of ids, a text or a dictionary; a list of texts or ids, or a dictionary of lists,
            for several chats.

        Raises:
            InputError: without a template, for a chat that it refuses, a name that looks like a
                misspelled argument or variable, or a chat whose own words cannot be told apart.
        """
        for name in ELSEWHERE.keys() & {name for name, value in values.items() if value}:
            raise InputError(f"apply_chat_template takes no {name}: {ELSEWHERE[name]}")
        values = {name: value for name, value in values.items() if name not in ELSEWHERE}
        if add_generation_prompt and continue_final_message:
            raise InputError(
                "add_generation_prompt opens a new turn and continue_final_message keeps the last "
                "one open; give one of them"
            )
        if not is_chat(conversation):
            raise InputError('a chat is a list of {"role": ..., "content": ...}, or of such lists')
        template = templates.choose_template(self.settings, chat_template, tools)
        # As in transformers, a template may lack a variable; one that is misspelled is an error.
        known = [*inspect.signature(self.apply_chat_template).parameters, *ELSEWHERE]
        known += templates.variables(template)
        near = [name for name in values if difflib.get_close_matches(name, known, 1, NEAR)]
        check_names("apply_chat_template", near, known)
        chats, is_batch = as_chats(conversation)
        settings = {"tools": templates.schemas(tools), "documents": None, **values}
        settings["add_generation_prompt"] = add_generation_prompt
        if return_assistant_tokens_mask:
            if continue_final_message or not tokenize:
                raise InputError(
                    "return_assistant_tokens_mask marks tokens of whole chats; leave tokenize=True "
                    "and continue_final_message=False"
                )
            rendered = [self.render_chat(chat, chat_template, **settings) for chat in chats]
            rows = self.encode_rendered(rendered)
            return _columns([ids for ids, _ in rows], is_batch, [mask for _, mask in rows])
        texts = [
            templates.render(
                template,
                chat,
                self._named_tokens(),
                continue_final_message=continue_final_message,
                **settings,
            )
            for chat in chats
        ]
        if not tokenize:
            return texts if is_batch else texts[0]
        ids = self.encode_batch(texts)
        if return_dict:
            return _columns(ids, is_batch)
        return ids if is_batch else ids[0]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        **values: Any,
    ) -> Rendered:
        """Returns a chat as text, with the spans of the model's own words.

        Args:
            messages: of one chat. A reply with "weight" 0 gets no span, so the template need not
                mark it.
            chat_template: as of `apply_chat_template`, like all that follow.
            tools: functions that the model may call.
            **values: further variables of the template.

        Raises:
            InputError: as in `apply_chat_template`.
        """
        template = templates.choose_template(self.settings, chat_template, tools)
        settings = {
            "tools": templates.schemas(tools),
            "documents": None,
            "add_generation_prompt": False,
            **values,
        }
        names = self._named_tokens()
        weights = [one.get("weight", 1) if isinstance(one, Mapping) else 1 for one in messages]
        if not all(weights):
            messages = [{key: x for key, x in one.items() if key != "weight"} for one in messages]
        if templates.has_generation(template):
            rendered = templates.render_with_generation(template, messages, names, **settings)
            return _weighted(rendered, messages, weights)

        def text_of(count: int, is_open: bool) -> str:
            opened = {**settings, "add_generation_prompt": is_open}
            return templates.render(template, messages[:count], names, **opened)

        def opening(before: str, place: int, message: Mapping[str, Any]) -> str:
            """Returns the text before a reply; the prompt for a reply is longer.

            Gemma 4's prompt ends with an empty channel if the model is not to think.
            """
            word = secrets.token_hex(16)
            said = [*messages[:place], {"role": message["role"], "content": word}]
            bare = templates.render(template, said, names, **settings).partition(word)[0]
            return bare if before.startswith(bare) else before

        text = templates.render(template, messages, names, **settings)
        replies = []
        for place, message in enumerate(messages):
            if message.get("role") not in MODEL_ROLES or not weights[place]:
                continue
            before = text_of(place, True) if place else None
            through = text_of(place + 1, False)
            if before is not None and not through.startswith(before):
                before = opening(before, place, message)
            if before is None or not (text.startswith(through) and through.startswith(before)):
                raise InputError(
                    f"the chat template does not begin the chat as it writes messages[:{place + 1}]"
                    " alone, so the replies cannot be told apart; put {% generation %} around them "
                    "in the template, or choose another with template="
                )
            replies.append((len(before), len(before) + self._ended(through[len(before) :])))
        return Rendered(text, replies)

    def encode_rendered(self, rendered: Sequence[Rendered]) -> list[tuple[list[int], list[bool]]]:
        """Returns (token ids, mask) of each chat; the mask is True for the model's own words.

        A token that begins before a reply and reaches into it counts as the model's, as in
        transformers.
        """
        self.encode_batch([one.text for one in rendered])  # which names what is no text
        encodings = self.core.encode_batch([one.text for one in rendered], add_special_tokens=False)
        rows = []
        for one, encoding in zip(rendered, encodings, strict=True):
            starts = [start for start, _ in encoding.offsets]
            ends = [end for _, end in encoding.offsets]
            mask = [False] * len(starts)
            for begin, behind in one.replies:
                first, last = bisect_right(ends, begin), bisect_left(starts, behind)
                if begin < behind:
                    mask[first:last] = [True] * max(last - first, 0)
            rows.append((encoding.ids, mask))
        return rows

    def _ended(self, reply: str) -> int:
        """Returns the characters of a reply through the token that ends it.

        What the template writes behind that token, such as a line's end, nobody generates.
        """
        bare = reply.rstrip()
        stops = (self.core.id_to_token(i) for i in self.stop_token_ids)
        return len(bare) if bare.endswith(tuple(stop for stop in stops if stop)) else len(reply)

    def _named_tokens(self) -> dict[str, Any]:
        return described.with_names(self.settings, self._roles())

    def _roles(self) -> dict[str, str | None]:
        raise NotImplementedError

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text and nothing else."""
        raise NotImplementedError


def _weighted(
    rendered: Rendered, messages: Sequence[Mapping[str, Any]], weights: Sequence[float]
) -> Rendered:
    """Returns a chat without the spans of replies that weigh nothing."""
    if all(weights):
        return rendered
    own = [
        weight
        for message, weight in zip(messages, weights, strict=True)
        if message.get("role") in MODEL_ROLES
    ]
    if len(own) != len(rendered.replies):
        raise InputError(
            f"the chat template marks {len(rendered.replies)} of {len(own)} replies with "
            "{% generation %}, so those of weight 0 cannot be told apart; choose another template"
        )
    spans = [span for span, weight in zip(rendered.replies, own, strict=True) if weight]
    return Rendered(rendered.text, spans)


def _columns(
    ids: list[list[int]], is_batch: bool, masks: list[list[bool]] | None = None
) -> dict[str, Any]:
    encoded = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    if masks is not None:
        encoded["assistant_masks"] = [[int(learn) for learn in mask] for mask in masks]
    return encoded if is_batch else {name: rows[0] for name, rows in encoded.items()}
