"""The one error that is the user's to mend."""

from numbers import Integral


class InputError(ValueError):
    """A setting or a file given by the user is wrong.

    The message is one line: what was given, what is allowed, what to do. Recipes and the command
    line print it alone, without a stack trace, and end with exit code 2.
    """


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
