"""Converts data of any framework for the training loop on the running backend.

Keras takes arrays and PyDatasets everywhere and most else on some backends. `as_dataset` tells what
kind of thing it was given from its methods and the name of its package, and imports nothing to find
out; `prepare` does so for all the data of a request.
"""

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from kmodels.core import dispatch, keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Data, Tree
from kmodels.data.fit import arrays
from kmodels.data.fit.batches import (
    LABEL_KEYS,
    IndexedBatches,
    Mapped,
    Preprocess,
    as_tuple,
    prepared,
)
from kmodels.data.fit.feed import DatasetAdapter, InstrumentedData
from kmodels.data.fit.native import Native
from kmodels.data.fit.ray_batches import FASTER, RayBatches
from kmodels.data.fit.request import FitRequest, Method
from kmodels.data.fit.stream import Calls, Chunks, Stream
from kmodels.data.images.loader import ImageLoader

_ACCEPTED = (
    "arrays, a PyDataset, a PyTorch DataLoader, tf.data, grain, a Hugging Face dataset, a Ray "
    "Dataset, an iterable of (x, y) batches, or a function that gives one"
)
# A length beyond this is how endless data sets answer.
_ENDLESS = 2**40
_PIPELINE = "give its map num_parallel_calls=tf.data.AUTOTUNE and end it with prefetch"


def as_dataset(
    x: Any,
    y: Data = None,
    sample_weight: Data = None,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    preprocess: Preprocess | None = None,
    class_weight: dict[int, float] | None = None,
) -> Any:
    """Returns one object that Keras' `fit`, `evaluate` and `predict` take as x on this backend.

    Args:
        x: arrays (nested, too), a PyDataset, a PyTorch DataLoader, tf.data, grain, a Hugging Face
            dataset, a Ray Dataset, a sequence of samples, an iterable of batches, or a function
            that gives one for each epoch.
        y: labels, where x is arrays.
        sample_weight: weights, where x is arrays.
        batch_size: for arrays and for datasets of single samples; 32 by default.
        shuffle: for those, a new order in each epoch, from `keras.utils.set_random_seed`'s seed.
        preprocess: called as preprocess(x, y, sample_weight) on each batch, in NumPy. An
            ImageLoader has its own, so it is left alone.
        class_weight: as in `fit`; applied here where Keras would not.

    Returns:
        x itself where Keras takes it as it is, else a PyDataset or a data adapter.

    Raises:
        InputError: for something that is none of these, or labels given twice.
    """
    x = arrays.columns(x, preprocess)
    if (prepared_by := getattr(x, "prepared_by", None)) is not None:
        return prepared_by(preprocess)  # one process's rows, of `kmodels.distribution`
    if isinstance(x, ImageLoader | IndexedBatches | InstrumentedData):
        _no_labels(x, y, sample_weight)
        return x
    size = batch_size or 32
    settings = {"shuffle": shuffle, "seed": _seed(), "preprocess": preprocess}
    if arrays.is_arrays(x, preprocess):
        parts = tuple(arrays.plain(part, preprocess) for part in (x, y, sample_weight))
        parts = parts[: 1 + max(i for i, part in enumerate(parts) if i == 0 or part is not None)]
        return IndexedBatches(
            lambda rows: arrays.take(parts, rows), arrays.length(parts), size, **settings
        )
    _no_labels(x, y, sample_weight)
    if isinstance(x, keras.utils.PyDataset):
        return x if preprocess is None else Mapped(x, preprocess)
    if arrays.is_tf_data(x):
        if preprocess is None and dispatch.backend() == arrays.package(x):
            whole = x.map(as_tuple) if _named_columns(x.element_spec) else x
            return Native(keras_internals.data_adapter(whole, class_weight=class_weight), _PIPELINE)
        count = int(x.cardinality())
        return Stream(x, count if count >= 0 else None, preprocess, class_weight, _PIPELINE)
    if arrays.package(x) == "datasets":
        return _hugging_face(x, size, settings, class_weight)
    if arrays.package(x) == "ray" and hasattr(x, "iter_batches"):
        rows = RayBatches(x, size)
        return Stream(rows, rows.count, preprocess, class_weight, FASTER)
    if isinstance(x, str | bytes):
        raise InputError(f"cannot train on {x!r}; give {_ACCEPTED}")
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and not hasattr(x, "__iter__"):
        return IndexedBatches(lambda rows: _collate(x, rows), len(x), size, **settings)
    if isinstance(x, Iterable):
        return Stream(x, _known_length(x), preprocess, class_weight)
    if inspect.isroutine(x) or isinstance(x, functools.partial):
        return Stream(Calls(x), None, preprocess, class_weight)
    raise InputError(f"cannot train on {type(x).__name__}; give {_ACCEPTED}")


def one_batch(parts: tuple[Any, ...], preprocess: Preprocess | None) -> tuple[Any, ...]:
    """Returns one batch as `train_on_batch` and its like take it.

    Args:
        parts: (x,), (x, y, ...) or (x, y, sample_weight), None for what there is not.
        preprocess: see `as_dataset`; without one the batch stays as it is.
    """
    if preprocess is None:
        return parts
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    return prepared(tuple(arrays.plain(part, preprocess) for part in parts), preprocess)


def prepare(request: FitRequest, preprocess: Preprocess | None = None) -> FitRequest:
    """Returns the request with data that Keras takes on the backend in use, in its order.

    Arrays to evaluate or predict on stay as they are where nothing preprocesses them. All other
    data becomes an `InstrumentedData`, which has its labels, weights, sizes and order in itself.

    Args:
        request: as the caller made it.
        preprocess: see `as_dataset`.

    Raises:
        InputError: for data that is empty or of no kind that `as_dataset` knows.
    """
    request = with_validation(request, preprocess)
    x, y, weight = request.x, request.y, request.sample_weight
    if arrays.is_empty(x, preprocess):
        raise InputError("the data is empty; give at least one sample")
    shuffle = request.shuffle
    # Samples are shuffled here, alike on every backend; tensors are left where they are.
    keras_orders = not shuffle or shuffle == "batch" or not arrays.all_numpy((x, y, weight))
    data: Any
    if preprocess is None and keras_orders and arrays.is_arrays(x, None):
        if request.method is not Method.FIT:
            return request
        adapter = keras_internals.data_adapter(
            x,
            y=y,
            sample_weight=weight,
            batch_size=request.batch_size,
            steps_per_epoch=request.steps,
            shuffle=shuffle,
            class_weight=request.class_weight,
        )
        data = Native(adapter)
    else:
        data = as_dataset(
            x,
            y,
            weight,
            request.batch_size,
            shuffle=bool(shuffle),
            preprocess=preprocess,
            class_weight=request.class_weight,
        )
        if isinstance(data, keras.utils.PyDataset):
            data = DatasetAdapter(data, request.class_weight)
    held_out = request.validation_data
    if isinstance(held_out, keras.utils.PyDataset):
        held_out = DatasetAdapter(held_out)
    return request.changed(
        x=data,
        y=None,
        sample_weight=None,
        batch_size=None,
        shuffle=False,
        class_weight=None,
        validation_data=held_out,
        # Keras would take it from the size of the batches, which is gone.
        validation_batch_size=request.validation_batch_size or request.batch_size,
    )


def with_validation(request: FitRequest, preprocess: Preprocess | None = None) -> FitRequest:
    """Returns the request with all that it validates on in `validation_data`, as Keras takes it.

    Args:
        request: as the caller made it.
        preprocess: see `as_dataset`.

    Raises:
        InputError: for a `validation_split` of what is not arrays, or that leaves a part empty.
    """
    size = request.batch_size
    if request.validation_data is not None:
        held_out = validation_data(
            request.validation_data,
            preprocess=preprocess,
            batch_size=request.validation_batch_size or size,
        )
        return request.changed(validation_data=held_out, validation_split=0.0)
    if not request.validation_split:
        return request
    given = request.x, request.y, request.sample_weight
    (x, y, weight), rest = _split(given, request.validation_split, preprocess)
    held_out = validation_data(rest, preprocess=preprocess, batch_size=size)
    return request.changed(
        x=x, y=y, sample_weight=weight, validation_data=held_out, validation_split=0.0
    )


def validation_data(
    data: Data, *, preprocess: Preprocess | None = None, batch_size: int | None = None
) -> Any:
    """Returns `validation_data` as Keras' `fit` takes it.

    Args:
        data: (x, y) or (x, y, sample_weight) of arrays, or anything that `as_dataset` takes.
        preprocess: see `as_dataset`.
        batch_size: for arrays and for datasets of single samples; 32 by default.
    """
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and arrays.is_arrays(data[0], preprocess):
        if preprocess is None:
            return data
        return as_dataset(*data, batch_size=batch_size, preprocess=preprocess)
    return as_dataset(data, batch_size=batch_size, preprocess=preprocess)


def _hugging_face(
    x: Any, size: int, settings: dict[str, Any], class_weight: dict[int, float] | None
) -> Any:
    if isinstance(x, dict):
        raise InputError(f"the dataset has splits {', '.join(x)}; give one of them")
    if not hasattr(x, "num_rows"):
        return Stream(Chunks(x, size), None, settings["preprocess"], class_weight)
    return IndexedBatches(lambda rows: as_tuple(x[rows.tolist()]), len(x), size, **settings)


def _seed() -> int:
    seed = keras_internals.random_seed()
    return 0 if seed is None else seed


def _no_labels(x: Data, y: Data, sample_weight: Data) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise InputError(
                f"{type(x).__name__} makes its own batches, so {name} cannot be given; put it "
                "in the batches"
            )


def _named_columns(spec: Tree) -> bool:
    return isinstance(spec, dict) and any(k in spec for k in LABEL_KEYS)


def _split(given: tuple, share: float, preprocess: Preprocess | None) -> tuple[tuple, tuple]:
    """Returns (x, y, sample_weight) to train on, and what there is of them in the last share."""
    x = given[0]
    if not arrays.is_arrays(x, preprocess):
        raise InputError(
            f"validation_split needs arrays, not {type(x).__name__}; give validation_data"
        )
    parts = tuple(arrays.plain(part, preprocess) for part in given)
    count = arrays.length(tuple(part for part in parts if part is not None))
    at = int(count * (1 - share))
    if not 0 < at < count:
        raise InputError(f"validation_split {share} of {count} samples leaves a part empty")
    first, last = arrays.take(parts, slice(0, at)), arrays.take(parts, slice(at, None))
    return first, tuple(part for part in last if part is not None)


def _collate(dataset: Any, rows: np.ndarray) -> tuple:
    """Returns samples of a sequence, column by column."""
    samples = [as_tuple(dataset[row]) for row in rows.tolist()]
    return tuple(list(column) for column in zip(*samples, strict=True))


def _known_length(x: Any) -> int | None:
    try:
        count = len(x)
    except (TypeError, NotImplementedError):
        return None
    if not count:
        raise InputError("the data gave no batch; give at least one")
    return count if count < _ENDLESS else None
