"""The error for wrong user input, checks that raise it, and the words of its messages."""

import difflib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


class InputError(ValueError):
    """A setting or a file given by the user is wrong.

    The message is one line: the wrong value, the allowed values, and the remedy. Recipes and the
    command line print it alone, without a stack trace, and end with exit code 2. Passwords in
    addresses are replaced by "***", see `shown`; text from a file can neither break the line nor
    control the terminal.
    """

    def __init__(self, *args: object):
        super().__init__(*(printable(shown(arg)) for arg in args))


def printable(value: Any) -> Any:
    """Returns a text with escapes in place of characters that no terminal prints."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def one_line(error: BaseException) -> str:
    """Returns the message of an error in one line, or its class if there is none."""
    return " ".join(str(error).split()) or type(error).__name__


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises `InputError` unless `value` is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; give a whole number, at least {least}")
    if value < least:
        raise InputError(f"{name} is {value}; give at least {least}")


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
    more: str = "",
) -> None:
    """Raises `InputError` unless `value` is a finite number within bounds.

    `above` and `below` are excluded. The message begins with `more`, other values that are allowed,
    such as "0 (greedy), or ".
    """
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    if (
        math.isfinite(number)
        and (least is None or number >= least)
        and (above is None or number > above)
        and (below is None or number < below)
        and (most is None or number <= most)
    ):
        return
    if least is not None and most is not None:
        words = f"from {least:g} to {most:g}"
    else:
        bounds = {"at least": least, "above": above, "below": below, "at most": most}
        words = " and ".join(f"{word} {x:g}" for word, x in bounds.items() if x is not None)
    raise InputError(f"{name} is {value!r}; give {more}a number {words}".rstrip())


def check_choice(
    name: str, value: object, known: Collection[Any], reasons: Mapping[str, str] | None = None
) -> None:
    """Raises `InputError` for a value that is not among the known ones.

    Args:
        name: name of the setting, for the message.
        value: the user's value.
        known: the allowed values.
        reasons: why some other values are not allowed, for the message.
    """
    if value not in known:
        reason = (reasons or {}).get(str(value))
        words = f": {reason}" if reason else ""
        raise InputError(f"{name} is {value!r}{words}; choose one of {', '.join(known)}")


def same_shape(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns True if two shapes have equal sizes on each axis where both are known."""
    pairs = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(None in pair or pair[0] == pair[1] for pair in pairs)


def check_names(
    owner: str, stated: Iterable[str], known: Collection[str], others: Collection[str] = ()
) -> None:
    """Raises `InputError` for arguments that a function or a class does not take.

    The message proposes the nearest allowed name or one of `others`, or lists the allowed ones.
    """
    unknown = sorted(set(stated) - set(known))
    if not unknown:
        return
    names = [name for name in (*known, *others) if name not in unknown]
    near = [match for name in unknown for match in difflib.get_close_matches(name, names, 1)]
    advice = f"did you mean {', '.join(dict.fromkeys(near))}?"
    if len(near) < len(unknown):
        advice = f"it takes {', '.join(known) or 'no such arguments'}"
    raise InputError(f"{owner} takes no {', '.join(unknown)}; {advice}")


# === Words of messages: addresses without passwords, amounts of memory, counts ===

HIDDEN = "***"
# "s3://bucket/x", and "s3:/bucket/x" as pathlib makes of it, within any text.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+\S+")
# "name:password@", where a password may hold slashes, but a port is none.
_USER = re.compile(r"(?<=:/)(/*)([^/:@?]*:(?!\d+/)\S*?@(?![^/?]*@)|[^/:@?]+@)")
# What stands in front of "@" is a name there, such as a container of Azure or a revision.
_NAMES = re.compile(r"(abfss?|wasbs?|ssh|sftp|hf|hdfs|smb):", re.IGNORECASE)
_QUERY = re.compile(r"([?&#;][^=?&#;\s/]+=)[^&#\s]*?(?=[;,.:)'\"]*(?:[&#\s]|$))")


def shown(value: Any) -> Any:
    """Returns a text with the passwords and query values of its addresses replaced by "***".

    Args:
        value: a text, a path, or dictionaries and lists of these; anything else is returned
            unchanged.
    """
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [shown(part) for part in value]
    if isinstance(value, Path):
        value = os.fspath(value)
    return _ADDRESS.sub(_hide, value) if isinstance(value, str) else value


def _hide(match: re.Match[str]) -> str:
    # "simplecache::s3://..." chains addresses, each of which may have a password.
    return "::".join(map(_hide_one, match[0].split("::")))


def _hide_one(address: str) -> str:
    def user(match: re.Match[str]) -> str:
        named = ":" not in match[2] and _NAMES.match(address)
        return match[0] if named else f"{match[1]}{HIDDEN}@"

    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(user, address, count=1))


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def human(size: int) -> str:
    """Returns bytes as "1.2 GiB"."""
    name, factor = [(unit, step) for unit, step in UNITS.items() if size >= step or unit == "B"][-1]
    return f"{size} B" if name == "B" else f"{size / factor:.1f} {name}"


def parse_bytes(text: str) -> int:
    """Returns the number of bytes of a text such as "80GiB".

    Raises:
        InputError: for any other text.
    """
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :]
    try:
        size = int(float(number) * UNITS[unit or "B"])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if not 0 < size < 2**63:
        raise InputError(f"{text!r} is not an amount of memory; give one such as 80GiB")
    return size


def pluralize(number: int, thing: str) -> str:
    """Returns a number of things: "1 worker", "2 workers"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# === Out of memory: the names that JAX, torch and TensorFlow give the error ===

_WORDS = ("resource_exhausted", "out of memory", "failed to allocate", "can't allocate memory")
_CLASSES = ("OutOfMemoryError", "ResourceExhaustedError", "MemoryError")


def is_out_of_memory(error: Exception) -> bool:
    """Returns True if a device ran out of memory; False if a data worker on the host did."""
    # TensorFlow raises a worker's error again as one of its own classes, with the same text.
    if isinstance(error, InputError) or "a data worker" in str(error):
        return False
    if any(kind.__name__ in _CLASSES for kind in type(error).__mro__):
        return True
    return any(word in str(error).lower() for word in _WORDS)


def out_of_memory(model: "keras.Model", batch_size: int) -> InputError:
    """Returns an InputError with the sizes of a model's parts, and with settings that need less."""
    trained = _mib(model.trainable_variables)
    parts = [
        f"parameters {_mib(model.weights):,.0f}",
        f"gradients {trained:,.0f}",
        f"optimizer {_mib(model.optimizer.variables):,.0f}",
    ]
    return InputError(
        f"out of memory: {', '.join(parts)} MiB, the rest is activations and logits of "
        f"{batch_size} rows; lower --batch-size and raise --accumulate, or give --remat block, "
        "--precision mixed_bfloat16 or a smaller --preset where the recipe has them; kmodels plan "
        "tells what fits"
    )


def _mib(variables: Iterable[Any]) -> float:
    import ml_dtypes  # noqa: F401, which gives NumPy bfloat16
    import numpy as np

    return sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in variables) / 2**20
