"""Attention and its gradients in NumPy's float64, some queries after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from gradients import assert_near, to_numpy, value_and_grad
from tolerances import tolerance

# Queries at a time: 8,192 of them would hold half a gigabyte in each array.
ROWS = 512


def check(
    runs: Callable[..., Any] | Sequence[Callable[..., Any]],
    arrays: list[np.ndarray],
    keywords: Mapping[str, Any],
    dtype: str = "float32",
    compiled: bool = False,
) -> None:
    """Asserts that each `run(*arrays, **keywords)` and its gradients are those of attention."""
    arrays = [to_numpy(keras.ops.cast(x, dtype)) for x in arrays]
    weight = np.random.default_rng(7).normal(size=arrays[0].shape).astype("float32")
    expected, wanted = attention_and_gradients(*arrays, weight, **keywords)
    empty = ~expected.any(-1)  # queries that see nothing
    for run in runs if isinstance(runs, Sequence) else [runs]:
        value, gradients = value_and_grad(
            lambda *x, run=run: run(*x, **keywords), *arrays, dtype=dtype, compiled=compiled
        )
        assert keras.backend.standardize_dtype(value.dtype) == dtype
        assert_near([value, *gradients], [expected, *wanted], tolerance("attention", dtype))
        assert not to_numpy(value)[empty].any() and not gradients[0][empty].any()
    # The features under test bite: without them the result would be another one.
    if keywords and arrays[0].shape[1] < ROWS:
        assert np.abs(expected - attention(*arrays)).max() > 1e-3


def attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: Any = None, **keywords: Any
) -> np.ndarray:
    """The output alone."""
    return attention_and_gradients(query, key, value, np.zeros_like(query), mask=mask, **keywords)[
        0
    ]


def attention_and_gradients(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, weight: np.ndarray, **keywords: Any
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The output, and the gradients of its sum weighted by `weight` by query, key and value.

    The keywords are those of `kmodels.ops.attention`, without dropout.
    """
    query, key, value, weight = (x.astype("float64") for x in (query, key, value, weight))
    outputs, for_query = [], []
    for_key, for_value = np.zeros_like(key), np.zeros_like(value)
    for start in range(0, query.shape[1], ROWS):
        rows = np.arange(start, min(start + ROWS, query.shape[1]))
        seen = allowed(rows, query.shape[1], key.shape[1], keywords)
        (some,) = np.nonzero(seen.any((0, 1, 2)))
        near = slice(some[0], some[-1] + 1)  # what no query sees is not computed
        output, found = _some(
            *(query[:, rows], key[:, near], value[:, near], weight[:, rows]),
            *(seen[..., near], keywords),
        )
        outputs.append(output)
        for_query.append(found[0])
        for_key[:, near] += found[1]
        for_value[:, near] += found[2]
    return np.concatenate(outputs, 1), [np.concatenate(for_query, 1), for_key, for_value]


def allowed(rows: np.ndarray, length: int, keys: int, keywords: Mapping[str, Any]) -> np.ndarray:
    """Which keys some queries see, (B or 1, N or 1, t, S)."""
    positions, window = rows + keys - length, keywords.get("window")
    behind = positions[:, None] - np.arange(keys)
    found = np.ones((1, 1, len(rows), keys), bool)
    if keywords.get("causal"):
        found &= behind >= 0
        blocks = keywords.get("block_ids")
        if blocks is not None:
            own = blocks[:, positions, None]
            found = found | ((own == blocks[:, None]) & (own >= 0))[:, None]
    if window is not None:
        found &= (behind if keywords.get("causal") else np.abs(behind)) < window
    segments = keywords.get("segment_ids")
    if segments is not None:
        found = found & (segments[:, positions, None] == segments[:, None])[:, None]
    mask = keywords.get("mask")
    if mask is not None:
        found = found & (mask if mask.shape[2] == 1 else mask[:, :, rows])
    return found


def _some(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    weight: np.ndarray,
    seen: np.ndarray,
    keywords: Mapping[str, Any],
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The output of some queries, and what they add to the gradients."""
    batch, length, heads, width = query.shape
    keys, groups = key.shape[1:3]
    shared, scale, soft_cap = heads // groups, keywords.get("scale"), keywords.get("soft_cap")
    scale = width**-0.5 if scale is None else scale
    split = query.reshape(batch, length, groups, shared, width)
    slopes = weight.reshape(batch, length, groups, shared, width)
    scores = np.einsum("btkgh,bskh->bkgts", split, key, optimize=True) * scale
    of_cap: Any = 1.0
    if soft_cap is not None:
        turned = np.tanh(scores / soft_cap)
        scores, of_cap = turned * soft_cap, 1 - turned**2
    seen = np.broadcast_to(seen, (seen.shape[0], heads, length, keys))
    seen = seen.reshape(-1, groups, shared, length, keys)
    scores = np.where(seen, scores, -np.inf)
    # A number that is finite where a query sees nothing, which gets zeros.
    largest = scores.max(-1, keepdims=True, initial=np.finfo("float64").min)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total > 0, total, 1.0)
    output = np.einsum("bkgts,bskh->btkgh", weights, value, optimize=True)
    for_value = np.einsum("bkgts,btkgh->bskh", weights, slopes, optimize=True)
    slope = np.einsum("btkgh,bskh->bkgts", slopes, value, optimize=True)
    slope = weights * (slope - (slope * weights).sum(-1, keepdims=True)) * of_cap * scale
    for_query = np.einsum("bkgts,bskh->btkgh", slope, key, optimize=True)
    for_key = np.einsum("bkgts,btkgh->bskh", slope, split, optimize=True)
    return output.reshape(query.shape), (for_query.reshape(query.shape), for_key, for_value)
