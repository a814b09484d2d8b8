"""What a user gives to `fit`, turned into what Keras' `fit` takes on the backend in use.

Keras takes arrays and PyDatasets everywhere and most else on some backends. What kind of thing it
was given is told from its methods and the name of its package: nothing is imported to find out.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from kmodels import compat
from kmodels.data.loader import ImageLoader
from kmodels.data.streams import (
    IMAGE_KEYS,
    LABEL_KEYS,
    IndexedBatches,
    Preprocess,
    Stream,
    as_tuple,
    prepared,
    to_numpy,
)
from kmodels.errors import InputError

_ACCEPTED = (
    "arrays, a PyDataset, a PyTorch DataLoader, tf.data, grain, a Hugging Face dataset, or an "
    "iterable of (x, y) batches"
)
# A length beyond this is how endless data sets answer.
_ENDLESS = 2**40


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
            dataset, a sequence of samples, or an iterable of batches.
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
    if isinstance(x, ImageLoader | IndexedBatches | Stream):
        _no_labels(x, y, sample_weight)
        return x
    size = batch_size or 32
    settings = {"shuffle": shuffle, "seed": _seed(), "preprocess": preprocess}
    if _is_arrays(x, preprocess):
        parts = tuple(_plain(part, preprocess) for part in (x, y, sample_weight))
        parts = parts[: 1 + max(i for i, part in enumerate(parts) if i == 0 or part is not None)]
        return IndexedBatches(lambda rows: _take(parts, rows), _length(parts), size, **settings)
    _no_labels(x, y, sample_weight)
    if isinstance(x, keras.utils.PyDataset):
        return x if preprocess is None else _Mapped(x, preprocess)
    if _is_tf_data(x):
        if preprocess is None:
            return x.map(as_tuple) if _named_columns(x.element_spec) else x
        count = int(x.cardinality())
        return Stream(x, count if count >= 0 else None, preprocess, class_weight)
    if _package(x) == "datasets":
        return _hugging_face(x, size, settings, class_weight)
    if isinstance(x, str | bytes):
        raise InputError(f"cannot train on {x!r}; give {_ACCEPTED}")
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and not hasattr(x, "__iter__"):
        return IndexedBatches(lambda rows: _collate(x, rows), len(x), size, **settings)
    if isinstance(x, Iterable):
        return Stream(x, _known_length(x), preprocess, class_weight)
    raise InputError(f"cannot train on {type(x).__name__}; give {_ACCEPTED}")


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
    if kwargs.pop("_use_cached_eval_dataset", False):
        # fit evaluates on what has been turned already.
        return {"x": x, **_given(y=y), **kwargs, "_use_cached_eval_dataset": True}
    shuffle = kwargs.get("shuffle", False)
    weight = kwargs.get("sample_weight")
    if share := kwargs.pop("validation_split", 0.0):
        x, y, weight, kwargs["validation_data"] = _split(
            x, y, weight, share, kwargs.get("validation_data"), preprocess, kwargs.get("batch_size")
        )
        kwargs["sample_weight"] = weight
    if (
        preprocess is None
        and _is_arrays(x, None)
        and (not shuffle or shuffle == "batch" or not _all_numpy((x, y, weight)))
    ):
        data = x
        kwargs |= _given(y=y)
    else:
        kwargs.pop("sample_weight", None)
        data = as_dataset(
            x,
            y,
            weight,
            kwargs.pop("batch_size", None),
            shuffle=bool(shuffle),
            preprocess=preprocess,
            class_weight=kwargs.get("class_weight"),
        )
        if "shuffle" in kwargs:
            kwargs["shuffle"] = False
        if isinstance(data, Stream):
            kwargs.pop("class_weight", None)
    follow = FollowEpoch(data, kwargs.get("validation_data"), kwargs.get("steps_per_epoch"))
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
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and _is_arrays(data[0], preprocess):
        if preprocess is None:
            return data
        return as_dataset(*data, batch_size=batch_size, preprocess=preprocess)
    return as_dataset(data, batch_size=batch_size, preprocess=preprocess)


class FollowEpoch(keras.callbacks.Callback):
    """Tells data which epoch it is in, also where training starts at a later one.

    Args:
        data: what is trained, evaluated or predicted on.
        held_out: what `fit` evaluates on.
        steps_per_epoch: where given, an epoch of `fit` is not one of the data, which then counts
            for itself.
    """

    def __init__(self, data: Any, held_out: Any = None, steps_per_epoch: int | None = None):
        super().__init__()
        self._data = data
        self._held_out = held_out
        self._tells = steps_per_epoch is None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Before the first batch is asked for."""
        if self._tells and hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """After Keras has read batches to build the model."""
        _begin(self._data)

    def on_test_begin(self, logs: Any = None) -> None:
        """As above, for evaluate, inside of fit or not."""
        _begin(self._data if self._held_out is None else self._held_out)

    def on_predict_begin(self, logs: Any = None) -> None:
        """As above, for predict."""
        _begin(self._data)


def _begin(data: Any) -> None:
    if isinstance(data, Stream):
        data.begin()


class _Mapped(keras.utils.PyDataset):
    """A user's PyDataset with preprocessing."""

    def __init__(self, dataset: keras.utils.PyDataset, preprocess: Preprocess):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._preprocess = preprocess

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> tuple:
        return prepared(as_tuple(self._dataset[index]), self._preprocess)

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
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
    if not hasattr(x, "__getitem__"):
        return Stream(_Rows(x, size), None, settings["preprocess"], class_weight)
    return IndexedBatches(lambda rows: as_tuple(x[rows.tolist()]), len(x), size, **settings)


def _seed() -> int:
    seed = compat.random_seed()
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


def _package(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _is_tf_data(x: Any) -> bool:
    return hasattr(x, "element_spec") and hasattr(x, "cardinality")


def _named_columns(spec: Any) -> bool:
    return (
        isinstance(spec, dict)
        and any(k in spec for k in IMAGE_KEYS)
        and any(k in spec for k in LABEL_KEYS)
    )


def _is_arrays(x: Any, preprocess: Preprocess | None) -> bool:
    """Whether x is samples side by side, as opposed to something that yields batches."""
    if isinstance(x, dict):
        return not _is_data(x) and all(_is_arrays(part, None) for part in x.values())
    if isinstance(x, list | tuple):
        # A list of tuples is batches; a list of arrays is inputs, or pictures to preprocess.
        return bool(x) and (
            all(_is_leaf(part) for part in x)
            or (preprocess is None and isinstance(x, tuple) and all(map(_is_nested, x)))
            or (preprocess is not None and isinstance(x, list) and all(map(_is_record, x)))
        )
    return _is_leaf(x) and np.ndim(x) > 0


def _is_nested(part: Any) -> bool:
    return _is_leaf(part) or _is_arrays(part, None)


def _is_leaf(part: Any) -> bool:
    return (
        isinstance(part, str | bytes | int | float)
        or (hasattr(part, "__array__") and hasattr(part, "shape"))
        or (hasattr(part, "__array_interface__") and hasattr(part, "size"))
    )


def _is_record(part: Any) -> bool:
    """Whether it is named texts of one sample, such as a question and an answer."""
    return isinstance(part, dict) and all(
        value is None
        or isinstance(value, str | int | float)
        or (isinstance(value, list) and all(isinstance(item, dict) for item in value))
        for value in part.values()
    )


def _is_data(x: Any) -> bool:
    return _package(x) == "datasets" or _is_tf_data(x)


def _all_numpy(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(map(_all_numpy, tree.values()))
    if isinstance(tree, list | tuple):
        return all(map(_all_numpy, tree))
    return tree is None or isinstance(tree, np.ndarray)


def _plain(part: Any, preprocess: Preprocess | None) -> Any:
    """Arrays of any framework as NumPy; a list to preprocess stays a list of samples."""
    if part is None:
        return None
    if isinstance(part, dict):
        return {key: _plain(value, None) for key, value in part.items()}
    if isinstance(part, tuple) or (isinstance(part, list) and preprocess is None):
        if part and not np.isscalar(part[0]) and np.ndim(part[0]):
            return tuple(_plain(value, None) for value in part)
        # NumPy's own texts would all take the room of the longest.
        texts = bool(part) and isinstance(part[0], str | bytes)
        return np.asarray(part, dtype=object if texts else None)
    return part if isinstance(part, list) else to_numpy(part)


def _length(parts: Any) -> int:
    lengths = set(_lengths(parts))
    if len(lengths) != 1:
        raise InputError(f"arrays have {sorted(lengths)} samples; give as many in each")
    return lengths.pop()


def _lengths(tree: Any) -> Iterator[int]:
    if isinstance(tree, dict | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _lengths(part)
    elif tree is not None:
        yield len(tree)


def _take(tree: Any, rows: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _take(part, rows) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_take(part, rows) for part in tree)
    if isinstance(tree, list):
        return tree[rows] if isinstance(rows, slice) else [tree[row] for row in rows.tolist()]
    return None if tree is None else tree[rows]


def _split(
    x: Any, y: Any, weight: Any, share: float, held_out: Any, preprocess: Any, size: Any
) -> tuple[Any, Any, Any, Any]:
    """The last share of arrays for validation, as Keras takes it."""
    if held_out is not None:
        return x, y, weight, held_out
    if not _is_arrays(x, preprocess):
        raise InputError(
            f"validation_split needs arrays, not {type(x).__name__}; give validation_data"
        )
    parts = tuple(_plain(part, preprocess) for part in (x, y, weight))
    count = _length(tuple(part for part in parts if part is not None))
    at = int(count * (1 - share))
    if not 0 < at < count:
        raise InputError(f"validation_split {share} of {count} samples leaves a part empty")
    first, last = _take(parts, slice(0, at)), _take(parts, slice(at, None))
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
