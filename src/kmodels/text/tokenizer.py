"""Text to token ids and back, from the tokenizer files that models come with."""

import difflib
import inspect
import json
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import tokenizers
from tokenizers.processors import TemplateProcessing

from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_names
from kmodels.core.files import atomic_write, limited, local_path
from kmodels.core.remote import local_copy
from kmodels.text import chat_template as templates
from kmodels.text import gguf, sentencepiece
from kmodels.text import settings as described
from kmodels.text.byte_level import check_ids
from kmodels.text.chat_template import MODEL_ROLES, Rendered, Tool, as_chats, is_chat
from kmodels.text.pieces import MARKS, TURNS
from kmodels.text.texts import as_ids, as_text, as_texts, in_graph

T = TypeVar("T")
# The last is where a preset of keras-hub has it, whose tokenizer.json is something else.
FILES = ("assets/tokenizer/vocabulary.spm", "tokenizer.json", "tokenizer.model")
# The settings for transformers of a tokenizer that came without any.
FOR_BPE = "_for_bpe_even_though_it_will_corrupt_output"
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# How alike a name and a misspelled one are.
NEAR = 0.8
# What transformers' method takes besides, and what does it here.
ELSEWHERE = {
    "padding": "the preprocessor pads",
    "truncation": "a chat is never cut",
    "max_length": "a chat is never cut",
    "return_tensors": "ids are lists",
    "tokenizer_kwargs": "there are none",
    "sanitize_control_tokens": "texts may hold control tokens",
}

# Classes of transformers that put nothing around a text unless tokenizer.json says so: SmolLM's.
BARE_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


class Tokenizer(Checked):
    """A `tokenizers.Tokenizer` with the methods and names of keras-hub's tokenizers.

    The tokens that start, end and pad a text are those that the tokenizer's files name:
    tokenizer_config.json, the post-processor of tokenizer.json, a SentencePiece model's trainer
    spec, GGUF metadata. No token gets a role because of its text, except that `roles` has those of
    a model family for files that name none.

    Args:
        core: the tokenizer itself.
        start: text of the token that starts a sequence; by default the one that the settings or the
            post-processor name.
        end: text of the token that ends a sequence; by default the same way, then the first of
            `stop`.
        pad: text of the padding token; by default the one that the settings name, else the end
            token.
        stop: ids that end a generated text in addition to the end token.
        settings: content of tokenizer_config.json; `save` writes it again. A role that is null
            there has no token.

    Attributes:
        roles: class attribute; texts of the family's "start", "end" and "pad" tokens, which apply
            if the vocabulary has them and the files name no others.
        ends: class attribute; texts of the family's tokens that end a generated text, such as the
            end of a turn.
        idle_at: class attribute; settings that the family follows at some values alone.
        start_token_id: id of the token that starts a sequence, None if there is none.
        end_token_id: id of the token that ends one.
        closing_token_id: id of the token that the files put behind a text, which need not be the
            end token; None if there is none.
        pad_token_id: id of the padding token.
        stop_token_ids: ids that end a generated text: the end token, `ends`, and those that a
            checkpoint's configuration names.
        special_token_ids: ids that `detokenize` leaves out: control tokens, except for those that a
            reply of Gemma 4 could not be read without, such as <channel|>.
        settings: as given.

    Raises:
        InputError: if nothing says which token ends a text, or a named token is not in the
            vocabulary.
    """

    roles: ClassVar[Mapping[str, str]] = {}
    ends: ClassVar[tuple[str, ...]] = ()
    idle_at: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
        stop: Sequence[int] = (),
        settings: Mapping[str, Any] | None = None,
    ):
        core.no_padding()
        core.no_truncation()
        self.core = core
        self.settings = dict(settings or {})
        core.encode_special_tokens = bool(self.settings.get("split_special_tokens"))
        first, last = self._added_around()
        # A named start token may serve chat templates alone, as in Qwen.
        usual = "start" in self.roles or (not self.roles and core.post_processor is None)
        adds_start = start or first or self.settings.get("add_bos_token", usual)
        self.start_token = self._role("start", start, first) if adds_start else None
        self.end_token = self._role("end", end, last) or next(map(self.id_to_token, stop), None)
        if self.end_token is None:
            raise InputError(
                "no file says which token ends a text; set eos_token in tokenizer_config.json, or "
                "give end= to Tokenizer"
            )
        self.pad_token = self._role("pad", pad, None) or self.end_token
        self.end_token_id = self.token_to_id(self.end_token)
        self.pad_token_id = self.token_to_id(self.pad_token)
        self.closing_token_id = None if last is None else core.token_to_id(last)
        self.start_token_id: int | None = None
        if self.start_token is not None:
            self.start_token_id = self.token_to_id(self.start_token)
        self.stop_token_ids = list(dict.fromkeys([*self._usual_stops(), *stop]))
        added = core.get_added_tokens_decoder().items()
        self.special_token_ids = sorted(
            {i for i, token in added if token.special and token.content not in MARKS}
            | {self.end_token_id, self.pad_token_id}
            | ({self.start_token_id} if self.start_token_id is not None else set())
        )

    def _added_around(self) -> tuple[str | None, str | None]:
        """Returns the special tokens that the post-processor adds first and last."""
        if self.core.post_processor is None:
            return None, None
        encoding = read_core(lambda: self.core.encode("a"), "the tokenizer")
        tokens, special = encoding.tokens, encoding.special_tokens_mask
        if all(special):
            return None, None  # nothing of the text is left between them
        return tokens[0] if special[0] else None, tokens[-1] if special[-1] else None

    def _role(self, role: str, argument: str | None, added: str | None) -> str | None:
        key = described.ROLES[role]
        if text := argument or described.token_text(self.settings.get(key)) or added:
            return text
        text = None if key in self.settings else self.roles.get(role)
        return text if text is not None and self.core.token_to_id(text) is not None else None

    def _usual_stops(self) -> list[int]:
        ids = (self.core.token_to_id(text) for text in self.ends)
        return list(dict.fromkeys([self.end_token_id, *(i for i in ids if i is not None)]))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads the tokenizer of a model.

        Args:
            path: a tokenizer.json, a SentencePiece .model or .spm, a .gguf file, a directory that
                holds tokenizer.json or tokenizer.model, or a preset of keras-hub; local, or an
                address such as "gs://bucket/model". Other files there are read too: the settings
                and chat templates, and the ids that config.json and generation_config.json name as
                the end of a text.

        Returns:
            A tokenizer with the ids of that model.

        Raises:
            InputError: if there is no such file or it is none of these.
        """
        path = local_copy(path)
        if path.is_dir():
            file = next((path / name for name in FILES if (path / name).is_file()), None)
            if file is None:
                raise InputError(f"{path} holds no tokenizer: neither {' nor '.join(FILES[1:])}")
            path = file
        if not path.is_file():
            raise InputError(f"no tokenizer at {path}: no such file")
        if path.suffix == ".gguf":
            core, arguments = gguf.load(path, TURNS)
            return cls(core, **arguments)
        settings = described.read(path.parent, cls.idle_at)
        more: dict[str, Any] = {
            "stop": [*described.read_stops(path.parent), *settings.pop(described.STOPS, ())],
            "settings": settings,
        }
        if path.suffix in (".model", ".spm"):
            core, roles = sentencepiece.load(path, TURNS)
            _add_tokens(core, described.added_tokens(path.parent), path.parent)
            add_named(core, settings)
            return cls(core, **{**roles, **more})
        core = read_core(lambda: tokenizers.Tokenizer.from_file(str(limited(path))), path)
        check_ids(core.get_vocab(), path)
        if core.post_processor is None and settings.get("tokenizer_class") in BARE_CLASSES:
            settings.setdefault("add_bos_token", False)
        add_named(core, settings, described.added_tokens(path.parent))
        return cls(core, **more)

    @classmethod
    def from_sentencepiece(cls, model: bytes, origin: object = "the model") -> Self:
        """Returns the tokenizer of a SentencePiece model that is in memory.

        Args:
            model: content of a .model file.
            origin: names it in errors.

        Raises:
            InputError: if it is not such a model.
        """
        core, roles = sentencepiece.parse(model, origin, TURNS)
        return cls(core, start=roles.get("start"), end=roles.get("end"), pad=roles.get("pad"))

    def to_sentencepiece(self, marks: Sequence[str] = ()) -> bytes:
        """Returns the content of a SentencePiece .model file with the same ids and merges.

        Args:
            marks: control tokens that the file should match in texts, besides those of turns.

        Raises:
            InputError: for a tokenizer that such a file cannot describe.
        """
        return sentencepiece.dump(
            self.core,
            {
                "bos": self.start_token_id,
                "eos": self.end_token_id,
                "pad": self.pad_token_id,
            },
            (*TURNS, *marks),
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Returns the tokenizer of `to_dict`."""
        core = read_core(lambda: tokenizers.Tokenizer.from_str(fields["json"]), "the config")
        names = ("start", "end", "pad", "stop", "settings")
        return cls(core, **{name: fields[name] for name in names if name in fields})

    def to_dict(self) -> dict[str, Any]:
        """Returns the tokenizer as plain values, for a config."""
        return {
            "json": self.core.to_str(),
            **self._roles(),
            "stop": list(self.stop_token_ids),
            "settings": dict(self.settings),
        }

    def _roles(self) -> dict[str, str | None]:
        return {"start": self.start_token, "end": self.end_token, "pad": self.pad_token}

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers reads too.

        The second holds the settings that the tokenizer came with, its chat templates, and as
        "stop_tokens" the ids of further tokens that end a text.

        Args:
            directory: path of the directory, which is made if it is missing.
        """
        directory = local_path(directory)
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        before, behind = self._around()
        if (before or behind) and core.post_processor is None:
            one, two = ([*before, f"${text}", *behind] for text in "AB")
            core.post_processor = TemplateProcessing(
                single=one, pair=[*one, *two], special_tokens=[*(before | behind).items()]
            )
        config = described.with_names({**PLAIN, **self.settings}, self._roles())
        if more := sorted(set(self.stop_token_ids) - set(self._usual_stops())):
            config[described.STOPS] = more
        atomic_write(directory / "tokenizer.json", lambda at: core.save(str(at), pretty=False))
        atomic_write(
            directory / "tokenizer_config.json",
            lambda at: at.write_text(
                json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            ),
        )

    def vocabulary_size(self) -> int:
        """Returns the number of ids, including tokens that were added later."""
        return self.core.get_vocab_size()

    def token_to_id(self, token: str) -> int:
        """Returns the id of a token; InputError if there is none."""
        number = self.core.token_to_id(token)
        if number is None:
            raise InputError(f"the tokenizer has no token {token!r}")
        return number

    def get_vocabulary(self) -> list[str]:
        """Returns the text of every token, in the order of ids."""
        vocabulary = self.core.get_vocab(with_added_tokens=True)
        texts = [""] * (1 + max(vocabulary.values(), default=-1))
        for text, i in vocabulary.items():
            texts[i] = text
        return texts

    @property
    def special_tokens(self) -> list[str]:
        """The texts of `special_token_ids`."""
        texts = (self.core.id_to_token(i) for i in self.special_token_ids)
        return [text for text in texts if text is not None]

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the text of a token, None for an id outside the vocabulary."""
        return self.core.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def __call__(self, x: Any) -> Any:
        """Same as `tokenize`."""
        return self.tokenize(x)

    def tokenize(self, x: str | Sequence[str]) -> Any:
        """Returns token ids, without start and end tokens.

        Args:
            x: a text, or several: strings, UTF-8 bytes, a list or array of them, a tensor of
                strings, also inside `tf.data.Dataset.map`.

        Returns:
            A list of ids, or a list of such lists; inside tf.data a tensor, ragged for several.

        Raises:
            InputError: for anything but text, or text with half of a surrogate pair.
        """
        if in_graph(x):
            return self._in_graph("tokenize", x)
        texts, is_batch = as_texts(x)
        rows = [self._finish(ids) for ids in self.encode_batch(texts)]
        return rows if is_batch else rows[0]

    def _finish(self, ids: list[int]) -> list[Any]:
        """Returns the ids of a text; subclasses add tokens around them."""
        return ids

    def _in_graph(self, method: str, x: object) -> Any:
        from kmodels.text import tokens_tensorflow

        return getattr(tokens_tensorflow, method)(self, x)

    @property
    def output_dtype(self) -> str:
        """The dtype of the ids that `tokenize` returns inside tf.data."""
        return "int32"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids as transformers' `encode` gives them.

        Args:
            text: one text.
            add_special_tokens: with the start token, and other tokens that the tokenizer puts
                around a text.

        Raises:
            InputError: for anything but text.
        """
        ids = self.encode_batch([as_text(text)])[0]
        if not add_special_tokens:
            return ids
        if self.core.post_processor is not None:
            return self.core.encode(as_text(text)).ids
        before, behind = self._around()
        return [*before.values(), *ids, *behind.values()]

    def _around(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the tokens that settings put before and behind a text, with their ids."""
        starts = self.settings.get("add_bos_token", True) and self.start_token
        ends = self.settings.get("add_eos_token", False) and self.end_token
        before, behind = ({x: self.token_to_id(x)} if x else {} for x in (starts, ends))
        return before, behind

    def decode(self, ids: object, skip_special_tokens: bool = False) -> Any:
        """Returns text as transformers' `decode`, with special tokens unless they are skipped.

        Args:
            ids: one id, a sequence of ids, or a batch of such sequences.
            skip_special_tokens: leaves out the tokens that the tokenizer's files call special.

        Returns:
            A text, or a list of texts.

        Raises:
            InputError: for anything but ids.
        """
        numbers = as_ids(ids)
        if not isinstance(numbers, list):
            numbers = [numbers]
        if numbers and isinstance(numbers[0], list):
            return [self.decode(row, skip_special_tokens) for row in numbers]
        return self._text_of(numbers, skip_special_tokens)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text and nothing else.

        Raises:
            InputError: for half of a surrogate pair, or characters that the tokenizer lacks.
        """

        def encode() -> list[list[int]]:
            try:
                return [e.ids for e in self.core.encode_batch_fast(texts, add_special_tokens=False)]
            except (TypeError, UnicodeEncodeError) as error:
                raise InputError("this is not text: it holds half of a surrogate pair") from error

        return _in_one_line(encode, "the tokenizer cannot cut this text into tokens")

    def detokenize(self, ids: object) -> Any:
        """Returns text without special tokens.

        Args:
            ids: a sequence of ids, or a batch of such sequences; lists, arrays or tensors, also
                inside `tf.data.Dataset.map`.

        Returns:
            A text, or a list of texts.
        """
        if in_graph(ids):
            return self._in_graph("detokenize", ids)
        rows, leave = as_ids(ids), set(self.special_token_ids)
        rows = rows if isinstance(rows, list) else [rows]
        if not rows or not isinstance(rows[0], list):
            return self._decode(rows, leave)
        return [self._decode(row, leave) for row in rows]

    def _decode(self, ids: list[int], leave: set[int]) -> str:
        # The tokens that are left out are known; the package would leave out more.
        shown = [i for i in ids if i not in leave]
        return self._text_of(shown, False)

    def _text_of(self, ids: list[int], skip_special_tokens: bool) -> str:
        if strange := [i for i in ids if not 0 <= i < 2**32]:
            last = self.core.get_vocab_size() - 1
            raise InputError(f"there is no token {strange[0]}; ids go from 0 to {last}")
        text = _in_one_line(
            lambda: self.core.decode(ids, skip_special_tokens=skip_special_tokens),
            "the tokenizer cannot make text of these ids",
        )
        return self._cleaned(text)

    def _cleaned(self, text: str) -> str:
        settings, name = self.settings, "clean_up_tokenization_spaces"
        # As in transformers, which leaves the texts of merges alone unless it is told twice.
        is_bpe = isinstance(self.core.model, tokenizers.models.BPE)
        cleans = settings.get(name) and (not is_bpe or settings.get(f"{name}{FOR_BPE}"))
        return described.clean_up(text) if cleans else text

    # === Chats: their token ids, and which of these are the model's own words ===

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
            chat_template: as in `apply_chat_template`.
            tools: functions that the model may call, as in `apply_chat_template`.
            **values: further variables of the template, as in `apply_chat_template`.

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
        self.encode_batch([one.text for one in rendered])  # raises for anything but a text
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


def add_named(
    core: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    added: Mapping[int, tokenizers.AddedToken] = MappingProxyType({}),
) -> None:
    """Adds tokens that settings name as transformers does: those it lacks get the next ids.

    Tokens of `added_tokens_decoder` by their ids, `added`, take precedence.
    """
    known = core.get_added_tokens_decoder().values()
    tokens = [token for _, token in sorted(added.items()) if token not in known]
    texts = {token.content for token in (*known, *tokens)}
    tokens += [x for x in described.control_tokens(settings) if x.content not in texts]
    core.add_tokens(tokens)


def _add_tokens(
    core: tokenizers.Tokenizer, tokens: Mapping[int, tokenizers.AddedToken], folder: Path
) -> None:
    """Adds the tokens that other files append to a vocabulary."""
    for number, token in sorted(tokens.items()):
        present = core.token_to_id(token.content)
        if present is None and number == core.get_vocab_size():
            core.add_tokens([token])
        elif present != number:
            raise InputError(
                f"{folder}: the added token {token.content!r} is to have id {number}, which "
                f"{'it cannot get' if present is None else f'is {present} in the vocabulary'}; "
                "give the tokenizer.json of the model"
            )
        elif token.special:
            core.add_special_tokens([token])


def read_core(read: Callable[[], T], origin: object) -> T:
    """Returns what `read` returns; its errors name the file `origin` in one line."""
    return _in_one_line(read, f"{origin} holds no whole tokenizer", "; copy it again")


def _in_one_line(run: Callable[[], T], problem: str, advice: str = "") -> T:
    """Calls `run`; an error of tokenizers becomes an `InputError` with the problem before it."""
    try:
        return run()
    except (KeyboardInterrupt, SystemExit, InputError):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise InputError(f"{problem}: {_line(error)}{advice}") from None


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
