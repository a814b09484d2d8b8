"""What `kmodels chat` shows: a prompt and streamed replies, or plain lines through a pipe."""

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

from kmodels.core.errors import InputError
from kmodels.tools.chat.conversation import Conversation

COMMANDS = {
    "/exit": "ends the chat, as Ctrl-D does",
    "/clear": "forgets what was said",
    "/image": "adds an image to the next question: /image FILE",
    "/help": "shows these lines",
}
PROMPT = "> "
STOPPED = 130


def say(line: str) -> None:
    """Shows what is being done, beside the replies."""
    print(f"kmodels: {line}", file=sys.stderr, flush=True)


def run(conversation: Conversation) -> int:
    """Leads a chat until its end.

    On a terminal Ctrl-C stops a reply and Ctrl-D ends the chat. Through a pipe each line is a
    message of the user, and replies alone are written to stdout.

    Returns:
        The exit code of the command.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _on_terminal(conversation, Console(highlight=False, markup=False, emoji=False))
    try:
        return _through_pipe(conversation)
    except KeyboardInterrupt:
        say("stopped")
        return STOPPED


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
        # Imported, it gives the prompt its keys and its history; some systems have none.
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
    """Yields what the user types, until Ctrl-D."""
    while True:
        try:
            # Rich's own prompt is lost where readline writes the line again.
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
        # What a model writes is shown, not done: neither markup nor control sequences.
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
