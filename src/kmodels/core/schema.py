"""JSON files of any origin: read as objects, whose values have the type that their reader needs."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError, one_line

NUMBER = (int, float)
# A type or several, [shape] for a list, {"key": shape} for an object, {"*": shape} for any keys, or
# {} for any object. What is absent or null has every shape.
Shape = type | tuple[type, ...] | list[Any] | dict[str, Any]
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def read_json(path: Path, shape: Shape | None = None) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Args:
        path: path of the file, UTF-8.
        shape: that it must have, see `check_shape`.

    Raises:
        InputError: for a file that does not hold one, or a value of another shape.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds a JSON {type(found).__name__}; an object is needed")
    check_shape(found, shape or {}, path)
    return found


def check_shape(value: Any, shape: Shape, where: object) -> None:
    """Raises InputError for a value of another shape, naming its place.

    Args:
        value: of a JSON file.
        shape: types by key; keys that it does not name may hold anything.
        where: the file, and the keys on the way to the value.
    """
    if value is None:
        return
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is {_shown(value)}; give an object")
        for key, part in shape.items():
            for name in value if key == "*" else [key]:
                check_shape(value.get(name), part, f"{where}: {name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise InputError(f"{where} is {_shown(value)}; give a list")
        for i, one in enumerate(value):
            check_shape(one, shape[0], f"{where}[{i}]")
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            words = " or ".join(_WORDS[kind] for kind in kinds)
            raise InputError(f"{where} is {_shown(value)}; give a {words}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
