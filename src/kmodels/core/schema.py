"""JSON files of any origin: read as objects, their values checked and unknown settings named."""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kmodels.core.errors import InputError, one_line
from kmodels.core.file_shapes import FILES, Needed, Shape

log = logging.getLogger("kmodels")
_HALF = re.compile("[\ud800-\udfff]")
_WORDS: dict[type, str] = {
    **{str: "a text", int: "a whole number", float: "a number", bool: "true or false"},
    **{list: "a list", dict: "an object"},
}


def read_json(path: Path, shape: Shape | None = None) -> Any:
    """Returns the object in a JSON file, or the list if its shape is one.

    Args:
        path: path of the file, UTF-8.
        shape: that it must have, see `check_shape`; that of its name in `FILES` by default.

    Raises:
        InputError: for a file that does not hold one, or a value of another shape.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON: {one_line(error)}") from None
    if "\\ud" in text.lower() and _HALF.search(json.dumps(found, ensure_ascii=False)):
        raise InputError(f"{path} has half of a character, which no text can hold; copy it again")
    check_shape(found, Needed(FILES.get(path.name, {}) if shape is None else shape), path)
    return found


def warn_of_unknown(
    file: Path,
    settings: Mapping[str, object],
    known: Collection[str],
    idle_at: Mapping[str, Collection[object]] = MappingProxyType({}),
) -> None:
    """Logs a warning with the names of settings that are not followed; null is never logged.

    Args:
        file: path of the file, for the message.
        settings: settings of the file.
        known: names of those that are read, and of those that change nothing.
        idle_at: names of those that change nothing at some values alone, and these values.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    unknown = [name for name in given if name not in known and name not in idle_at]
    if unknown:
        log.warning(
            "%s sets %s, which kmodels does not know and does not follow",
            file,
            ", ".join(sorted(unknown)),
        )
    others = [
        f"{name}={_shown(value)}"
        for name, value in sorted(given.items())
        if name in idle_at and value not in idle_at[name]
    ]
    if others:
        log.warning("%s sets %s, which kmodels does not follow", file, ", ".join(others))


def check_shape(value: Any, shape: Shape, where: object) -> None:
    """Raises InputError for a value of another shape, naming its place.

    Args:
        value: of a JSON file.
        shape: types by key; keys that it does not name may hold anything.
        where: the file, and the keys on the way to the value.
    """
    if isinstance(shape, Needed):
        if value is None:
            raise InputError(f"{where} is missing or null; give {_words(shape.shape)}")
        shape = shape.shape
    if value is None:
        return
    if isinstance(shape, tuple):
        # Of several the one is checked whose kind of value is there, for its message.
        fits = [one for one in shape if _is_of_kind(value, one)]
        if not fits:
            raise InputError(f"{where} is {_shown(value)}; give {_words(shape)}")
        check_shape(value, fits[0], where)
    elif not _is_of_kind(value, shape):
        raise InputError(f"{where} is {_shown(value)}; give {_words(shape)}")
    elif isinstance(shape, dict):
        for key, part in shape.items():
            for name in value if key == "*" else [key]:
                check_shape(value.get(name), part, f"{where}: {name}")
    elif isinstance(shape, list):
        if len(shape) > 1 and len(value) != len(shape):
            raise InputError(f"{where} is {_shown(value)}; give a list of {len(shape)}")
        for i, one in enumerate(value):
            check_shape(one, shape[0], f"{where}[{i}]")
    elif (
        (isinstance(shape, range) and value not in shape)
        or (shape is int and not -(2**63) <= value < 2**63)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise InputError(f"{where} is {_shown(value)}; give {_words(shape)}")


def _is_of_kind(value: Any, shape: Shape) -> bool:
    shape = shape.shape if isinstance(shape, Needed) else shape
    kind = int if isinstance(shape, range) else shape if isinstance(shape, type) else type(shape)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _words(shape: Shape) -> str:
    shape = shape.shape if isinstance(shape, Needed) else shape
    if isinstance(shape, range):
        return f"a whole number from {shape.start} to {shape.stop - 1}"
    if isinstance(shape, tuple):
        return " or ".join(dict.fromkeys(map(_words, shape)))
    return _WORDS[shape] if isinstance(shape, type) else _WORDS[type(shape)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
