"""A chat with a model, in the terminal or through a pipe."""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status

from kmodels import presets
from kmodels.core.errors import InputError, check_whole
from kmodels.data.images.any_picture import open_picture
from kmodels.generation.drafts import ASSISTANT_TOKENS, same_tokens
from kmodels.generation.generation_config import sampler_of
from kmodels.generation.sampler import Sampler

if TYPE_CHECKING:
    from kmodels.models.blocks.causal_lm import CausalLM
    from kmodels.models.blocks.preprocessor import CausalLMPreprocessor

COMMANDS = {
    "/exit": "ends the chat, as Ctrl-D does",
    "/clear": "starts a new chat",
    "/image": "adds an image to the next question: /image FILE",
    "/help": "lists the commands",
}
PROMPT = "> "


@dataclass
class Conversation:
    """A chat with one model.

    Args:
        stop: texts that end a reply; None for those of the checkpoint.
        drafts: arguments of `generate` for speculative decoding.
        images: paths of images that precede the text of the next user message.

    Attributes:
        messages: messages so far.
    """

    model: "CausalLM"
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
        """Removes all messages except the system message."""
        self.messages = opening(self.system)

    def attach(self, image: str) -> None:
        """Adds an image to the next message of the user.

        Raises:
            InputError: for a file that is missing or damaged, or a model that takes only text.
        """
        if not image:
            raise InputError("/image names no file; give /image FILE")
        check_images(self.model.preprocessor, [image], "/image", type(self.model).__name__)
        self.images.append(image)

    def ask(self, text: str, show: Callable[[str], None]) -> str:
        """Returns the reply to a message and adds both to the chat.

        `show` gets each new piece of the reply. If Ctrl-C stops it, the chat keeps the part so far;
        if there is none, the chat does not change.

        Raises:
            InputError: if the chat template rejects the chat.
            KeyboardInterrupt: after a partial reply is added.
        """
        pieces: list[str] = []

        def stream(_: int, piece: str) -> None:
            pieces.append(piece)
            show(piece)

        messages = [*self.messages, question(text, self.images)]
        try:
            settings = {"max_new_tokens": self.max_new_tokens, "stream": stream, **self.drafts}
            settings["stop"] = self.stop
            reply = self.model.chat(messages, **settings, **self.values)
        except KeyboardInterrupt:
            if pieces:
                self._answered(messages, "".join(pieces))
            raise
        self._answered(messages, reply)
        return reply

    def _answered(self, messages: list[dict[str, Any]], reply: str) -> None:
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        self.images = []

    def is_cut(self, reply: str) -> bool:
        """Returns True if a reply has reached the largest number of tokens."""
        return len(self.model.preprocessor.tokenizer.tokenize(reply)) >= self.max_new_tokens


def question(text: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a message of the user, with its images before the text."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image", "path": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def check_images(
    text: "CausalLMPreprocessor", images: Sequence[str], name: str, model: str
) -> None:
    """Raises `InputError` for unreadable images, or a model without image inputs."""
    if images and not text.takes_images:
        raise InputError(f"{name} needs a model that takes images; {model} takes only text")
    for image in images:
        open_picture(image)


def opening(system: str | None) -> list[dict[str, Any]]:
    """Returns the first messages of a chat."""
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
    """Reads a model for a chat; wrong settings raise before its weights are read.

    `say` gets a line before each slow step. `sampling` are arguments of `Sampler`, None for the
    checkpoint's value; `stop` is None for the texts of the checkpoint.

    Raises:
        InputError: for a path without a language model, tokenizer or chat template, a system
            message that the template rejects, unreadable images or a model without image inputs,
            an assistant with another vocabulary, or wrong settings.
    """
    check_whole("--max-new-tokens", max_new_tokens)
    check_whole("--num-assistant-tokens", num_assistant_tokens)
    if prompt_lookup_num_tokens is not None:
        check_whole("--prompt-lookup-num-tokens", prompt_lookup_num_tokens)
        if assistant is not None:
            raise InputError(
                "--assistant and --prompt-lookup-num-tokens exclude each other; give one of them"
            )
    sampling = sampling or {}
    Sampler().changed(**sampling)  # names the flag of a wrong value, and not the file
    cls: Any = presets.causal_lm_of(path, whole=True)
    text = cls.preprocessor_class.from_preset(path)
    check_images(text, images, "--image", cls.__name__)
    text.chat_token_ids([[*opening(system), question("Hello", images)]], **(values or {}))
    sampler = sampler_of(presets.generation_config_of(path)).changed(**sampling)
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": prompt_lookup_num_tokens}
    if assistant is not None:
        helper: Any = presets.causal_lm_of(assistant)
        its_text = helper.preprocessor_class.from_preset(assistant)
        if not same_tokens(text.tokenizer, its_text.tokenizer):
            raise InputError(
                f"--assistant {assistant} has another vocabulary than {path}; give a model with "
                "the same one"
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
    model.use_sampler(sampler)
    say(f"{model.count_params():,} parameters, read in {time.perf_counter() - began:.1f} s")
    return Conversation(model, system, max_new_tokens, values or {}, stop, drafts, list(images))


@contextmanager
def _quietly(say: Callable[[str], None]) -> Iterator[None]:
    """Shows warnings as lines, and hides the log message about the missing sampler."""
    log = logging.getLogger("kmodels")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
    finally:
        log.setLevel(level)
    for warning in caught:
        say(str(warning.message).splitlines()[0])


def say(line: str) -> None:
    """Prints a line about the current step to stderr."""
    print(f"kmodels: {line}", file=sys.stderr, flush=True)


def run(conversation: Conversation) -> int:
    """Runs a chat and returns the exit code of the command.

    On a terminal Ctrl-C stops a reply and Ctrl-D ends the chat. Through a pipe each line is a user
    message, and only replies are written to stdout.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _on_terminal(conversation, Console(highlight=False, markup=False, emoji=False))
    return _through_pipe(conversation)


def _through_pipe(conversation: Conversation) -> int:
    for line in sys.stdin:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/clear":
            conversation.clear()
        elif (file := _image(text)) is not None:
            conversation.attach(file)
        elif text:
            conversation.ask(text, lambda piece: print(piece, end="", flush=True))
            print(flush=True)
    return 0


def _on_terminal(conversation: Conversation, console: Console) -> int:
    try:
        # Its import adds editing and history to the prompt; some systems lack it.
        import readline  # noqa: F401
    except ImportError:
        pass
    console.print("Ctrl-C stops a reply; /clear, /image, /help, /exit", style="dim")
    for text in _typed(console):
        if text == "/exit":
            break
        if text == "/clear":
            conversation.clear()
            console.print("a new chat", style="dim")
        elif (file := _image(text)) is not None:
            _attach(conversation, file, console)
        elif text == "/help":
            for name, does in COMMANDS.items():
                console.print(f"{name:7} {does}", style="dim")
        elif text.startswith("/") and text[1:].isalpha():
            console.print(f"{text} is not a command; /help lists them", style="dim")
        else:
            _answer(conversation, text, console)
    return 0


def _image(text: str) -> str | None:
    """Returns the file of a line that adds an image, None for any other line."""
    command, _, file = text.partition(" ")
    return file.strip() if command == "/image" else None


def _attach(conversation: Conversation, file: str, console: Console) -> None:
    try:
        conversation.attach(file)
    except InputError as error:
        console.print(str(error), style="red", markup=False)
    else:
        console.print(f"{file} goes with the next question", style="dim", markup=False)


def _typed(console: Console) -> Iterator[str]:
    """Yields the lines that the user types until Ctrl-D."""
    while True:
        try:
            # readline would erase a prompt of rich when it redraws the line.
            if text := input(PROMPT).strip():
                yield text
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit ends the chat", style="dim")


def _answer(conversation: Conversation, text: str, console: Console) -> None:
    waiting = Status("", console=console)

    def show(piece: str) -> None:
        waiting.stop()
        # Markup and control sequences in the text of a model have no effect.
        plain = "".join(c for c in piece if c.isprintable() or c in "\n\t")
        console.print(plain, end="", markup=False, soft_wrap=True)

    try:
        with waiting:
            reply = conversation.ask(text, show)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except InputError as error:
        console.print(str(error), style="red", markup=False)
    else:
        console.print()
        if conversation.is_cut(reply):
            limit = conversation.max_new_tokens
            console.print(f"(the reply has {limit} tokens: --max-new-tokens)", style="dim")
    console.print()
