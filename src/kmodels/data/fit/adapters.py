"""What a user gives to `fit`, turned into what Keras' `fit` takes on the backend in use.

Keras takes arrays and PyDatasets everywhere and most else on some backends. What kind of thing it
was given is told from its methods and the name of its package: nothing is imported to find out.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from kmodels.core import dispatch, keras_internals
from kmodels.core.errors import InputError
from kmodels.data.fit import arrays
from kmodels.data.fit.batches import (
    LABEL_KEYS,
    Calls,
    IndexedBatches,
    Preprocess,
    Stream,
    as_tuple,
    prepared,
)
from kmodels.data.fit.epoch_callback import FollowEpoch
from kmodels.data.fit.feed import DatasetAdapter, InstrumentedData, Native
from kmodels.data.images.loader import ImageLoader

_ACCEPTED = (
    "arrays, a PyDataset, a PyTorch DataLoader, tf.data, grain, a Hugging Face dataset, an "
    "iterable of (x, y) batches, or a function that gives one"
)
# A length beyond this is how endless data sets answer.
_ENDLESS = 2**40
_PIPELINE = "give its map num_parallel_calls=tf.data.AUTOTUNE and end it with prefetch"


def as_dataset(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    preprocess: Preprocess | None = None,
    class_weight: dict[int, float] | None = None,
) -> Any:
    """One object that Keras' `fit`, `evaluate` and `predict` take as x on this backend.

    Args:
        x: arrays (nested, too), a PyDataset, a PyTorch DataLoader, tf.data, grain, a Hugging Face
            dataset, a sequence of samples, an iterable of batches, or a function that gives one
            for each epoch.
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
    """One batch as `train_on_batch` and its like take it.

    Args:
        parts: (x,), (x, y, ...) or (x, y, sample_weight), None for what there is not.
        preprocess: see `as_dataset`; without one the batch stays as it is.
    """
    if preprocess is None:
        return parts
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    return prepared(tuple(arrays.plain(part, preprocess) for part in parts), preprocess)


def run(
    method: Callable[..., Any],
    x: Any,
    y: Any = None,
    *,
    preprocess: Preprocess | None = None,
    **kwargs: Any,
) -> Any:
    """Calls Keras' `fit`, `evaluate` or `predict` on any data.

    An error of the data arrives as it was raised, and whatever ends the call, no thread is left.

    Args:
        method: of a model.
        x: see `as_dataset`.
        y: labels, where x is arrays.
        preprocess: see `as_dataset`.
        **kwargs: see `fit_arguments`.

    Returns:
        What the method returns.
    """
    arguments = fit_arguments(x, y, preprocess=preprocess, **kwargs)
    given = (arguments["x"], arguments.get("validation_data"))
    feeds = [feed for feed in given if isinstance(feed, InstrumentedData) and not feed.running]
    for feed in feeds:
        feed.running, feed.model = True, getattr(method, "__self__", None)
    try:
        with _unwarned(feeds, arguments):
            return method(**arguments)
    except Exception as error:
        for feed in feeds:
            # tf.data wraps it. What was made ahead may be wrong too, and not be the reason.
            if feed.error is not None and str(feed.error) in str(error):
                raise feed.error from None
        raise
    finally:
        for feed in feeds:
            feed.running = False
            feed.close()


@contextmanager
def _unwarned(feeds: list[InstrumentedData], arguments: dict[str, Any]) -> Iterator[None]:
    """Without Keras' warning that data ended, where nobody had said how much there is."""
    told = arguments.get("steps_per_epoch") or arguments.get("steps")
    if told or not any(isinstance(f, Stream | Native) and f.num_batches is None for f in feeds):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield


def fit_arguments(
    x: Any, y: Any = None, *, preprocess: Preprocess | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Arguments for Keras' `fit`, `evaluate` or `predict` with x as it takes it.

    Args:
        x: see `as_dataset`.
        y: labels, where x is arrays.
        preprocess: see `as_dataset`.
        **kwargs: the method's others. For `fit`, `shuffle` must be among them.

    Returns:
        All arguments by name.
    """
    if isinstance(x, InstrumentedData) and x.running:
        return {"x": x, **_given(y=y), **kwargs}  # a method that another one called
    fits, shuffle = "shuffle" in kwargs, kwargs.get("shuffle", False)
    size, weight = kwargs.get("batch_size"), kwargs.get("sample_weight")
    if share := kwargs.pop("validation_split", 0.0):
        x, y, weight, kwargs["validation_data"] = split(
            x, y, weight, share, kwargs.get("validation_data"), preprocess, size
        )
        kwargs["sample_weight"] = weight
    if arrays.is_empty(x, preprocess):
        raise InputError("the data is empty; give at least one sample")
    if (
        preprocess is None
        and arrays.is_arrays(x, None)
        and (not shuffle or shuffle == "batch" or not arrays.all_numpy((x, y, weight)))
    ):
        if not fits:
            return {"x": x, **_given(y=y), **kwargs}
        names = ("sample_weight", "batch_size", "class_weight")
        settings = {name: kwargs.pop(name) for name in names if name in kwargs}
        steps = kwargs.get("steps_per_epoch")
        adapter = keras_internals.data_adapter(
            x, y=y, shuffle=shuffle, steps_per_epoch=steps, **settings
        )
        data: Any = Native(adapter)
    else:
        kwargs.pop("sample_weight", None)
        kwargs.pop("batch_size", None)
        class_weight = kwargs.pop("class_weight", None)
        data = as_dataset(
            x,
            y,
            weight,
            size,
            shuffle=bool(shuffle),
            preprocess=preprocess,
            class_weight=class_weight,
        )
        if isinstance(data, keras.utils.PyDataset):
            data = DatasetAdapter(data, class_weight)
    if fits:
        kwargs["shuffle"] = False
        if (held_out := kwargs.get("validation_data")) is not None:
            # Keras would take the size of the batches from arguments that are gone.
            kwargs.setdefault("validation_batch_size", size)
            if isinstance(held_out, keras.utils.PyDataset):
                kwargs["validation_data"] = DatasetAdapter(held_out)
    say = functools.partial(print, flush=True) if kwargs.get("verbose", "auto") else None
    follow = FollowEpoch(data, kwargs.get("validation_data"), kwargs.get("steps_per_epoch"), say)
    callbacks = kwargs.get("callbacks") or []
    if (held := getattr(callbacks, "callbacks", None)) is not None:
        held.append(follow)  # Keras' CallbackList
    else:
        callbacks = [*(callbacks if isinstance(callbacks, list | tuple) else [callbacks]), follow]
    return {"x": data, **kwargs, "callbacks": callbacks}


def validation_data(
    data: Any, *, preprocess: Preprocess | None = None, batch_size: int | None = None
) -> Any:
    """`validation_data` as Keras' `fit` takes it.

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


class Mapped(keras.utils.PyDataset):
    """A PyDataset whose batches go through a function.

    Args:
        dataset: any; what Keras and `fit` tell about epochs is passed on to it.
        preprocess: called as preprocess(x, y, sample_weight) on each batch, in NumPy.
    """

    def __init__(self, dataset: keras.utils.PyDataset, preprocess: Preprocess):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._preprocess = preprocess

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch."""
        return self._dataset.num_batches

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple:
        return prepared(as_tuple(self._dataset[index]), self._preprocess)

    def set_epoch(self, *which: int) -> None:
        """See `ImageLoader.set_epoch`; for a dataset without one it does nothing."""
        if (tell := getattr(self._dataset, "set_epoch", None)) is not None:
            tell(*which)

    def on_epoch_begin(self) -> None:
        """Before an epoch."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """After an epoch."""
        self._dataset.on_epoch_end()


class _Rows:
    """A Hugging Face IterableDataset in batches, from its start each time."""

    def __init__(self, dataset: Any, batch_size: int):
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[tuple]:
        for batch in self._dataset.iter(self._batch_size):
            yield as_tuple(batch)

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)


def _hugging_face(x: Any, size: int, settings: dict[str, Any], class_weight: Any) -> Any:
    if isinstance(x, dict):
        raise InputError(f"the dataset has splits {', '.join(x)}; give one of them")
    if not hasattr(x, "num_rows"):
        return Stream(_Rows(x, size), None, settings["preprocess"], class_weight)
    return IndexedBatches(lambda rows: as_tuple(x[rows.tolist()]), len(x), size, **settings)


def _seed() -> int:
    seed = keras_internals.random_seed()
    return 0 if seed is None else seed


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _no_labels(x: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise InputError(
                f"{type(x).__name__} gives its own batches, so {name} must not be given; put it in "
                "the batches"
            )


def _named_columns(spec: Any) -> bool:
    return isinstance(spec, dict) and any(k in spec for k in LABEL_KEYS)


def split(
    x: Any, y: Any, weight: Any, share: float, held_out: Any, preprocess: Any, size: Any
) -> tuple[Any, Any, Any, Any]:
    """The last share of arrays for validation, as Keras takes it.

    Returns:
        x, y and weights to train on, and what to validate on.
    """
    if held_out is not None:
        return x, y, weight, held_out
    if not arrays.is_arrays(x, preprocess):
        raise InputError(
            f"validation_split needs arrays, not {type(x).__name__}; give validation_data"
        )
    parts = tuple(arrays.plain(part, preprocess) for part in (x, y, weight))
    count = arrays.length(tuple(part for part in parts if part is not None))
    at = int(count * (1 - share))
    if not 0 < at < count:
        raise InputError(f"validation_split {share} of {count} samples leaves a part empty")
    first, last = arrays.take(parts, slice(0, at)), arrays.take(parts, slice(at, None))
    rest = tuple(part for part in last if part is not None)
    return *first, validation_data(rest, preprocess=preprocess, batch_size=size)


def _collate(dataset: Any, rows: np.ndarray) -> tuple:
    """Samples of a sequence, column by column."""
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
