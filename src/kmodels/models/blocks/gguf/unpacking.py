"""Quantized tensors of GGUF files in the layout of `kmodels.ops.quantized_dense`, bit for bit.

A file has the blocks of an output one after the other, each with its scales. Here the numbers of
all blocks lie together, and the outputs are the last axis.
"""

from collections.abc import Callable, Sequence

import numpy as np


def _blocks(data: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Returns the parts of all blocks of rows (out, bytes), each (out, blocks, size)."""
    blocks = data.reshape(len(data), -1, sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=-1)


def _float16(part: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(part).view("<f2")[..., 0]


def _turned(values: np.ndarray) -> np.ndarray:
    """(out, ...) -> (rows, out)."""
    return np.ascontiguousarray(values.reshape(len(values), -1).T)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes (out, in) of few bits into bytes (rows, out), the first in the upper bits."""
    codes = codes.reshape(len(codes), -1, 8 // bits)
    shifts = np.arange(8 - bits, -1, -bits, dtype="uint8")
    return _turned(np.bitwise_or.reduce(codes << shifts, axis=-1))


def _q8_0(data: np.ndarray) -> Sequence[np.ndarray]:
    scale, numbers = _blocks(data, 2, 32)
    return _turned(numbers.view("int8")), _turned(_float16(scale))


def _q4_0(data: np.ndarray) -> Sequence[np.ndarray]:
    scale, both = _blocks(data, 2, 16)
    codes = np.concatenate([both & 15, both >> 4], axis=-1)
    return _packed(codes.reshape(len(data), -1), 4), _turned(_float16(scale))


def _q4_k(data: np.ndarray) -> Sequence[np.ndarray]:
    own_scale, own_least, six, both = _blocks(data, 2, 2, 12, 128)
    # Eight scales and eight minima of 6 bits: of the last four the upper two bits lie with the
    # first four.
    first, second, mixed = np.split(six, 3, axis=-1)
    scale = np.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], axis=-1)
    least = np.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], axis=-1)
    both = both.reshape(*both.shape[:-1], 4, 1, 32)
    codes = np.concatenate([both & 15, both >> 4], axis=-2).reshape(len(data), -1)
    owns = (_turned(_float16(part)) for part in (own_scale, own_least))
    return _packed(codes, 4), _turned(scale), _turned(least), *owns


def _q6_k(data: np.ndarray) -> Sequence[np.ndarray]:
    low, high, scale, own = _blocks(data, 128, 64, 16, 2)
    low = low.reshape(*low.shape[:-1], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(len(data), -1)
    shifts = np.arange(0, 8, 2, dtype="uint8")[:, None]
    high = high.reshape(*high.shape[:-1], 2, 1, 32) >> shifts & 3
    high = high.reshape(len(data), -1)
    numbers = _packed(low, 4), _turned(scale.view("int8")), _packed(high, 2)
    return *numbers, _turned(_float16(own))


# The variables of `Quantization.shapes` from rows of bytes (out, bytes), by type.
UNPACKED: dict[str, Callable[[np.ndarray], Sequence[np.ndarray]]] = {
    **{"q8_0": _q8_0, "q4_0": _q4_0, "q4_k": _q4_k, "q6_k": _q6_k}
}
