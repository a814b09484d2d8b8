"""Tensors with a known shape and dtype, whose values are read when they are needed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import DTypeLike

Index = tuple[slice, ...]
# Bytes that are read at once if a large tensor should not be in memory twice.
PART = 2**25


@dataclass(frozen=True)
class LazyArray:
    """Shape and dtype of a tensor, and functions that read its values.

    Args:
        shape: shape of the array.
        dtype: dtype of the array.
        read: returns the array; each call reads it again.
        read_part: returns a slice of the array, one slice per dimension, without reading the rest;
            None if that is not possible.
        memory_map: returns the array in mapped pages of the file; writes to it stay in memory. None
            if the file cannot be mapped.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    read_part: Callable[[Index], np.ndarray] | None = None
    memory_map: Callable[[], np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def is_large(self) -> bool:
        """True if the array should not be in memory twice."""
        return self.nbytes > PART

    def part(self, index: Index) -> np.ndarray:
        """Returns the values of a slice (step 1) per dimension, without the rest if possible."""
        pieces = zip(index, self.shape, strict=True)
        shape = [len(range(*piece.indices(size))) for piece, size in pieces]
        if 0 in shape:  # which safetensors refuses at the end of an axis
            return np.empty(shape, self.dtype)
        if self.read_part is None or all(
            piece.indices(size) == (0, size, 1)
            for piece, size in zip(index, self.shape, strict=True)
        ):
            return self.read()[index]
        return self.read_part(index)

    def rows(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields parts along the first axis: (first row, values).

        All parts have the same shape, so the last may overlap the one before.
        """
        size = self.shape[0] if self.shape else 1
        step = PART // max(self.nbytes // max(size, 1), 1)
        if self.read_part is None or not 0 < step < size:
            yield 0, self.read()
            return
        others = tuple(slice(0, length) for length in self.shape[1:])
        for start in range(0, size, step):
            begin = min(start, size - step)
            yield begin, self.read_part((slice(begin, begin + step), *others))

    def map(self, shape: Sequence[int], change: Callable[[np.ndarray], np.ndarray]) -> Self:
        """Returns the tensor after `change`, which returns arrays of `shape`."""
        return replace(
            self,
            shape=tuple(shape),
            read=lambda: change(self.read()),
            read_part=None,
            memory_map=None,
        )


def constant(value: float, shape: Sequence[int], dtype: DTypeLike = "float32") -> LazyArray:
    """Returns a tensor that holds one value everywhere."""
    size = tuple(shape)
    kind = np.dtype(dtype)
    return LazyArray(size, kind, lambda: np.full(size, value, kind))
