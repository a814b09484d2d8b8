"""The one error that is the user's to mend."""

import difflib
from collections.abc import Collection, Iterable
from numbers import Integral

from kmodels.core.shown import shown


class InputError(ValueError):
    """A setting or a file given by the user is wrong.

    The message is one line: what was given, what is allowed, what to do. Recipes and the command
    line print it alone, without a stack trace, and end with exit code 2. Passwords in addresses are
    replaced by "***", see `kmodels.core.shown`; what a file put into a message neither breaks its
    line nor controls the terminal.
    """

    def __init__(self, *args: object):
        super().__init__(*(_plain(shown(arg)) for arg in args))


def _plain(value: object) -> object:
    """Returns a text with escapes in place of characters that no terminal prints."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def one_line(error: BaseException) -> str:
    """Returns the message of an error in one line, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises `InputError` for what is not a whole number, or too small.

    Args:
        name: name of the setting, for the message.
        value: as given.
        least: the smallest that is allowed.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; give a whole number, at least {least}")
    if value < least:
        raise InputError(f"{name} is {value}; give at least {least}")


def check_names(
    owner: str, given: Iterable[str], known: Collection[str], others: Collection[str] = ()
) -> None:
    """Raises `InputError` for names that a function or a class does not have.

    Args:
        owner: name of the function or class, for the message.
        given: names of the arguments that the user gave.
        known: names that are allowed; the message has the nearest one, or all.
        others: names that mean something to the caller, which the message may propose too.
    """
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    names = [*known, *others]
    near = [match for name in unknown for match in difflib.get_close_matches(name, names, 1)]
    advice = f"did you mean {', '.join(dict.fromkeys(near))}?"
    if len(near) < len(unknown):
        advice = f"it takes {', '.join(known) or 'no such arguments'}"
    raise InputError(f"{owner} takes no {', '.join(unknown)}; {advice}")
