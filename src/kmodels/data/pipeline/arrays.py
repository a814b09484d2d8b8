"""Samples in arrays, and batches (x,), (x, y) or (x, y, sample_weight) of any loader."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.images.decoding import is_pillow

Preprocess = Callable[..., Any]

# Usual column names of image data sets; the first one that a batch has is used.
IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
# Names of the image or the list of images in a record.
RECORD_IMAGES = ("images", "image")
LABEL_KEYS = ("label", "labels", "fine_label", "y")
_SINGLE = "the data gives single samples; give batches, as its batch(32) makes them"


def as_tuple(batch: Tree) -> tuple:
    """Returns a batch of a loader as (x,), (x, y) or (x, y, sample_weight).

    Of named columns the label is y; x is the image, or without one all other columns as the named
    inputs of a model. A list of texts or records is x, since loaders collate them so.
    """
    if isinstance(batch, dict):
        image = next((key for key in IMAGE_KEYS if key in batch), None)
        label = next((key for key in LABEL_KEYS if key in batch), None)
        apart = {label, "sample_weight"}
        inputs = {key: value for key, value in batch.items() if key not in apart}
        if label is None or not inputs:
            return (batch,)
        weight = (batch["sample_weight"],) if "sample_weight" in batch else ()
        return (inputs if image is None else batch[image], batch[label], *weight)
    if isinstance(batch, tuple) and 1 < len(batch) < 4 and all(map(_is_text, batch)):
        raise InputError(
            f"the data gave a tuple of {len(batch)} texts, which may be a batch or one sample and "
            'its answer; give a list for a batch, or {"prompts": ..., "responses": ...}'
        )
    if not isinstance(batch, tuple | list) or (batch and all(map(_is_sample, batch))):
        return (batch,)
    return in_parts(batch)


def one_piece(batch: Tree) -> tuple:
    """Same as `as_tuple`, except that a dictionary is returned as (x,)."""
    return (batch,) if isinstance(batch, dict) else as_tuple(batch)


def in_parts(batch: Tree) -> tuple:
    """Returns a batch as (x,), (x, y) or (x, y, sample_weight), in the way of Keras."""
    batch = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    if not 1 <= len(batch) <= 3:
        raise InputError(
            f"the data gave {len(batch)} items per batch; give (x,), (x, y) or "
            "(x, y, sample_weight)"
        )
    return batch


def _is_sample(part: object) -> bool:
    """Returns True for a text or a record, lists of which are batches."""
    if isinstance(part, dict):
        values = part.values()
        numbers = all(isinstance(value, int | float) or value is None for value in values)
        return is_record(part) and not numbers
    return _is_text(part)


def _is_text(part: object) -> bool:
    return isinstance(part, str | bytes)


def is_record(part: object) -> bool:
    """Returns True for a record: named texts of one sample, such as a question and an answer.

    It may also have images, in any form.
    """
    if not isinstance(part, dict):
        return False
    texts = [value for name, value in part.items() if name not in RECORD_IMAGES]
    return bool(texts or not part) and all(
        value is None
        or isinstance(value, str | bytes | int | float)
        or (isinstance(value, list) and all(isinstance(item, dict) for item in value))
        for value in texts
    )


def to_numpy(thing: Any) -> Any:
    """Returns arrays of any framework, Pillow images, and nests of them as NumPy arrays."""
    if isinstance(thing, dict):
        return {key: to_numpy(value) for key, value in thing.items()}
    if isinstance(thing, tuple):
        return tuple(map(to_numpy, thing))
    if isinstance(thing, list):
        parts = [to_numpy(part) for part in thing]
        if len({np.shape(part) for part in parts}) > 1:
            raise InputError(
                "samples of one batch differ in size; make them equal first, or use ImageLoader"
            )
        return np.asarray(parts)
    if hasattr(thing, "detach"):  # of torch: it may be on another device and require a gradient
        thing = thing.detach().cpu()
        if "bfloat16" in str(thing.dtype):  # NumPy has none
            thing = thing.float()
    return np.asarray(thing)


def prepared(batch: tuple, preprocess: Preprocess | None) -> tuple:
    """Returns a preprocessed batch of NumPy arrays; tensors of the backend stay as they are."""
    if preprocess is not None:
        # Images of one batch may differ in size here, since the preprocessor may resize them.
        x = _to_preprocess(batch[0])
        if isinstance(x, dict) and any(map(_is_one_text, x.values())):
            raise InputError(_SINGLE)
        done = preprocess(x, *(None if part is None else _labels(part) for part in batch[1:]))
        batch = done if isinstance(done, tuple) else (done,)
    return tuple(map(_arrays, batch))


def class_weights(y: Any, class_weight: Mapping[int, float]) -> np.ndarray:
    """Returns the weight of each sample's class, (B,) in Keras' `floatx`; 1 for other classes.

    Labels are classes as numbers, (B,) or (B, 1), or one-hot rows (B, classes).
    """
    if isinstance(y, dict | tuple | list):
        raise InputError("class_weight needs the labels of one output; give sample_weight")
    labels = to_numpy(y)
    if labels.ndim > 2:
        raise InputError(
            f"class_weight needs one label per sample, and labels have shape {labels.shape}; give "
            "sample_weight"
        )
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    weights = [class_weight.get(round(float(label)), 1.0) for label in labels]
    return np.array(weights, keras.config.floatx())


def check_class_weight(model: keras.Model | None, class_weight: Any) -> None:
    """Raises `InputError` for weights that are not a number for each class of a model."""
    if class_weight is None:
        return
    if not isinstance(class_weight, Mapping):
        raise InputError(f"class_weight is {class_weight!r}; give a weight by class, as {{0: 2.0}}")
    # One logit is the score of the second of two classes, or a model of Keras may have any.
    classes = getattr(model, "number_of_labels", 0)
    known = f"0 to {classes - 1}" if classes > 1 else "a whole number from 0"
    for key, weight in class_weight.items():
        if not isinstance(key, int | float | np.number) or key not in range(
            classes if classes > 1 else sys.maxsize
        ):
            raise InputError(f"class_weight has the class {key!r}; give {known}")
        if not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise InputError(f"class_weight of class {key} is {weight!r}; give a number from 0")


def with_class_weights(batch: tuple, class_weight: Mapping[int, float] | None) -> tuple:
    """Returns a batch (x, y) as (x, y, sample_weight); without class weights the batch itself."""
    if class_weight is None:
        return batch
    if len(batch) != 2 or batch[1] is None:
        has = "no labels" if len(batch) < 2 or batch[1] is None else "sample weights"
        raise InputError(f"got class_weight for batches that have {has}; leave class_weight out")
    return (*batch, class_weights(batch[1], class_weight))


def _to_preprocess(x: Any) -> Any:
    """Returns samples as NumPy arrays, except for Pillow images, records, and columns of lists.

    An array would lose the orientation of an image, and change bytes or paths in a record.
    """
    if isinstance(x, list):
        return [one if is_record(one) or is_pillow(one) else to_numpy(one) for one in x]
    x = _unragged(x) if isinstance(x, dict) else x
    if isinstance(x, dict) and any(_is_texts(part) for part in x.values()):
        return {key: part if isinstance(part, list) else to_numpy(part) for key, part in x.items()}
    return to_numpy(x)


def _labels(part: Any) -> Any:
    """Returns labels as NumPy arrays; arrays of different sizes stay a list."""
    if isinstance(part, dict):
        return {key: _labels(value) for key, value in part.items()}
    arrays = isinstance(part, list) and all(hasattr(one, "shape") for one in part)
    if arrays and len({tuple(one.shape) for one in part}) > 1:
        return [to_numpy(one) for one in part]
    return to_numpy(part)


def _is_texts(column: object) -> bool:
    """Returns True for a column of texts or messages."""
    while isinstance(column, list) and column:
        column = column[0]
    kind = getattr(getattr(column, "dtype", None), "kind", "")
    return isinstance(column, str | dict) or kind in ("O", "U", "S")


def _is_one_text(column: object) -> bool:
    return isinstance(column, np.ndarray) and not column.ndim and column.dtype.kind in "OUS"


def _arrays(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _arrays(value) for key, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map(_arrays, part))
    if isinstance(part, list) and part and isinstance(part[0], dict):
        for number, sample in enumerate(part):
            if not isinstance(sample, dict) or sample.keys() != part[0].keys():
                fields = ", ".join(map(str, sample)) if isinstance(sample, dict) else repr(sample)
                raise InputError(
                    f"sample {number} of a batch has the fields {fields}, and the first one "
                    f"{', '.join(map(str, part[0]))}; give the same fields in each"
                )
        return {key: _arrays([sample[key] for sample in part]) for key in part[0]}
    if part is None or keras.ops.is_tensor(part):
        return part
    part = to_numpy(part)
    if not part.ndim:
        raise InputError(_SINGLE)
    return part


def is_arrays(x: Any, preprocess: Preprocess | None) -> bool:
    """Returns True if x is arrays of samples, False if it yields batches."""
    if isinstance(x, dict):
        is_dataset = package(x) == "datasets" or is_tf_data(x)
        return not is_dataset and all(is_arrays(part, None) for part in x.values())
    if isinstance(x, list | tuple):
        # A list of tuples is batches; a list of arrays is inputs, or images to preprocess.
        return bool(x) and (
            all(_is_leaf(part) for part in x)
            or (
                preprocess is None
                and isinstance(x, tuple)
                and all(_is_leaf(part) or is_arrays(part, None) for part in x)
            )
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

    Columns of texts with lists of images become a list of records, also if the images are ragged.
    """
    if preprocess is not None and package(x) == "pandas" and hasattr(x, "columns"):
        x = {name: x[name].to_numpy(dtype=object) for name in x.columns}
    if preprocess is not None and isinstance(x, dict) and _has_image_lists(x := _unragged(x)):
        rows = range(length(x))
        return [{name: column[row] for name, column in x.items()} for row in rows]
    return x[:] if package(x) == "datasets" and type(x).__name__ == "Column" else x


def _is_leaf(part: object) -> bool:
    return (
        isinstance(part, str | bytes | int | float | Path)
        or (hasattr(part, "__array__") and hasattr(part, "shape"))
        or (hasattr(part, "__array_interface__") and hasattr(part, "size"))
    )


def package(x: object) -> str:
    """Returns the name of the package of an object's class."""
    return type(x).__module__.partition(".")[0]


def _unragged(x: dict[str, Any]) -> dict[str, Any]:
    """Returns columns on the host if one of them is ragged, else as they are."""
    if not any(map(is_ragged, x.values())):
        return x
    return {name: on_host(column) for name, column in x.items()}


def is_ragged(x: object) -> bool:
    """Returns True for a tensor whose rows may differ in length, as TensorFlow has them."""
    return hasattr(x, "nested_row_splits") and hasattr(x, "to_tensor")


def on_host(x: Any) -> Any:
    """Returns a tensor as an array, or as a list of arrays if it is ragged and its rows differ."""
    if not is_ragged(x):
        return to_numpy(x)
    dense = x.to_tensor()
    if dense.shape.num_elements() == x.flat_values.shape.num_elements():
        return dense.numpy()
    return [on_host(row) for row in x]


def is_tf_data(x: object) -> bool:
    """Returns True for a `tf.data.Dataset`."""
    return hasattr(x, "element_spec") and hasattr(x, "cardinality")


def plain(part: object, preprocess: Preprocess | None) -> Any:
    """Returns arrays of any package as NumPy arrays; tensors of the backend stay as they are.

    A list that is preprocessed stays a list of samples, also one of arrays in a dictionary. A
    pandas column becomes (n, 1).
    """
    if part is None or keras.ops.is_tensor(part):
        return part
    if package(part) == "pandas" and preprocess is None:
        table = to_numpy(part)
        return table[:, None] if table.ndim == 1 else table
    if isinstance(part, dict):
        return {
            key: plain(value, preprocess if _is_ragged_list(value) else None)
            for key, value in part.items()
        }
    if isinstance(part, tuple) or (isinstance(part, list) and preprocess is None):
        if part and not np.isscalar(part[0]) and np.ndim(part[0]):
            return tuple(plain(value, None) for value in part)
        # Strings of NumPy all take the memory of the longest one.
        texts = bool(part) and isinstance(part[0], str | bytes)
        return np.asarray(part, dtype=object if texts else None)
    return part if isinstance(part, list) else to_numpy(part)


def _is_ragged_list(column: object) -> bool:
    """Returns True for a list of arrays, or of lists, one for each sample."""
    return isinstance(column, list) and bool(column) and not np.isscalar(column[0])


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


def rows(batch: Tree) -> Any:
    """Returns the number of examples in a batch, symbolic in a graph."""
    for part in keras.tree.flatten(batch):
        if part is not None:
            return keras.ops.shape(part)[0] if len(part.shape) else 1
    raise InputError("the data gave an empty batch; give at least one array")


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
