"""A model, what was said so far, and the next reply."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kmodels import presets
from kmodels.core.errors import InputError, check_whole
from kmodels.data.images.any_picture import open_picture
from kmodels.generation.drafts import ASSISTANT_TOKENS, same_tokens
from kmodels.generation.request import sampler_of
from kmodels.generation.sampler import Sampler
from kmodels.models.common.causal_lm import CausalLM
from kmodels.models.common.chat_prompts import ChatPrompts


@dataclass
class Conversation:
    """A chat with one model.

    Args:
        model: the model, with a preprocessor that writes chats.
        system: text of a system message, or None.
        max_new_tokens: largest number of tokens of a reply.
        values: variables of the chat template.
        stop: texts that end a reply; None for those of the checkpoint.
        drafts: what drafts tokens, by the arguments of `generate`.
        images: paths of images that the next message of the user has before its text.

    Attributes:
        messages: what was said so far.
    """

    model: CausalLM
    system: str | None = None
    max_new_tokens: int = 256
    values: Mapping[str, Any] = field(default_factory=dict)
    stop: list[str] | None = None
    drafts: Mapping[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = opening(self.system)

    def attach(self, image: str) -> None:
        """Adds an image to the next message of the user.

        Args:
            image: path of the file.

        Raises:
            InputError: for a file that is missing or damaged, or a model that takes only text.
        """
        if not image:
            raise InputError("/image names no file; give /image FILE")
        check_images(self.model.preprocessor, [image], "/image", type(self.model).__name__)
        self.images.append(image)

    def ask(self, text: str, show: Callable[[str], None]) -> str:
        """Returns the reply to a message, which both become part of the chat.

        A reply that Ctrl-C stops is kept as far as it came. Where there is nothing to keep, the
        chat is as before.

        Args:
            text: message of the user.
            show: called with each new piece of the reply.

        Raises:
            InputError: for a chat that the template refuses.
            KeyboardInterrupt: after the part that came is kept.
        """
        pieces: list[str] = []

        def stream(_: int, piece: str) -> None:
            pieces.append(piece)
            show(piece)

        said = [*self.messages, question(text, self.images)]
        try:
            settings = {"max_new_tokens": self.max_new_tokens, "stream": stream, **self.drafts}
            settings["stop"] = self.stop
            reply = self.model.chat(said, **settings, **self.values)
        except KeyboardInterrupt:
            if pieces:
                self._answered(said, "".join(pieces))
            raise
        self._answered(said, reply)
        return reply

    def _answered(self, said: list[dict[str, Any]], reply: str) -> None:
        self.messages = [*said, {"role": "assistant", "content": reply}]
        self.images = []

    def is_cut(self, reply: str) -> bool:
        """Returns whether a reply has all tokens that it may have, and perhaps lacks its end."""
        return len(self.model.preprocessor.tokenizer.tokenize(reply)) >= self.max_new_tokens


def question(text: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a message of the user, with its images before the text."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "path": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def check_images(text: ChatPrompts, images: Sequence[str], name: str, model: str) -> None:
    """Raises `InputError` for images that cannot be read, or that a model does not take.

    Args:
        text: preprocessor of the model.
        images: paths of the files.
        name: flag or command by which they were given.
        model: name of the model's class.
    """
    if images and not text.takes_images:
        raise InputError(f"{name} needs a model that takes images; {model} takes only text")
    for image in images:
        open_picture(image)


def opening(system: str | None) -> list[dict[str, Any]]:
    """Returns the messages that a chat begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def open_conversation(
    path: str,
    say: Callable[[str], None],
    *,
    system: str | None = None,
    images: Sequence[str] = (),
    max_new_tokens: int = 256,
    sampling: Mapping[str, Any] | None = None,
    stop: list[str] | None = None,
    adapter: str | None = None,
    assistant: str | None = None,
    num_assistant_tokens: int = ASSISTANT_TOKENS,
    prompt_lookup_num_tokens: int | None = None,
    precision: str = "float32",
    values: Mapping[str, Any] | None = None,
) -> Conversation:
    """Reads a model for a chat; what is wrong is found before its weights are read.

    Args:
        path: directory, file or address of the model.
        say: called with a line before what takes time.
        system: text of a system message, or None.
        images: paths of images of the first question.
        max_new_tokens: largest number of tokens of a reply.
        sampling: arguments of `Sampler` to change; those that are None are the checkpoint's.
        stop: texts that end a reply; None for those of the checkpoint.
        adapter: directory with a LoRA adapter of kmodels or PEFT, or None.
        assistant: directory, file or address of a smaller model that drafts tokens, or None.
        num_assistant_tokens: number of tokens of each of its drafts.
        prompt_lookup_num_tokens: number of tokens of drafts that repeat earlier text, or None.
        precision: policy of the model.
        values: variables of the chat template.

    Raises:
        InputError: for a path without a language model, tokenizer or chat template, a system
            message that the template refuses, images that cannot be read or for a model of text
            alone, an assistant with other tokens, or wrong settings.
    """
    check_whole("--max-new-tokens", max_new_tokens)
    check_whole("--num-assistant-tokens", num_assistant_tokens)
    if prompt_lookup_num_tokens is not None:
        check_whole("--prompt-lookup-num-tokens", prompt_lookup_num_tokens)
        if assistant is not None:
            raise InputError("--assistant and --prompt-lookup-num-tokens: give one of them")
    given = {name: value for name, value in (sampling or {}).items() if value is not None}
    Sampler(**given)  # which names a wrong value
    cls: Any = presets.causal_lm_of(path, whole=True)
    text = cls.preprocessor_class.from_preset(path)
    check_images(text, images, "--image", cls.__name__)
    text.chat_token_ids([[*opening(system), question("Hello", images)]], **(values or {}))
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": prompt_lookup_num_tokens}
    if assistant is not None:
        helper: Any = presets.causal_lm_of(assistant)
        its_text = helper.preprocessor_class.from_preset(assistant)
        if not same_tokens(text.tokenizer, its_text.tokenizer):
            raise InputError(
                f"--assistant {assistant} has a tokenizer with other tokens than {path}; give a "
                "model that has the same vocabulary"
            )
        say(f"reading weights from {assistant}")
        with _quietly(say):
            loaded = helper.from_preset(assistant, dtype=precision, preprocessor=its_text)
        drafts = {"assistant": loaded, "num_assistant_tokens": num_assistant_tokens}
    say(f"reading weights from {path}")
    began = time.perf_counter()
    with _quietly(say):
        model = cls.from_preset(path, dtype=precision, preprocessor=text)
    if adapter is not None:
        say(f"reading the adapter {adapter}")
        model.load_adapter(adapter)
    model.use_sampler(choose_sampler(model.generation_config, given))
    say(f"{model.count_params():,} parameters, read in {time.perf_counter() - began:.1f} s")
    return Conversation(model, system, max_new_tokens, values or {}, stop, drafts, list(images))


def choose_sampler(config: Mapping[str, Any], given: Mapping[str, Any]) -> Sampler:
    """Returns how tokens are drawn: as the checkpoint's generation_config.json says, or is told.

    Args:
        config: content of generation_config.json, or nothing, for the most likely token.
        given: arguments of `Sampler` that count before it.
    """
    held = sampler_of(config)
    if held.greedy and not given.keys().isdisjoint(("top_k", "top_p", "min_p")):
        held = replace(held, temperature=1.0)  # Choosing among tokens means drawing.
    return replace(held, **given)


@contextmanager
def _quietly(say: Callable[[str], None]) -> Iterator[None]:
    """Shows warnings as lines, and leaves out that a sampler has to be chosen, which it is."""
    log = logging.getLogger("kmodels")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            yield
    finally:
        log.setLevel(level)
    for warning in found:
        say(str(warning.message).splitlines()[0])
