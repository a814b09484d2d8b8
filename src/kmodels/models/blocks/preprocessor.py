"""Preprocessors of causal models: text to token ids and back."""

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np

from kmodels.core.errors import InputError, check_choice, check_names
from kmodels.core.types import Data
from kmodels.generation.task import Generates
from kmodels.models.blocks.preprocessing import on_host
from kmodels.models.blocks.text_preprocessor import TextPreprocessor, one_by_one
from kmodels.text import Example, Template, Tokenizer, Turns, encode, pack, pad
from kmodels.text.chat_template import (
    MODEL_ROLES,
    Rendered,
    as_chats,
    check_fields,
    choose_template,
    is_chat,
    variables,
)
from kmodels.text.records import has_picture
from kmodels.text.templates import AUTO, Written
from kmodels.text.texts import in_graph

LOSS_ON = ("all", "responses")


class CausalLMPreprocessor(TextPreprocessor):
    """Turns texts into token ids, labels and weights; names and arguments as in keras-hub.

    The base of each family's own, which names its tokenizer and its chat formats.

    Args:
        tokenizer: a `kmodels.text.Tokenizer`, such as the family's, its `to_dict`, or a path for
            `Tokenizer.from_file`.
        sequence_length: tokens of a row; may be set later.
        add_start_token: put <bos> in front.
        add_end_token: put <eos> behind; a chat's turns end with their own token instead.
        template: how records become text. "auto": messages by the tokenizer's own chat template,
            or by the family's chat format if it has none, other records as "instruction" does.
            "chat_template": all by the tokenizer's own. Else "instruction", "alpaca", a name of the
            family's chat formats, or a text with {instruction}, {context} and {response}. Strings
            go through as they are, and so do {prompts, responses} except for chats.
        loss_on: "all" tokens, or "responses" alone: of chats the turns of the assistant.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Attributes:
        chats: the family's chat formats by name.
        takes_images: whether messages may hold images.

    Call:
        x: a string, a list of strings, a dictionary of "prompts" and "responses" (each one text or
            a list), or a list of records as `kmodels.text.read_records` gives them. Dictionaries
            that hold "token_ids" go through untouched. Texts may be tensors of strings, also
            inside `tf.data.Dataset.map`.
        y: None; labels are made from the texts.
        sample_weight: one number for each text, which its weights are multiplied by.
        sequence_length: in place of the one set.

        It gives ({"token_ids", "padding_mask"}, labels, weights), each (B, sequence_length), or
        (sequence_length,) for a single one; int32, weights float32. Labels are the next ids, and
        weigh 0 if they are padding or, with `loss_on="responses"`, of a prompt.

    Raises:
        InputError: for anything but text, a record that the template cannot write, or an example
            with nothing to learn.
    """

    chats: ClassVar[Mapping[str, Turns]] = {}
    takes_images: ClassVar[bool] = False

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        template: str = AUTO,
        loss_on: str = "all",
        **kwargs: Any,
    ):
        check_choice("loss_on", loss_on, LOSS_ON)
        super().__init__(tokenizer, sequence_length, add_start_token, add_end_token, **kwargs)
        self.loss_on = loss_on
        self.template = template

    @property
    def template(self) -> str:
        """The template by which records become text."""
        return self._template.spec

    @template.setter
    def template(self, spec: str) -> None:
        template = Template(spec, self.chats)
        if template.turns:
            core = self.tokenizer.core
            if missing := [t for t in template.turns.tokens if core.token_to_id(t) is None]:
                raise InputError(
                    f"template {spec!r} needs the tokens {', '.join(missing)}, which the tokenizer "
                    "lacks; use template 'instruction'"
                )
        self._template = template

    def _converted(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        if y is not None:
            raise InputError(
                "labels are made from the texts; to learn responses only give "
                '{"prompts": ..., "responses": ...} with loss_on="responses"'
            )
        records, is_batch = self._records(x)
        examples = self._examples(records, length)
        x, labels, weights = pad(examples, length, self.tokenizer.pad_token_id)
        x = self._completed(x, [[example] for example in examples])
        if sample_weight is not None:
            weights = weights * _per_row(sample_weight, len(weights))
        if is_batch:
            return x, labels, weights
        return {name: value[0] for name, value in x.items()}, labels[0], weights[0]

    def _spec(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        ids = self._inputs_spec(x, length)
        shape = ids["token_ids"].shape
        return ids, keras.KerasTensor(shape, "int32"), keras.KerasTensor(shape, "float32")

    def _written(self, record: Any, reply: bool = True) -> Any:
        # Where all tokens count, no template has to tell the replies apart.
        return self._template(record, reply, self.tokenizer, self.loss_on == "responses")

    def encode(self, records: Data, sequence_length: int | None = None) -> list[Example]:
        """Returns an example with the token ids of each record, not padded.

        The records are input of the class. Each example is cut to `sequence_length + 1` tokens; the
        argument counts in place of the one set.
        """
        return self._examples(self._records(records)[0], self._row_length(sequence_length))

    def _records(self, x: Data) -> tuple[list[Any], bool]:
        """Returns records one by one, and whether there was more than one to begin with."""
        return one_by_one(x, self.reader)

    def _examples(self, records: list[Any], length: int) -> list[Example]:
        return self._encoded([self._written(record) for record in records], length)

    def _encoded(self, written: list[Any], length: int) -> list[Example]:
        return encode(
            self.tokenizer,
            written,
            length + 1,
            start=self.add_start_token,
            end=self.add_end_token,
            loss_on=self.loss_on,
            cut=self.cut,
        )

    def _completed(
        self, x: dict[str, np.ndarray], rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        """Returns the inputs of a model, given token ids, mask and the examples of each row."""
        return x

    def pack(
        self, records: Data, sequence_length: int | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Returns rows of several examples each, with the same loss for each example as alone.

        Arguments are those of `encode`. The results are those of the class, with "segment_ids" and
        "positions" in the dictionary; there are fewer rows than examples.
        """
        length = self._row_length(sequence_length)
        return pack(self.encode(records, length), length, self.tokenizer.pad_token_id)

    def generate_preprocess(self, x: Data, sequence_length: int | None = None) -> dict[str, Any]:
        """Returns token ids of prompts.

        Args:
            x: input of the class; records need no response, and a last reply is left out. Also a
                chat, a list of messages with "role" and "content", or a list of chats, see
                `chat_token_ids`.
            sequence_length: tokens of a row; a longer prompt loses its end, as in keras-hub, but a
                longer chat raises.

        Returns:
            {"token_ids", "padding_mask"}, each (B, length) int32, or (length,) for a single one.

        Raises:
            InputError: for a chat that is too long, or that its template refuses.
        """
        length, x = self._row_length(sequence_length), on_host(x)
        if is_chat(x):
            chats, is_batch = as_chats(x)
            prompts = self.chat_examples(chats)
            if (longest := max(len(prompt.ids) for prompt in prompts)) >= length:
                raise InputError(
                    f"the chat takes {longest} tokens, which leaves no room in {length} for a "
                    "reply; give max_new_tokens in place of max_length"
                )
        elif any(map(in_graph, keras.tree.flatten(x)[:1])):
            from kmodels.models.blocks import preprocessing_tensorflow

            functions = (self.generate_preprocess, self._inputs_spec)
            fixed = (functools.partial(one, sequence_length=sequence_length) for one in functions)
            return preprocessing_tensorflow.call(*fixed, x)
        else:
            records, is_batch = self._records(x)
            prompts = self._prompts(records)
        inputs = self.prompt_inputs(prompts, length)
        return inputs if is_batch else {name: value[0] for name, value in inputs.items()}

    def _prompts(self, records: list[Any]) -> list[Example]:
        written = [self._written(record, reply=False) for record in records]
        return [Example(ids, []) for ids in self._prompt_ids(written)]

    def prompt_inputs(
        self, prompts: Sequence[Example], length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the inputs of a model for prompts, such as those of `chat_examples`.

        They are {"token_ids", "padding_mask"}, each (B, length) int32; the length is by default
        that of the longest prompt.
        """
        rows = [prompt.ids for prompt in prompts]
        inputs = self._padded(rows, length or max(map(len, rows)))
        return self._completed(inputs, [[prompt] for prompt in prompts])

    def generate_postprocess(self, x: Mapping[str, Any]) -> Any:
        """Returns text of token ids, without special tokens and padding.

        For {"token_ids", "padding_mask"}, each (B, T), it is a list of texts; for (T,) a text.
        """
        ids, mask = np.asarray(x["token_ids"]), np.asarray(x["padding_mask"]).astype(bool)
        if ids.ndim == 1:
            return self.tokenizer.detokenize(ids[mask])
        return [self.tokenizer.detokenize(i[m]) for i, m in zip(ids, mask, strict=True)]

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
            if any(map(_goes_on, chats)):
                raise InputError(
                    f"the last message is the model's own, which the chat format {form!r} does not "
                    "continue; end with a message of the user"
                )
            records = [{"messages": [dict(message) for message in chat]} for chat in chats]
            return [Template(form, self.chats)(record, reply=False) for record in records]
        template = choose_template(self.tokenizer.settings, chat_template, tools)
        names = [*values, *(["tools"] if tools else [])]
        arguments = [*inspect.signature(Generates.chat).parameters][1:]
        check_names("the chat template", names, variables(template), arguments)
        write = functools.partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            chat_template=chat_template,
            tools=tools,
            **values,
        )
        texts: list[Written | Rendered] = []
        for chat in chats:
            goes_on = _goes_on(chat)
            turn = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
            check_fields(template, chat, functools.partial(write, **turn))
            texts.append(Rendered(write(chat, **turn), []))
        return texts

    def _prompt_ids(self, written: list[Any]) -> list[list[int]]:
        """Returns token ids of texts that `Template` wrote, with the start token in front."""
        texts = list(map(text_of, written))
        start = [] if self.tokenizer.start_token_id is None else [self.tokenizer.start_token_id]
        return [
            # What the tokenizer's own template writes is complete.
            tokens if isinstance(one, Rendered) or tokens[:1] == start else start + tokens
            for one, tokens in zip(written, self.tokenizer.encode_batch(texts), strict=True)
        ]

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "template": self.template, "loss_on": self.loss_on}


def text_of(written: Written | Rendered) -> str:
    """Returns the whole text that a template wrote."""
    if isinstance(written, Rendered):
        return written.text
    return "".join(part.text for part in written.parts)


def _per_row(sample_weight: Data, rows: int) -> np.ndarray:
    """Returns weights of texts, to multiply those of their tokens with."""
    weights = np.asarray(sample_weight, "float32").reshape(-1, 1)
    if len(weights) != rows:
        raise InputError(f"there are {len(weights)} sample weights for {rows} texts; give one each")
    return weights


def _goes_on(chat: Sequence[Mapping[str, Any]]) -> bool:
    return bool(chat) and chat[-1].get("role") in MODEL_ROLES
