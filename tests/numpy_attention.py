"""Attention and its gradients in NumPy's float64, whole arrays at once."""

import numpy as np


def attention_and_gradients(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    weight: np.ndarray,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: np.ndarray | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The output, and the gradients of its sum weighted by `weight` by query, key and value."""
    query, key, value, weight = (x.astype("float64") for x in (query, key, value, weight))
    batch, length, heads, width = query.shape
    keys, groups = key.shape[1:3]
    shared, scale = heads // groups, width**-0.5 if scale is None else scale
    split = query.reshape(batch, length, groups, shared, width)
    slopes = weight.reshape(batch, length, groups, shared, width)
    scores = np.einsum("btkgh,bskh->bkgts", split, key) * scale
    of_cap = np.ones_like(scores)
    if soft_cap is not None:
        turned = np.tanh(scores / soft_cap)
        scores, of_cap = turned * soft_cap, 1 - turned**2
    behind = np.arange(length)[:, None] + keys - length - np.arange(keys)
    allowed = np.ones((batch, 1, 1, length, keys), bool)
    if causal:
        allowed &= behind >= 0
    if window is not None:
        allowed &= (behind if causal else np.abs(behind)) < window
    if segment_ids is not None:
        own = segment_ids[:, keys - length :]
        allowed &= (own[:, :, None] == segment_ids[:, None])[:, None, None]
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = np.einsum("bkgts,bskh->btkgh", weights, value)
    for_value = np.einsum("bkgts,btkgh->bskh", weights, slopes)
    slope = np.einsum("btkgh,bskh->bkgts", slopes, value)
    slope = weights * (slope - (slope * weights).sum(-1, keepdims=True)) * of_cap * scale
    for_query = np.einsum("bkgts,bskh->btkgh", slope, key)
    for_key = np.einsum("bkgts,btkgh->bskh", slope, split)
    shape = query.shape
    return output.reshape(shape), [for_query.reshape(shape), for_key, for_value]
