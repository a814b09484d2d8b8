"""Texts and token ids from strings, bytes, lists, arrays and tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.pipeline.arrays import to_numpy


def as_text(value: object) -> str:
    """Returns the text of a string, UTF-8 bytes, or an array with one of these."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"a text is not UTF-8 at byte {error.start + 1}") from error
    if not isinstance(value, str):
        raise InputError(f"expected text, got {type(value).__name__}")
    return value


def as_list(x: Any) -> Any:
    """Returns lists, arrays and tensors of text as a list, and one text in an array as it is."""
    if isinstance(x, Sequence):
        return list(x)
    if type(x).__module__.startswith("pandas"):
        return x.tolist()
    array = np.asarray(x)
    if array.dtype.kind not in "OUST" or array.ndim > 1:
        raise InputError(f"expected text, got {type(x).__name__} of {array.dtype}")
    return array.tolist()


def as_texts(x: object) -> tuple[list[str], bool]:
    """Returns (list of texts, True), or ([text], False) for a single text."""
    if isinstance(x, str | bytes):
        return [as_text(x)], False
    values = as_list(x)
    if not isinstance(values, list):
        return [as_text(values)], False
    return [as_text(value) for value in values], True


def as_ids(ids: Any) -> Any:
    """Returns ids as nested lists of ints, or one int."""
    if hasattr(ids, "to_list"):  # ragged, of TensorFlow
        return ids.to_list()
    if isinstance(ids, Mapping | str | bytes):
        raise InputError(f"expected token ids, got {type(ids).__name__}")
    if hasattr(ids, "__array__"):
        array = to_numpy(ids)
        if array.dtype.kind not in "biufO":
            raise InputError(f"expected token ids, got an array of {array.dtype}")
        return as_ids(array.tolist()) if array.dtype.kind in "fO" else array.tolist()
    if isinstance(ids, Sequence):
        return [as_ids(part) for part in ids]
    try:
        number = int(ids)
    except (TypeError, ValueError):
        raise InputError(f"expected token ids, got {type(ids).__name__}") from None
    if number != ids:
        raise InputError(f"expected token ids, got {ids}; give whole numbers")
    return number


def in_graph(x: object) -> bool:
    """Returns True if x is symbolic in a graph of TensorFlow."""
    x = getattr(x, "flat_values", x)
    return type(x).__module__.startswith("tensorflow") and not hasattr(x, "numpy")
