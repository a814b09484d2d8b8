"""One batch: (x, y, sample_weight) from the batches of any loader."""

from collections.abc import Callable, Mapping
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
    if not isinstance(batch, tuple | list) or (batch and all(map(_is_sample, batch))):
        return (batch,)
    return in_parts(batch)


def one_piece(batch: Tree) -> tuple:
    """Same as `as_tuple`, except that a dictionary is returned as (x,)."""
    return (batch,) if isinstance(batch, dict) else as_tuple(batch)


def in_parts(batch: Tree) -> tuple:
    """Returns a batch as (x,), (x, y) or (x, y, sample_weight), in the way of Keras.

    Raises:
        InputError: for a tuple or list of another length.
    """
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
        return is_record(part) and not _is_numbers(part)
    return isinstance(part, str | bytes)


def _is_numbers(record: dict[str, object]) -> bool:
    return all(isinstance(value, int | float) or value is None for value in record.values())


def is_record(part: object) -> bool:
    """Returns True for a record: named texts of one sample, such as a question and an answer.

    It may also have images, in any form.
    """
    if not isinstance(part, dict):
        return False
    texts = [value for name, value in part.items() if name not in RECORD_IMAGES]
    return bool(texts or not part) and all(
        value is None
        or isinstance(value, str | int | float)
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
        done = preprocess(x, *(None if part is None else _labels(part) for part in batch[1:]))
        batch = done if isinstance(done, tuple) else (done,)
    return tuple(map(_arrays, batch))


def class_weights(y: Any, class_weight: Mapping[int, float]) -> np.ndarray:
    """Returns the weight of each sample's class, (B,) in Keras' `floatx`.

    Args:
        y: classes as numbers, (B,) or (B, 1), or as one-hot rows (B, classes).
        class_weight: weight by class; 1 for classes that are not in it.

    Raises:
        InputError: for labels of several outputs.
    """
    if isinstance(y, dict | tuple | list):
        raise InputError("class_weight needs the labels of one output; give sample_weight")
    labels = to_numpy(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    weights = [class_weight.get(round(float(label)), 1.0) for label in labels]
    return np.array(weights, keras.config.floatx())


def with_class_weights(batch: tuple, class_weight: Mapping[int, float] | None) -> tuple:
    """Returns a batch (x, y) as (x, y, sample_weight); without class weights the batch itself.

    Raises:
        InputError: for a batch that has weights already, or no labels.
    """
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


def _arrays(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _arrays(value) for key, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map(_arrays, part))
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return {key: _arrays([sample[key] for sample in part]) for key in part[0]}
    if part is None or keras.ops.is_tensor(part):
        return part
    part = to_numpy(part)
    if not part.ndim:
        raise InputError("the data gives single samples; give batches, as its batch(32) makes them")
    return part
