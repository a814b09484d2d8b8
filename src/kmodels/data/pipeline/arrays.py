"""Samples in arrays, as opposed to data that yields batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.pipeline.batch import RECORD_IMAGES, Preprocess, is_record, to_numpy


def is_arrays(x: Any, preprocess: Preprocess | None) -> bool:
    """Returns True if x is arrays of samples, False if it yields batches."""
    if isinstance(x, dict):
        return not _is_data(x) and all(is_arrays(part, None) for part in x.values())
    if isinstance(x, list | tuple):
        # A list of tuples is batches; a list of arrays is inputs, or images to preprocess.
        return bool(x) and (
            all(_is_leaf(part) for part in x)
            or (preprocess is None and isinstance(x, tuple) and all(map(_is_nested, x)))
            or (preprocess is not None and isinstance(x, list) and all(map(is_record, x)))
        )
    return _is_leaf(x) and np.ndim(x) > 0


def _has_image_lists(x: dict[str, Any]) -> bool:
    """Returns True for columns of records that have a list of images each."""
    lists = [x[name] for name in RECORD_IMAGES if name in x]
    others = [column for name, column in x.items() if name not in RECORD_IMAGES]
    return (
        any(isinstance(part, list) or getattr(part, "dtype", None) == "O" for part in lists)
        and bool(others)
        and all(isinstance(part, list | np.ndarray) for part in (*lists, *others))
    )


def is_empty(x: object, preprocess: Preprocess | None) -> bool:
    """Returns True if x is arrays without samples."""
    if not is_arrays(x, preprocess):
        return False
    parts = keras.tree.flatten(x)
    return any(hasattr(part, "shape") and tuple(part.shape)[:1] == (0,) for part in parts)


def columns(x: Any, preprocess: Preprocess | None) -> Any:
    """Returns a pandas table as its columns if it is preprocessed, a Hugging Face column as a list.

    Columns of texts with lists of images become a list of records.
    """
    if preprocess is not None and package(x) == "pandas" and hasattr(x, "columns"):
        x = {name: x[name].to_numpy(dtype=object) for name in x.columns}
    if preprocess is not None and isinstance(x, dict) and _has_image_lists(x):
        rows = range(length(x))
        return [{name: column[row] for name, column in x.items()} for row in rows]
    return x[:] if package(x) == "datasets" and type(x).__name__ == "Column" else x


def _is_nested(part: object) -> bool:
    return _is_leaf(part) or is_arrays(part, None)


def _is_leaf(part: object) -> bool:
    return (
        isinstance(part, str | bytes | int | float | Path)
        or (hasattr(part, "__array__") and hasattr(part, "shape"))
        or (hasattr(part, "__array_interface__") and hasattr(part, "size"))
    )


def _is_data(x: object) -> bool:
    return package(x) == "datasets" or is_tf_data(x)


def package(x: object) -> str:
    """Returns the name of the package of an object's class."""
    return type(x).__module__.partition(".")[0]


def is_tf_data(x: object) -> bool:
    """Returns True for a `tf.data.Dataset`."""
    return hasattr(x, "element_spec") and hasattr(x, "cardinality")


def plain(part: object, preprocess: Preprocess | None) -> Any:
    """Returns arrays of any package as NumPy arrays; tensors of the backend stay as they are.

    A list that is preprocessed stays a list of samples. A pandas column becomes (n, 1).
    """
    if part is None or keras.ops.is_tensor(part):
        return part
    if package(part) == "pandas" and preprocess is None:
        table = to_numpy(part)
        return table[:, None] if table.ndim == 1 else table
    if isinstance(part, dict):
        return {key: plain(value, None) for key, value in part.items()}
    if isinstance(part, tuple) or (isinstance(part, list) and preprocess is None):
        if part and not np.isscalar(part[0]) and np.ndim(part[0]):
            return tuple(plain(value, None) for value in part)
        # Strings of NumPy all take the memory of the longest one.
        texts = bool(part) and isinstance(part[0], str | bytes)
        return np.asarray(part, dtype=object if texts else None)
    return part if isinstance(part, list) else to_numpy(part)


def length(parts: Any) -> int:
    """Returns the number of samples of arrays; raises `InputError` if it differs among them."""
    lengths = set(_lengths(parts))
    if len(lengths) != 1:
        raise InputError(f"arrays have {sorted(lengths)} samples; give the same number in each")
    return lengths.pop()


def _lengths(tree: Any) -> Iterator[int]:
    if isinstance(tree, dict | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _lengths(part)
    elif tree is not None:
        yield len(tree)


def take(tree: Any, rows: np.ndarray | slice) -> Any:
    """Returns samples of a tree of arrays, by a slice or by numbers, int (B,)."""
    if isinstance(tree, dict):
        return {key: take(part, rows) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(take(part, rows) for part in tree)
    if isinstance(tree, list):
        return tree[rows] if isinstance(rows, slice) else [tree[row] for row in rows.tolist()]
    if tree is None or isinstance(rows, slice) or not keras.ops.is_tensor(tree):
        return None if tree is None else tree[rows]
    return keras.ops.take(tree, rows, axis=0)


def as_floatx(tree: Any) -> Any:
    """Returns arrays with floats cast to Keras' `floatx`, as Keras does with arrays."""
    floatx = keras.config.floatx()

    def cast(leaf: Any) -> Any:
        if not _is_other_float(leaf):
            return leaf
        return leaf.astype(floatx) if isinstance(leaf, np.ndarray) else keras.ops.cast(leaf, floatx)

    return keras.tree.map_structure(cast, tree)


def has_other_floats(tree: Any) -> bool:
    """Returns True if `as_floatx` would change an array."""
    return any(map(_is_other_float, keras.tree.flatten(tree)))


def _is_other_float(leaf: Any) -> bool:
    if leaf is None or getattr(leaf.dtype, "kind", "f") in "OSUMmiub":
        return False
    name = keras.backend.standardize_dtype(leaf.dtype)
    return name != keras.config.floatx() and keras.backend.is_float_dtype(name)


def tensors(tree: Any) -> Any:
    """Returns arrays as tensors on the device, float64 cast to Keras' `floatx`."""

    def tensor(part: Any) -> Any:
        if part is None:
            return None
        wide = isinstance(part, np.ndarray) or keras.ops.is_tensor(part)
        if wide and keras.backend.standardize_dtype(part.dtype) == "float64":
            return keras.ops.cast(part, keras.config.floatx())
        return keras.ops.convert_to_tensor(part)

    return keras.tree.map_structure(tensor, tree)
