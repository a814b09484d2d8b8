"""Compute the attention maps of each block of a ViT, and their rollout over all blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data, Tensor
from kmodels.data.pipeline.batch import to_numpy
from kmodels.models.interpret.view import View, array, view_of

FUSIONS: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "min": np.min}


def attention_maps(model: keras.Layer, images: Data) -> list[np.ndarray]:
    """Returns the attention weights of each block.

    Args:
        model: a classifier, a backbone, or a model of two towers.
        images: as the model's `predict` takes them.

    Returns:
        One float32 array (B, N, T, T) for each block and each of its N heads: from the query
        (third axis) to the key. The T tokens are class token, distillation token, registers and
        patches, as far as the model has them.

    Raises:
        InputError: for a model without a ViT, or images that do not fit.
    """
    view = view_of(model)
    return _maps(view, view.pixels(images))


def _maps(view: View, pixels: Tensor) -> list[np.ndarray]:
    found = view.tower.attention_maps(view.given(pixels))
    return [np.asarray(to_numpy(weights), "float32") for weights in found]


def rollout(
    maps: Sequence[np.ndarray], head_fusion: str = "mean", discard_ratio: float = 0.0
) -> np.ndarray:
    """Returns how much of each token arrives at each other one, by the attention of all blocks.

    The heads of a block are fused, half of each token is taken to stay what it is by the residual
    connection, rows are scaled to a sum of 1, and the matrices of all blocks are multiplied.

    Args:
        maps: one array (B, N, T, T) for each block, of `attention_maps`.
        head_fusion: "mean" of the heads, "max" or "min".
        discard_ratio: share of the fused weights of each block and image, the least ones, that
            count as 0.

    Returns:
        float32 (B, T, T), from the last block's token (second axis) to the first block's.

    Raises:
        InputError: for another fusion, or a share out of range.

    Source:
        Abnar and Zuidema 2020, arXiv:2005.00928, section 3; fusions and discarding are those of
        Gildenblat's vit-explain.
    """
    if head_fusion not in FUSIONS:
        raise InputError(f"head_fusion is {head_fusion!r}; choose one of {', '.join(FUSIONS)}")
    if not 0 <= discard_ratio < 1:
        raise InputError(f"discard_ratio is {discard_ratio}; give a share in [0, 1)")
    result = None
    for weights in maps:
        fused = FUSIONS[head_fusion](np.asarray(weights, "float64"), axis=1)
        flat = fused.reshape(len(fused), -1)
        if count := int(flat.shape[1] * discard_ratio):
            least = np.argpartition(flat, count - 1, axis=1)[:, :count]
            np.put_along_axis(flat, least, 0.0, axis=1)
        fused = 0.5 * flat.reshape(fused.shape) + 0.5 * np.eye(fused.shape[-1])
        fused /= fused.sum(-1, keepdims=True)
        result = fused if result is None else fused @ result
    return np.asarray(result, "float32")


def attention_rollout(
    model: keras.Layer,
    images: Data,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    query: Sequence[int] | None = None,
) -> np.ndarray:
    """Returns how much each patch counts for what the model reads, by attention rollout.

    Args:
        model: a classifier, a backbone, or a model of two towers.
        images: as the model's `predict` takes them.
        head_fusion: as of `rollout`.
        discard_ratio: likewise.
        query: (row, column) of the patch whose view is asked for. None is for what the model pools:
            the class token; the mean of all patches; or what a "map" head attends to, by the mean
            of its heads.

    Returns:
        float32 maps (B, rows, columns); what is missing to a sum of 1 went to other tokens.

    Raises:
        InputError: see `rollout` and `attention_maps`; a query outside of the grid.

    Example:
        maps = attention_rollout(model, images, discard_ratio=0.9)
        Image.fromarray(overlay(images[0], maps[0]))
    """
    view = view_of(model)
    pixels = view.pixels(images)
    found = rollout(_maps(view, pixels), head_fusion, discard_ratio).astype("float64")
    if query is not None:
        rows = found[:, view.prefix + place_of(view, query)]
    elif view.pool is not None:
        rows = np.einsum("bs,bst->bt", _read_by_head(view, pixels), found[:, _seen(view) :])
    elif view.pooling in ("token", "token_gap", "distilled"):
        rows = found[:, 0]
    else:
        rows = found[:, view.prefix :].mean(1)
    return view.maps(rows[:, view.prefix :])


def _seen(view: View) -> int:
    return 0 if view.tower.config.pool_include_prefix else view.prefix


def _read_by_head(view: View, pixels: Tensor) -> np.ndarray:
    """Returns what the attention of the pooling reads of each token that it sees, (B, S)."""
    pool: Any = view.pool
    tokens = view.walk(pixels, view.steps(), view.tower.info(pixels))
    return array(pool.attention.probabilities(*pool.query_and_seen(tokens))).mean(1)[:, 0]


def place_of(view: View, query: Sequence[int]) -> int:
    """Returns the number of the patch at (row, column).

    Raises:
        InputError: for a place outside of the grid.
    """
    rows, columns = view.tower.config.grid
    place = tuple(query)
    if len(place) != 2 or not (0 <= place[0] < rows and 0 <= place[1] < columns):
        raise InputError(
            f"query is {place}; give (row, column) of a patch, below ({rows}, {columns})"
        )
    return int(place[0]) * columns + int(place[1])
