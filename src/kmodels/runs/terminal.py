"""The terminal: --help in groups, one-line errors, and standard output that fails.

Flags are declared in `runs/settings.py` and `tools/cli.py`; the value of `--mesh` is parsed in
`distribution/mesh.py`.
"""

import contextlib
import difflib
import errno
import itertools
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from kmodels.core.environment import hide_log_lines
from kmodels.core.errors import InputError

# Exit codes: of a process that SIGPIPE ended, and EX_IOERR of sysexits.
CLOSED, FAILED = 128 + signal.SIGPIPE, 74


class GroupedCommand(TyperCommand):
    """A command whose --help has a section for each group of flags, as plain text.

    Typer draws panels with rich, which would interpret descriptions as markup.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the sections, in the order of their first flags."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                group = getattr(parameter, "rich_help_panel", None) or kind
                groups.setdefault(group, []).append(record)
        # --help comes last.
        groups["Options"] = groups.pop("Options", [])
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def option(group: str, text: str, *names: str) -> Any:
    """Returns a Typer option in a group of --help, with spellings such as "--lora/--full"."""
    return typer.Option(*names, help=text, rich_help_panel=group)


def typed(context: typer.Context) -> list[str]:
    """Returns the names of the parameters that the user gave."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, at in sources.items() if getattr(at, "name", "") == "COMMANDLINE"]


def refuse_idle(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Raises `InputError` for given flags that have no effect, for this reason."""
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    if idle := [flags[name] for name in typed(context) if name in names]:
        raise InputError(f"{', '.join(idle)} has no effect {reason}; leave it out")


def invoke(app: typer.Typer, arguments: Sequence[str] | None, name: str) -> Any:
    """Runs a command line, by default that of the process, and returns what its function returns.

    That is an exit code if `typer.Exit` or --help ended it.

    Raises:
        InputError: for an unknown command or flag, with the closest known one, and for a wrong
            value, with the value.
    """
    hide_log_lines()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return typer.main.get_command(app).main(words, prog_name=name, standalone_mode=False)
    except InputError:
        raise
    except Exception as error:
        # Usage errors carry their message, in whichever package Typer keeps its parser; anything
        # else is a bug and stays one.
        if not hasattr(error, "format_message"):
            raise
        if (message := _message(error, words)) is None:
            raise SystemExit(getattr(error, "exit_code", 2)) from None
        raise InputError(message) from None


def _message(error: Any, words: list[str]) -> str | None:
    if (flag := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        near = difflib.get_close_matches(flag, error.possibilities or (), 1)
        instead = f"did you mean {near[0]}?" if near else "--help lists the flags"
        return f"unknown flag {flag}; {instead}"
    # Newer versions of Typer convert values with a package that adds this prefix.
    message = " ".join(error.format_message().split()).replace("Value error, ", "")
    value = _value(error, words)
    if value is not None and repr(value) not in message:
        message += f"; given was {value!r}"
    return message or None


def _value(error: Any, words: list[str]) -> str | None:
    """Returns the wrong value, which the message of an error may leave out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
    return None


class Output:
    """Standard output; after an error all further output is dropped.

    Attributes:
        code: exit code after an error, else 0.
        trains: True for a run that continues if nothing can be printed. A closed pipe stops it
            like SIGTERM, after saving; any other command ends at the first error.
    """

    def __init__(self, stream: Any):
        self._stream, self.code, self.trains = stream, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, see `flush`."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._fail(error)
        self._stop()
        return len(text)

    def flush(self) -> None:
        """Raises SystemExit if an error ends the command."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)
        self._stop()

    def _fail(self, error: OSError) -> None:
        if self.code:
            return
        self.code = CLOSED if error.errno == errno.EPIPE else FAILED
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self.code == FAILED:
            then = "the run goes on without it" if self.trains else "the command ends"
            _warn(f"cannot write to standard output: {error.strerror}; {then}")
        elif self.trains:
            _warn("standard output was closed; the run stops")

    def _stop(self) -> None:
        if not self.code or (self.trains and self.code == FAILED):
            return
        # Loaded with Keras; before that there is nothing to save.
        preemption = sys.modules.get("kmodels.checkpoint.preemption")
        if self.trains and preemption is not None:
            preemption.tell(signal.SIGPIPE)
        elif threading.current_thread() is threading.main_thread():
            raise SystemExit(self.code)


@contextlib.contextmanager
def checked_output() -> Iterator[Output]:
    """Checks standard output inside the block, which may set `trains`."""
    if isinstance(sys.stdout, Output):
        output = sys.stdout
    else:
        # A shell can close it by ">&-".
        output = Output(sys.stdout or open(os.devnull, "w"))  # noqa: SIM115
    try:
        with contextlib.redirect_stdout(output):
            yield output
            output.flush()
    finally:
        output.trains = False
        if preemption := sys.modules.get("kmodels.checkpoint.preemption"):
            preemption.tell(None)


def _warn(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"kmodels: {line}", file=sys.stderr, flush=True)
