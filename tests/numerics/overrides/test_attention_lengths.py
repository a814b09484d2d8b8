"""Attention of 128 to 8,192 tokens, values and gradients, against NumPy's float64."""

from functools import partial

import keras
import numpy as np
import pytest

from gradients import to_numpy, value_and_grad
from kmodels import ops
from numpy_attention import attention_and_gradients
from tolerances import tolerance


def segments(keys: int, size: int) -> np.ndarray:
    return (np.arange(keys)[None] // size).astype("int32")


def images(keys: int, every: int, size: int) -> np.ndarray:
    """Blocks of `size` tokens, one in each `every`."""
    place = np.arange(keys)[None]
    return np.where(place % every < size, place // every, -1).astype("int32")


def mask(length: int, keys: int) -> np.ndarray:
    """Hides every tenth pair, and all from one query."""
    found = np.add.outer(np.arange(length) * 7, np.arange(keys) * 3) % 10 > 0
    found[length // 2] = False
    return found[None, None]


# Queries, keys, heads, heads of keys, width, and the call.
CASES = {
    "128, window, cap": (128, 128, 4, 2, 8, {"causal": True, "window": 50, "soft_cap": 2.0}),
    "513, mask, segments": (
        *(513, 513, 4, 2, 4),
        {"causal": True, "mask": mask(513, 513), "segment_ids": segments(513, 100)},
    ),
    "1537, window, segments": (
        *(1537, 1537, 4, 2, 4),
        {"causal": True, "window": 300, "segment_ids": segments(1537, 700)},
    ),
    "1537, blocks, window": (
        *(1537, 1537, 2, 1, 4),
        {"causal": True, "window": 300, "block_ids": images(1537, 200, 64)},
    ),
    "1025 of 1300, cap, segments": (
        *(1025, 1300, 2, 1, 4),
        {"causal": True, "soft_cap": 1.5, "segment_ids": segments(1300, 500)},
    ),
    "1100, mask, blocks": (
        *(1100, 1100, 2, 1, 4),
        {"causal": True, "mask": mask(1100, 1100), "block_ids": images(1100, 150, 70)},
    ),
    "2049, window to both sides": (2049, 2049, 2, 1, 4, {"window": 200}),
    "8192": (8192, 8192, 1, 1, 4, {"causal": True}),
    "8192, window, segments, cap": (
        *(8192, 8192, 1, 1, 4),
        {"causal": True, "window": 1024, "segment_ids": segments(8192, 3000), "soft_cap": 2.0},
    ),
}


@pytest.mark.parametrize("label", CASES)
def test_values_and_gradients(label: str) -> None:
    """By the override where there is one, and by the op's own body."""
    length, keys, heads, groups, width, keywords = CASES[label]
    rng = np.random.default_rng(len(label))
    sizes = ((length, heads), (keys, groups), (keys, groups))
    given = [rng.normal(size=(1, *size, width)).astype("float32") for size in sizes]
    weight = np.random.default_rng(7).normal(size=(1, length, heads, width)).astype("float32")
    expected, wanted = attention_and_gradients(*given, weight, **keywords)
    bodies = [ops.attention.generic]
    tensors = [keras.ops.convert_to_tensor(x) for x in given]
    if ops.attention.declines(*tensors, **keywords) is None:
        bodies.append(ops.attention)
    for body in bodies:
        run = partial(body, **keywords)
        value, gradients = value_and_grad(run, *given, compiled=True)
        assert np.abs(to_numpy(value) - expected).max() <= tolerance("attention")
        for found, right in zip(gradients, wanted, strict=True):
            largest = np.abs(right).max()
            assert largest > 0.1
            assert np.abs(found - right).max() <= tolerance("attention") * max(1, largest)
        if "mask" in keywords:
            assert not gradients[0][0, length // 2].any()
