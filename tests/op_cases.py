"""Inputs and NumPy float64 references of the ops, shared by the tests of both bodies."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    name: str
    shapes: tuple[tuple[int, ...], ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None


T, S, H = 5, 7, 8
FULL = ((2, T, 4, H), (2, S, 4, H), (2, S, 4, H))
GROUPED = ((2, T, 4, H), (2, S, 2, H), (2, S, 2, H))
ONE = ((2, 1, 4, H), (2, S, 2, H), (2, S, 2, H))
SQUARE = ((2, S, 4, H), (2, S, 4, H), (2, S, 4, H))

ATTENTION = (
    Case("plain", FULL),
    Case("scale", FULL, {"scale": 0.7}),
    Case("causal", SQUARE, {"causal": True}),
    Case("causal, more keys", FULL, {"causal": True}),
    Case("window", SQUARE, {"window": 2}),
    Case("causal window, grouped", GROUPED, {"causal": True, "window": 3}),
    Case("mask with an empty row", FULL, mask="pairs"),
    Case("mask of keys, grouped, causal", GROUPED, {"causal": True}, mask="keys"),
    Case("mask per head, grouped", GROUPED, mask="pairs"),
    Case("one query, grouped, causal", ONE, {"causal": True, "scale": 0.3}),
    Case("one query, causal window", ONE, {"causal": True, "window": 3}),
    Case("one query, mask of keys", ONE, mask="keys"),
    Case("one query, mask per head", ONE, mask="pairs"),
    Case("soft cap", GROUPED, {"soft_cap": 0.5, "causal": True}),
)


def arrays(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape).astype("float32") for shape in case.shapes]


def mask(case: Case) -> np.ndarray | None:
    """`pairs`: (B, N, T, S), one query sees nothing; `keys`: (B, 1, 1, S), one row all padding."""
    (batch, length, heads, _), keys = case.shapes[0], case.shapes[1][1]
    rng = np.random.default_rng(4)
    if case.mask == "pairs":
        found = rng.random((batch, heads, length, keys)) > 0.4
        found[0, :, length // 2] = False
        return found
    if case.mask == "keys":
        found = rng.random((batch, 1, 1, keys)) > 0.4
        found[1] = False
        return found
    return None


def reference_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """The definition, pair by pair in float64."""
    query, key, value = (x.astype("float64") for x in (query, key, value))
    batch, length, heads, head_dim = query.shape
    keys, groups = key.shape[1:3]
    allowed = np.ones((batch, heads, length, keys), bool)
    if mask is not None:
        allowed &= np.broadcast_to(mask, allowed.shape)
    output = np.zeros((batch, length, heads, value.shape[-1]))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    for b, i, n in np.ndindex(batch, length, heads):
        g = n // (heads // groups)
        position = i + keys - length
        seen, scores = [], []
        for j in range(keys):
            if not allowed[b, n, i, j] or (causal and j > position):
                continue
            if window is not None and abs(position - j) >= window:
                continue
            score = scale * float(query[b, i, n] @ key[b, j, g])
            seen.append(j)
            scores.append(score if soft_cap is None else soft_cap * math.tanh(score / soft_cap))
        if seen:
            weights = np.exp(np.array(scores) - max(scores))
            output[b, i, n] = weights / weights.sum() @ value[b, seen, g]
    return output


def reference_layer_norm(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, epsilon: float
) -> np.ndarray:
    x = x.astype("float64")
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale
    return y if bias is None else y + bias


def reference_patch_embedding(
    images: np.ndarray, kernel: np.ndarray, bias: np.ndarray, patch: int
) -> np.ndarray:
    batch, height, width, _ = images.shape
    tokens = [
        images[:, r : r + patch, c : c + patch].reshape(batch, -1).astype("float64") @ kernel + bias
        for r in range(0, height, patch)
        for c in range(0, width, patch)
    ]
    return np.stack(tokens, axis=1)
