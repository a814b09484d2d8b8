"""The texts and records that users give to a preprocessor, one by one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.text.records import holds_pictures
from kmodels.text.texts import as_list, as_text


def one_by_one(x: Data, reader: str = "the model") -> tuple[list[Any], bool]:
    """Returns texts or records one by one, and whether there was more than one to begin with.

    Args:
        x: input of a preprocessor.
        reader: name of the model, for errors.

    Raises:
        InputError: for images, or columns of different lengths.
    """
    if isinstance(x, str | bytes):
        return [as_text(x)], False
    if isinstance(x, Mapping):
        if "messages" in x:
            if holds_pictures(dict(x)):
                raise InputError(_only_text(reader))
            return [dict(x)], False
        columns = {name: value for name, value in x.items() if value is not None}
        if "images" in columns:
            raise InputError(_only_text(reader))
        if all(isinstance(value, str | bytes) for value in columns.values()):
            return [{name: as_text(value) for name, value in columns.items()}], False
        lists = {
            name: [as_text(item) for item in as_list(value)] for name, value in columns.items()
        }
        if len(sizes := {len(column) for column in lists.values()}) > 1:
            raise InputError(
                "the columns differ in length: "
                + ", ".join(f"{name} {len(column)}" for name, column in lists.items())
            )
        names, rows = list(lists), range(sizes.pop() if sizes else 0)
        return [{name: lists[name][row] for name in names} for row in rows], True
    values = as_list(x)
    if not isinstance(values, list):
        return [as_text(values)], False
    records = [_bare(v) if isinstance(v, Mapping) else as_text(v) for v in values]
    if any(map(holds_pictures, records)):
        raise InputError(_only_text(reader))
    return records, True


def _only_text(reader: str) -> str:
    return f"{reader} takes only text here; leave 'images' out"


def _bare(value: object) -> Any:
    """Returns a record in which data loaders made arrays of the texts, without them."""
    if isinstance(value, np.ndarray):
        return _bare(value.tolist())
    if isinstance(value, Mapping):
        return {name: _bare(part) for name, part in value.items()}
    return [_bare(part) for part in value] if isinstance(value, list) else value
