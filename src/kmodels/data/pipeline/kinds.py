"""The kinds of data that `fit` accepts: `as_dataset` makes batches, `prepare` a pipeline.

A kind is recognized by its methods and the name of its package, so no package is imported.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from kmodels.core import dispatch, keras_internals
from kmodels.core.errors import InputError, pluralize
from kmodels.core.types import Data
from kmodels.data.images.loader import ImageLoader
from kmodels.data.pipeline import arrays
from kmodels.data.pipeline.arrays import Preprocess, as_tuple, prepared
from kmodels.data.pipeline.indexed import IndexedBatches, Mapped, Numbered
from kmodels.data.pipeline.pipeline import Pipeline
from kmodels.data.pipeline.request import FitRequest, Method
from kmodels.data.pipeline.shard import BatchSharding, Shard
from kmodels.data.pipeline.stream import FASTER, Calls, Chunks, RayBatches, Streamed

Split = Callable[[Any], tuple]

_ACCEPTED = (
    "arrays, a PyDataset, a PyTorch DataLoader, tf.data, grain, a Hugging Face dataset, a Ray "
    "Dataset, an iterable of (x, y) batches, or a function that gives one"
)
# Endless data sets return a length beyond this.
_ENDLESS = 2**40
_TF_DATA = "give its map num_parallel_calls=tf.data.AUTOTUNE and end it with prefetch"


def as_dataset(
    x: Any,
    y: Data = None,
    sample_weight: Data = None,
    batch_size: int | None = None,
    *,
    shuffle: bool | str = False,
    preprocess: Preprocess | None = None,
    class_weight: dict[int, float] | None = None,
) -> Any:
    """Returns an object that Keras' `fit`, `evaluate` and `predict` accept as x on this backend.

    Args:
        x: arrays (nested, too), a PyDataset, a PyTorch DataLoader, tf.data, grain, a Hugging Face
            dataset, a Ray Dataset, a sequence of samples, an iterable of batches, or a function
            that gives one for each epoch.
        y: labels, if x is arrays.
        sample_weight: weights, if x is arrays.
        batch_size: for arrays and for datasets of single samples; 32 by default.
        shuffle: a new order of these in each epoch, by the seed of `keras.utils.set_random_seed`;
            "batch" shuffles within each batch.
        preprocess: called as preprocess(x, y, sample_weight) on each batch, in NumPy; not used for
            an ImageLoader, which has its own.
        class_weight: see `fit`; used for data that Keras does not apply it to.

    Returns:
        A PyDataset, or a `Pipeline` for data whose batches have no number.

    Raises:
        InputError: for other data, or for y with data that has labels.
    """
    return _dataset(
        (x, y, sample_weight),
        batch_size,
        keras_internals.random_seed() or 0,
        shuffle=shuffle,
        preprocess=preprocess,
        class_weight=class_weight,
    )


def _dataset(
    data: tuple[Any, Data, Data],
    size: int | None,
    seed: int,
    shuffle: bool | str = False,
    preprocess: Preprocess | None = None,
    class_weight: dict[int, float] | None = None,
    split: Split = as_tuple,
    steps: int | None = None,
    usual: int | None = None,
) -> Any:
    """Returns data (x, y, sample_weight) as `as_dataset` does.

    Without a size a batch has `usual` samples, 32 by default, or arrays are cut into a number of
    steps. `split` makes a tuple of each batch of a loader.
    """
    x, y, weight = arrays.columns(data[0], preprocess), *data[1:]
    if isinstance(x, Pipeline):
        _check_batched(x.source.data, y, weight, size)
        if x.shard is not None and x.preprocess is None:  # of `plan.shard`, which had no model
            x.preprocess_by(preprocess)
        return x
    if isinstance(x, ImageLoader | IndexedBatches):
        _check_batched(x, y, weight, size)
        return x
    settings: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "preprocess": preprocess}
    if arrays.is_arrays(x, preprocess):
        return _of_arrays((x, y, weight), size or usual, settings, steps)
    _check_batched(x, y, weight)
    if isinstance(x, keras.utils.PyDataset):
        _check_batched(x, size=size)
        return x if preprocess is None else Mapped(x, preprocess)
    count, faster, samples = None, None, size or usual or 32
    if arrays.is_tf_data(x):
        length = int(x.cardinality())
        count, faster = length if length >= 0 else None, _TF_DATA
    elif arrays.package(x) == "datasets":
        if isinstance(x, dict):
            raise InputError(f"the dataset has splits {', '.join(x)}; give one of them")
        if hasattr(x, "num_rows"):
            return IndexedBatches(lambda rows: split(x[_listed(rows)]), len(x), samples, **settings)
        x = Chunks(x, samples)
    elif arrays.package(x) == "ray" and hasattr(x, "iter_batches"):
        x, faster = RayBatches(x, samples), FASTER
        count = x.count
    elif isinstance(x, str | bytes):
        raise InputError(f"cannot train on {x!r}; give {_ACCEPTED}")
    elif isinstance(x, dict):  # which would be iterated by its names
        name = next(name for name, part in x.items() if not arrays.is_arrays(part, None))
        kind = type(x[name]).__name__
        raise InputError(f"x[{name!r}] is a {kind}; give an array of samples for each name")
    elif hasattr(x, "__getitem__") and hasattr(x, "__len__") and not hasattr(x, "__iter__"):
        return IndexedBatches(lambda rows: _collate(x, rows), len(x), samples, **settings)
    elif isinstance(x, Iterable):
        count = _known_length(x)
    elif inspect.isroutine(x) or isinstance(x, functools.partial):
        x = Calls(x)
    else:
        raise InputError(f"cannot train on {type(x).__name__}; give {_ACCEPTED}")
    if not isinstance(x, Chunks | RayBatches):
        _check_batched(x, size=size)
    return Pipeline(Streamed(x, count, split, faster), preprocess, class_weight)


def _of_arrays(
    data: tuple[Any, Data, Data], size: int | None, settings: dict[str, Any], steps: int | None
) -> IndexedBatches:
    preprocess = settings["preprocess"]
    x, y, weight = (arrays.plain(part, preprocess) for part in data)
    if preprocess is None and isinstance(y, dict | tuple) and hasattr(weight, "shape"):
        # As in Keras, one weight for each sample counts for each output.
        weight = keras.tree.map_structure(lambda _: weight, y)
    parts = (x, y, weight)
    parts = parts[: 1 + max(i for i, part in enumerate(parts) if i == 0 or part is not None)]
    count = arrays.length(parts)
    size = size or (math.ceil(count / steps) if steps else 32)

    casts = preprocess is None and arrays.has_other_floats(parts)

    def take(rows: np.ndarray | slice) -> tuple:
        batch = arrays.take(parts, rows)
        return arrays.as_floatx(batch) if casts else batch

    batches = IndexedBatches(take, count, size, **settings)
    # A check of a file would read all of it before the first step.
    if not _is_on_disk(parts):
        batches.whole = parts
    return batches


def _is_on_disk(part: Any) -> bool:
    if isinstance(part, dict | tuple):
        return any(map(_is_on_disk, part.values() if isinstance(part, dict) else part))
    while part is not None and not isinstance(part, np.memmap):
        part = getattr(part, "base", None)
    return part is not None


def one_batch(parts: tuple[Any, ...], preprocess: Preprocess | None) -> tuple[Any, ...]:
    """Returns (x,), (x, y) or (x, y, sample_weight) preprocessed; the last ones may be None."""
    if preprocess is None:
        return parts
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    return prepared(tuple(arrays.plain(part, preprocess) for part in parts), preprocess)


def prepare(
    request: FitRequest,
    preprocess: Preprocess | None = None,
    rule: BatchSharding | None = None,
    split: Split = as_tuple,
) -> FitRequest:
    """Returns the request with its data as `Pipeline`s.

    Args:
        request: the call with its original data.
        preprocess: see `as_dataset`.
        rule: which rows of each batch this process takes; None for all.
        split: makes (x,), (x, y) or (x, y, sample_weight) of a batch of a loader.

    Raises:
        InputError: for data that is empty or not supported by `as_dataset`, and for a
            `validation_split` of data other than arrays, or with an empty part.
    """
    seed = keras_internals.random_seed() or 0
    training = request.x, request.y, request.sample_weight
    if arrays.is_empty(request.x, preprocess):
        raise InputError("the data is empty; give at least one sample")
    held_out = request.validation_data
    if held_out is not None:
        if isinstance(held_out, tuple) and not 1 <= len(held_out) <= 3:
            raise InputError(
                f"validation_data has {len(held_out)} parts; give (x, y) or (x, y, sample_weight)"
            )
        held_out = held_out if isinstance(held_out, tuple) else (held_out,)
    elif request.validation_split:
        training, held_out = _split(training, request.validation_split, preprocess)

    def pipeline_of(
        parts: tuple,
        size: int | None,
        use: Method,
        steps: int | None,
        shuffle: bool | str = False,
        class_weight: dict[int, float] | None = None,
        usual: int | None = None,
    ) -> Pipeline:
        x, y, weight = (*parts, None, None)[:3]
        data = _dataset(
            (x, y, weight), size, seed, shuffle, preprocess, split=split, steps=steps, usual=usual
        )
        return pipeline(data, rule, use, steps, class_weight, seed if shuffle else None)

    size, use = request.batch_size, request.method
    x = pipeline_of(training, size, use, request.steps, request.shuffle, request.class_weight)
    if held_out is not None:
        held_out = pipeline_of(
            held_out,
            request.validation_batch_size,
            Method.EVALUATE,
            request.validation_steps,
            usual=size,
        )
    return request.changed(
        x=x, y=None, sample_weight=None, validation_data=held_out, validation_split=0.0
    )


def pipeline(
    data: Any,
    rule: BatchSharding | None = None,
    use: Method = Method.FIT,
    steps: int | None = None,
    class_weight: dict[int, float] | None = None,
    seed: int | None = None,
) -> Pipeline:
    """Returns the result of `as_dataset` as a pipeline, cut to the rows of this process.

    Args:
        data: a result of `as_dataset`.
        rule: which rows to take; None for all.
        use: the method that uses the data.
        steps: batches to end after, in evaluate and predict.
        class_weight: see `fit`.
        seed: seed of the order of a PyDataset's batches, see `Numbered`.
    """
    if not isinstance(data, Pipeline):
        data = Pipeline(Numbered(data, seed))
    if class_weight is not None:  # for this call only: the data may be the user's
        data = Pipeline(data.source, data.preprocess, class_weight, data.shard)
    if rule is None or data.shard is not None:
        return data
    loader = data.source.data
    own = arrays.is_tf_data(loader) and arrays.package(loader) == dispatch.backend()
    if own and data.preprocess is None:
        return data  # One process has all devices; each gets a part of a short batch too.
    shard = Shard(data.source, rule, use, None if use is Method.FIT else steps)
    return Pipeline(shard.source, data.preprocess, data.class_weight, shard)


def _listed(rows: np.ndarray | slice) -> list[int]:
    return [*range(rows.start, rows.stop)] if isinstance(rows, slice) else rows.tolist()


def _check_batched(
    x: Data, y: Data = None, sample_weight: Data = None, size: int | None = None
) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise InputError(
                f"{type(x).__name__} makes its own batches, so {name} cannot be given; put it "
                "in the batches"
            )
    if size is not None:
        warnings.warn(
            f"the data makes its own batches, so the batch size {size} has no effect", stacklevel=2
        )


def _split(data: tuple, share: float, preprocess: Preprocess | None) -> tuple[Any, tuple]:
    """Returns (x, y, sample_weight) to train on, and the last share of the parts that exist."""
    x = data[0]
    if not arrays.is_arrays(x, preprocess):
        raise InputError(
            f"validation_split needs arrays, not {type(x).__name__}; give validation_data"
        )
    parts = tuple(arrays.plain(part, preprocess) for part in data)
    count = arrays.length(tuple(part for part in parts if part is not None))
    at = int(count * (1 - share))
    if not 0 < at < count:
        raise InputError(f"validation_split {share} of {count} samples leaves a part empty")
    first, last = arrays.take(parts, slice(0, at)), arrays.take(parts, slice(at, None))
    return first, tuple(part for part in last if part is not None)


def _collate(dataset: Any, rows: np.ndarray | slice) -> tuple:
    """Returns samples of a sequence as columns; each has as many parts as the first one."""
    numbers = _listed(rows)
    samples = [as_tuple(dataset[number]) for number in numbers]
    for number, sample in zip(numbers, samples, strict=True):
        if len(sample) != len(samples[0]):
            raise InputError(
                f"sample {number} has {pluralize(len(sample), 'part')}, and sample {numbers[0]} "
                f"has {len(samples[0])}; give each (x,), (x, y) or (x, y, sample_weight)"
            )
    return tuple(list(column) for column in zip(*samples, strict=True))


def _known_length(x: Any) -> int | None:
    try:
        count = len(x)
    except (TypeError, NotImplementedError):
        return None
    if not count:
        raise InputError("the data gave no batch; give at least one")
    return count if count < _ENDLESS else None
