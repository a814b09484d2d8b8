"""The batches that a step is given, as the data yields them.

The tasks' data layer takes ("image", "label") out of a dictionary and makes (x, y) of it; a loss
function looks for its inputs by their names.
"""

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.types import Tree
from kmodels.data.fit import arrays
from kmodels.data.fit.batches import IndexedBatches, as_tuple
from kmodels.data.fit.stream import Calls, Stream, started


def whole(x: Any, batch_size: int | None = None, shuffle: bool = False) -> Any:
    """Returns data like the given, whose dictionaries arrive in one piece.

    Args:
        x: anything that `fit` takes, or None.
        batch_size: batch size of a Hugging Face dataset, which has no batches of its own; 32 by
            default.
        shuffle: whether such a dataset is shuffled.
    """
    known = keras_internals.DataAdapter | keras.utils.PyDataset | str | bytes | None
    if isinstance(x, known) or arrays.is_arrays(x, None):
        return x
    if arrays.is_tf_data(x):
        return x.map(lambda batch: (batch,)) if isinstance(x.element_spec, dict) else x
    if arrays.package(x) == "datasets" and not isinstance(x, dict):
        size = batch_size or 32
        if not hasattr(x, "__getitem__"):
            return WholeStream(Calls(functools.partial(x.iter, size)), None)
        seed, take = keras_internals.random_seed() or 0, functools.partial(_rows, x)
        return IndexedBatches(take, len(x), size, shuffle=shuffle, seed=seed)
    if isinstance(x, Iterable):
        return WholeStream(x, _length(x))
    if inspect.isroutine(x) or isinstance(x, functools.partial):
        return WholeStream(Calls(x), None)
    return x


class WholeStream(Stream):
    """Gives batches one after another, dictionaries in one piece."""

    def tuples(self) -> Iterator[tuple]:
        """Returns one pass over the batches, see `Stream`."""
        for batch in started(self.batches):
            yield (batch,) if isinstance(batch, dict) else as_tuple(batch)


def tensors(batch: Tree) -> Any:
    """Returns a batch on the device, with float64 as Keras' float type, as `fit` has arrays."""
    return keras.tree.map_structure(_tensor, batch)


def _tensor(part: Any) -> Any:
    if part is None:
        return None
    wide = isinstance(part, np.ndarray) or keras.ops.is_tensor(part)
    if wide and keras.backend.standardize_dtype(part.dtype) == "float64":
        return keras.ops.cast(part, keras.config.floatx())
    return keras.ops.convert_to_tensor(part)


def _rows(dataset: Any, chosen: np.ndarray) -> tuple:
    return (dataset[chosen.tolist()],)


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None
