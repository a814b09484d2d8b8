"""Batches with names, whole: a loss function looks for its inputs by their names.

The tasks' data layer takes ("image", "label") out of such a batch and makes (x, y) of it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kmodels import compat
from kmodels.data.streams import IndexedBatches


def whole(x: Any, batch_size: int | None = None, shuffle: bool = False) -> Any:
    """Data like the given, whose dictionaries arrive in one piece.

    Args:
        x: anything that `fit` takes.
        batch_size: of a Hugging Face dataset, which has no batches of its own; 32 by default.
        shuffle: of such a one.
    """
    if hasattr(x, "element_spec") and hasattr(x, "map"):
        return x.map(lambda batch: (batch,)) if isinstance(x.element_spec, dict) else x
    if type(x).__module__.partition(".")[0] == "datasets" and not isinstance(x, dict):
        size = batch_size or 32
        if not hasattr(x, "__getitem__"):
            return Named(x.iter(size))
        seed = compat.random_seed() or 0
        rows = lambda chosen: (x[chosen.tolist()],)  # noqa: E731
        return IndexedBatches(rows, len(x), size, shuffle=shuffle, seed=seed)
    if isinstance(x, list):
        return [_whole(batch) for batch in x]
    if isinstance(x, Iterator):
        return map(_whole, x)
    arrays = isinstance(x, dict | tuple | str) or hasattr(x, "__array__") or hasattr(x, "shape")
    if arrays or isinstance(x, keras.utils.PyDataset) or not isinstance(x, Iterable):
        return x
    return Named(x)


class Named:
    """A loader whose batches stay whole; all else is the loader's."""

    def __init__(self, batches: Any):
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return map(_whole, self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _whole(batch: Any) -> Any:
    return (batch,) if isinstance(batch, dict) else batch
