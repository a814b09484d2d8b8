"""A tensor that is known by shape and dtype, and read when it is needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class LazyArray:
    """Shape and dtype of a tensor, and how to get its values.

    Args:
        shape: of the array that `read` gives.
        dtype: of the array that `read` gives.
        read: makes the array; nothing is kept, so each call reads anew.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def map(self, shape: Sequence[int], change: Callable[[np.ndarray], np.ndarray]) -> Self:
        """The same tensor after `change`, which gives arrays of `shape`."""
        return replace(self, shape=tuple(shape), read=lambda: change(self.read()))


def constant(value: float, shape: Sequence[int], dtype: Any = "float32") -> LazyArray:
    """A tensor that holds one value everywhere."""
    size = tuple(shape)
    kind = np.dtype(dtype)
    return LazyArray(size, kind, lambda: np.full(size, value, kind))
