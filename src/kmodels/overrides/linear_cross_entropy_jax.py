"""Cross-entropy over a large vocabulary on JAX, a tile of it at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

from kmodels.dispatch import Tensor, override
from kmodels.ops.linear_cross_entropy import (
    check_linear_cross_entropy,
    linear_cross_entropy,
    tile_of,
)

# Positions of weight 0 are skipped in whole blocks of at least so many.
BLOCK = 256


def _supports(
    hidden: Tensor,
    table: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    soft_cap: float | None = None,
    trainable_table: bool = False,
) -> str | None:
    if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return "under ModelParallel the vocabulary may lie in parts on several devices"
    return None


@override(linear_cross_entropy, supports=_supports)
def linear_cross_entropy_jax(
    hidden: Tensor,
    table: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    soft_cap: float | None = None,
    trainable_table: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `kmodels.ops.linear_cross_entropy`; XLA must not see the table as a whole in a dot."""
    check_linear_cross_entropy(hidden, table, labels, weights, soft_cap)
    hidden, table, labels, weights = (
        keras.ops.convert_to_tensor(x) for x in (hidden, table, labels, weights)
    )
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    weights = lax.stop_gradient(weights.astype(dtype))
    counted = weights != 0
    hidden = jnp.where(counted[:, None], hidden, 0)
    labels = jnp.where(counted, labels.astype("int32"), 0)
    if trainable_table:
        return _trainable(hidden, table, labels, weights, soft_cap)
    return _frozen(hidden, lax.stop_gradient(table), labels, weights, soft_cap)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _frozen(
    hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    return _sums(weights, _walk_counted(hidden, table, labels, weights, soft_cap, False))


def _frozen_forward(
    hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, soft_cap: float | None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    found = _walk_counted(hidden, table, labels, weights, soft_cap, True)
    return _sums(weights, found), (found[3] * weights[:, None]).astype(hidden.dtype)


def _frozen_backward(_: float | None, slope: Tensor, upstream: tuple[Tensor, Tensor]) -> tuple:
    return slope * upstream[0].astype(slope.dtype), None, None, None


_frozen.defvjp(_frozen_forward, _frozen_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _trainable(
    hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    return _sums(weights, _walk_counted(hidden, table, labels, weights, soft_cap, False))


def _trainable_forward(
    hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, soft_cap: float | None
) -> tuple[tuple[Tensor, Tensor], Any]:
    found = _walk_counted(hidden, table, labels, weights, soft_cap, False)
    return _sums(weights, found), (hidden, table, labels, weights, found[0])


def _trainable_backward(soft_cap: float | None, kept: Any, upstream: tuple[Tensor, Tensor]) -> Any:
    hidden, table, labels, weights, total = kept
    weights = weights * upstream[0]
    dtype = weights.dtype

    def step(tile: Tensor, start: Tensor | int, state: tuple[Tensor, Tensor]) -> Any:
        for_hidden, for_table = state
        score, slope = _scores(hidden, tile, soft_cap, dtype)
        column, here = _place(labels, start, tile.shape[0])
        own = (jnp.arange(tile.shape[0]) == column) & here[:, None]
        score = (jnp.exp(score - total[:, None]) - own) * weights[:, None]
        score = (score if slope is None else score * slope).astype(hidden.dtype)
        for_hidden += _product(score, 1, tile, 0, dtype)
        rows = _product(score, 0, hidden, 0, dtype).astype(table.dtype)
        return for_hidden, lax.dynamic_update_slice(for_table, rows, (start, 0))

    state = (jnp.zeros(hidden.shape, dtype), jnp.zeros_like(table))
    for_hidden, for_table = _each_tile(table, hidden.dtype, step, state)
    return for_hidden.astype(hidden.dtype), for_table, None, None


_trainable.defvjp(_trainable_forward, _trainable_backward)


def _sums(weights: Tensor, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    total, right, top = found[:3]
    return jnp.sum(weights * (total - right)), jnp.sum(weights * (right >= top))


def _each_tile(table: Tensor, dtype: Any, step: Callable[..., Any], state: Any) -> Any:
    """State = step(tile, its first row, state), over the whole table."""
    size = tile_of(table.shape[0])
    whole = table.shape[0] // size
    raw = table
    if table.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # XLA on a CPU would widen all of a bfloat16 table before the loop, but not integers.
        raw = lax.bitcast_convert_type(table, jnp.uint16)

    def read(start: Tensor | int, rows: int) -> Tensor:
        tile = lax.dynamic_slice_in_dim(raw, start, rows)
        if raw is not table:
            tile = lax.bitcast_convert_type(tile, jnp.bfloat16)
        return tile.astype(dtype)

    state = lax.fori_loop(0, whole, lambda i, s: step(read(i * size, size), i * size, s), state)
    if rest := table.shape[0] - whole * size:
        state = step(read(whole * size, rest), whole * size, state)
    return state


def _scores(
    hidden: Tensor, tile: Tensor, soft_cap: float | None, dtype: Any
) -> tuple[Tensor, Tensor | None]:
    """Logits of one tile, and their derivative by the uncapped ones."""
    score = _product(hidden, 1, tile, 1, dtype)
    if soft_cap is None:
        return score, None
    score = jnp.tanh(score / soft_cap)
    return score * soft_cap, 1 - score * score


def _product(a: Tensor, a_axis: int, b: Tensor, b_axis: int, dtype: Any) -> Tensor:
    """Product over these axes. XLA on a CPU takes several times as long for bfloat16 results."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _place(labels: Tensor, start: Tensor | int, size: int) -> tuple[Tensor, Tensor]:
    """Column of each label in the tile, (M, 1), and whether the tile has it, (M,)."""
    local = labels - start
    return jnp.clip(local, 0, size - 1)[:, None], (local >= 0) & (local < size)


def _walk(
    hidden: Tensor, table: Tensor, labels: Tensor, soft_cap: float | None, gradient: bool
) -> tuple[Tensor, ...]:
    """One pass over the vocabulary with a running maximum and sum.

    Returns:
        Per position the log of the summed exponentials, the label's logit, the highest logit and,
        with `gradient`, the derivative of the cross-entropy by `hidden` (M, D).
    """
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    zeros = jnp.zeros(hidden.shape[0], dtype)
    state = {"total": zeros, "right": zeros, "top": zeros - jnp.inf}
    if gradient:
        state |= {"mean": jnp.zeros(hidden.shape, dtype), "slope_right": zeros + 1}

    def step(tile: Tensor, start: Tensor | int, old: dict[str, Tensor]) -> dict[str, Tensor]:
        score, slope = _scores(hidden, tile, soft_cap, dtype)
        column, here = _place(labels, start, tile.shape[0])
        new = {"right": jnp.where(here, _take(score, column), old["right"])}
        new["top"] = jnp.maximum(old["top"], jnp.max(score, axis=1))
        decay = jnp.exp(old["top"] - new["top"])
        score = jnp.exp(score - new["top"][:, None])
        new["total"] = old["total"] * decay + jnp.sum(score, axis=1)
        if gradient:
            new["slope_right"] = old["slope_right"]
            if slope is not None:
                new["slope_right"] = jnp.where(here, _take(slope, column), old["slope_right"])
                score = score * slope
            part = _product(score.astype(hidden.dtype), 1, tile, 0, dtype)
            new["mean"] = old["mean"] * decay[:, None] + part
        return new

    state = _each_tile(table, hidden.dtype, step, state)
    total = jnp.log(state["total"]) + state["top"]
    if not gradient:
        return total, state["right"], state["top"]
    own = table[labels].astype(dtype) * state["slope_right"][:, None]
    return total, state["right"], state["top"], state["mean"] / state["total"][:, None] - own


def _take(values: Tensor, column: Tensor) -> Tensor:
    return jnp.take_along_axis(values, column, axis=1)[:, 0]


def _walk_counted(
    hidden: Tensor,
    table: Tensor,
    labels: Tensor,
    weights: Tensor,
    soft_cap: float | None,
    gradient: bool,
) -> tuple[Tensor, ...]:
    """`_walk` without the positions of weight 0, in blocks: their number is known when it runs.

    Those positions get zeros.
    """
    rows = hidden.shape[0]
    block = max(BLOCK, -(-rows // 4 // 64) * 64)
    counted = weights != 0
    # Sorting would move positions between the devices of a data-parallel run.
    if rows <= block or keras.distribution.distribution() is not None:
        found = _walk(hidden, table, labels, soft_cap, gradient)
        return tuple(jnp.where(counted.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in found)
    order = jnp.argsort(~counted)
    padded = jnp.pad(order, (0, -rows % block))
    sorted_hidden, sorted_labels = hidden[padded], labels[padded]
    last = jnp.sum(counted)

    def body(state: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        start, done = state
        chosen = lax.dynamic_slice_in_dim(sorted_hidden, start, block)
        theirs = lax.dynamic_slice_in_dim(sorted_labels, start, block)
        found = _walk(chosen, table, theirs, soft_cap, gradient)
        done = tuple(
            lax.dynamic_update_slice_in_dim(old, new, start, 0)
            for old, new in zip(done, found, strict=True)
        )
        return start + block, done

    dtype = weights.dtype
    blank = (jnp.zeros(padded.shape, dtype),) * 3
    blank += (jnp.zeros(sorted_hidden.shape, dtype),) * gradient
    found = lax.while_loop(lambda s: s[0] < last, body, (jnp.zeros((), last.dtype), blank))[1]
    back = jnp.argsort(order)
    return tuple(jnp.where(counted.reshape(-1, *[1] * (x.ndim - 1)), x[back], 0) for x in found)
