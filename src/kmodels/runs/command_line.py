"""Typer's command lines as kmodels has them: whatever is wrong with one is a line of its own."""

import difflib
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kmodels.core.backend_choice import hide_log_lines
from kmodels.core.errors import InputError

if TYPE_CHECKING:
    import typer


def invoke(app: "typer.Typer", arguments: Sequence[str] | None, name: str) -> Any:
    """Runs a command line and returns what its function returns.

    Args:
        app: a `typer.Typer`.
        arguments: of the command line; the process's by default.
        name: what the help calls the program.

    Returns:
        The function's value; an exit code where a `typer.Exit` or --help ended it.

    Raises:
        InputError: for an unknown command or flag, with the nearest one that there is, and for a
            value that does not fit its flag, with the value.
    """
    import typer

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
    # The prefix is that of the package by which newer versions of Typer convert values.
    message = " ".join(error.format_message().split()).replace("Value error, ", "")
    value = _value(error, words)
    if value is not None and repr(value) not in message:
        message += f"; given was {value!r}"
    return message or None


def _value(error: Any, words: list[str]) -> str | None:
    """Returns the value that an error is about, which its message may leave out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
    return None
