"""Cross-entropy over a large vocabulary on JAX, a tile of it at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.linear_cross_entropy import (
    check_linear_cross_entropy,
    check_rows,
    gradient_of_rows,
    linear_cross_entropy,
    tile_of,
    without_ignored,
)
from kmodels.overrides import meshes

# Positions that walk over the vocabulary together, and how many sizes the last of them may have:
# those of weight 0 come last, and are left out as far as the sizes allow.
BLOCK, SIZES, SMALLEST = 1024, 8, 64


def on_accelerator() -> bool:
    """Returns True if programs are made for an accelerator."""
    return jax.default_backend() != "cpu"


def _supports(call: OpCall) -> str | None:
    if meshes.layers_are_cut():
        return "under ModelParallel the vocabulary may lie in parts on several devices"
    return None


@override(linear_cross_entropy, _supports)
def linear_cross_entropy_jax(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    soft_cap: float | None = None,
    trainable_table: bool = False,
    rows: jax.Array | None = None,
    row_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `kmodels.ops.linear_cross_entropy`; XLA must not see the table as a whole in a dot."""
    check_linear_cross_entropy(hidden, table, labels, weights, soft_cap)
    check_rows(table, rows, row_ids, trainable_table)
    hidden, table, labels, weights = (
        keras.ops.convert_to_tensor(x) for x in (hidden, table, labels, weights)
    )
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    weights = lax.stop_gradient(without_ignored(labels, weights).astype(dtype))
    counted = weights != 0
    hidden = jnp.where(counted[:, None], hidden, 0)
    labels = jnp.where(counted, labels.astype("int32"), 0)
    if trainable_table:
        return _trainable(hidden, table, labels, weights, soft_cap)
    if rows is not None:
        rows, row_ids = keras.ops.convert_to_tensor(rows), keras.ops.convert_to_tensor(row_ids)
    table = lax.stop_gradient(table)
    return _frozen(hidden, rows, table, row_ids, labels, weights, soft_cap)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _frozen(
    hidden: jax.Array,
    rows: jax.Array | None,
    table: jax.Array,
    row_ids: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    table = _with_rows(table, rows, row_ids)
    return _sums(weights, _walk_counted(hidden, table, labels, weights, soft_cap, False))


def _frozen_forward(
    hidden: jax.Array,
    rows: jax.Array | None,
    table: jax.Array,
    row_ids: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array,
    soft_cap: float | None,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    table = _with_rows(table, rows, row_ids)
    found = _walk_counted(hidden, table, labels, weights, soft_cap, True)
    slope = (found[3] * weights[:, None]).astype(hidden.dtype)
    kept = None if rows is None else (hidden, rows, row_ids, labels, weights, found[0])
    return _sums(weights, found), (slope, kept)


def _frozen_backward(
    soft_cap: float | None, kept: Any, upstream: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    (slope, of_rows), for_rows = kept, None
    if of_rows is not None:
        hidden, rows, row_ids, labels, weights, total = of_rows
        weights = weights * upstream[0]
        for_rows = gradient_of_rows(hidden, rows, row_ids, labels, weights, total, soft_cap)
    return slope * upstream[0].astype(slope.dtype), for_rows, None, None, None, None


_frozen.defvjp(_frozen_forward, _frozen_backward)


def _with_rows(table: jax.Array, rows: jax.Array | None, row_ids: jax.Array | None) -> jax.Array:
    return table if rows is None else table.at[row_ids].set(rows.astype(table.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _trainable(*arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _trainable_forward(*arguments)[0]


def _trainable_forward(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    soft_cap: float | None,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    found = _walk_counted(hidden, table, labels, weights, soft_cap, False)
    return _sums(weights, found), (hidden, table, labels, weights, found[0])


def _trainable_backward(
    soft_cap: float | None, kept: tuple[jax.Array, ...], upstream: tuple[jax.Array, jax.Array]
) -> Any:
    hidden, table, labels, weights, total = kept
    weights = weights * upstream[0]
    dtype = weights.dtype

    def step(tile: _Tile, state: tuple[jax.Array, jax.Array]) -> Any:
        for_hidden, for_table = state
        own = (jnp.arange(tile.rows.shape[0]) == tile.column) & tile.here[:, None]
        score = (jnp.exp(tile.score - total[:, None]) - own) * weights[:, None]
        score = (score if tile.slope is None else score * tile.slope).astype(hidden.dtype)
        for_hidden += _product(score, 1, tile.rows, 0, dtype)
        rows = _product(score, 0, hidden, 0, dtype).astype(table.dtype)
        return for_hidden, lax.dynamic_update_slice(for_table, rows, (tile.start, 0))

    state = (jnp.zeros(hidden.shape, dtype), jnp.zeros_like(table))
    for_hidden, for_table = _each_tile(hidden, table, labels, soft_cap, step, state)
    return for_hidden.astype(hidden.dtype), for_table, None, None


_trainable.defvjp(_trainable_forward, _trainable_backward)


def _sums(weights: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    total, right, top = found[:3]
    return jnp.sum(weights * (total - right)), jnp.sum(weights * (right >= top))


class _Tile(NamedTuple):
    """Some classes of the table, and the logits of all positions for them."""

    start: jax.Array | int  # first class
    rows: jax.Array  # (v, D)
    score: jax.Array  # logits (M, v)
    slope: jax.Array | None  # derivative of the logits by the uncapped ones
    column: jax.Array  # of each label in the tile, (M, 1)
    here: jax.Array  # whether the tile holds the label, (M,)


def _each_tile(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    soft_cap: float | None,
    step: Callable[[_Tile, Any], Any],
    state: Any,
) -> Any:
    """Repeats state = step(tile, state) over the whole table."""
    size = tile_of(table.shape[0], hidden.shape[0], on_accelerator())
    whole, wide = table.shape[0] // size, jnp.promote_types(hidden.dtype, jnp.float32)

    def run(start: jax.Array | int, count: int, state: Any) -> Any:
        rows = _part(table, start, lambda x, i: lax.dynamic_slice_in_dim(x, i, count))
        rows, slope = rows.astype(hidden.dtype), None
        score = _product(hidden, 1, rows, 1, wide)
        if soft_cap is not None:
            score = jnp.tanh(score / soft_cap)
            score, slope = score * soft_cap, 1 - score * score
        local = labels - start
        column, here = jnp.clip(local, 0, count - 1)[:, None], (local >= 0) & (local < count)
        return step(_Tile(start, rows, score, slope, column, here), state)

    state = lax.fori_loop(0, whole, lambda i, s: run(i * size, size, s), state)
    if rest := table.shape[0] - whole * size:
        state = run(whole * size, rest, state)
    return state


def _part(
    table: jax.Array, index: jax.Array | int, pick: Callable[[jax.Array, Any], jax.Array]
) -> jax.Array:
    """Returns some rows of the table without a copy of all of it."""
    if table.dtype != jnp.bfloat16 or on_accelerator():
        return pick(table, index)
    return _part_of_bfloat16(pick, table, index)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _part_of_bfloat16(
    pick: Callable[[jax.Array, Any], jax.Array], table: jax.Array, index: jax.Array | int
) -> jax.Array:
    """Reads the table as integers.

    XLA on a CPU would widen all of a bfloat16 table inside a loop, but not integers. It would also
    copy all of it as integers if the index did not pass through the barrier with it.
    """
    table, index = lax.optimization_barrier((table, index))
    rows = pick(lax.bitcast_convert_type(table, jnp.uint16), index)
    return lax.bitcast_convert_type(rows, jnp.bfloat16)


@_part_of_bfloat16.defjvp
def _part_of_bfloat16_jvp(
    pick: Callable[[jax.Array, Any], jax.Array], primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    # Integers have no derivative, which would be taken for a derivative of 0.
    table, index = primals
    return _part_of_bfloat16(pick, table, index), pick(tangents[0], index)


def _product(
    a: jax.Array, a_axis: int, b: jax.Array, b_axis: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns the product; XLA on a CPU takes several times as long for bfloat16 results."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _walk(
    hidden: jax.Array, table: jax.Array, labels: jax.Array, soft_cap: float | None, gradient: bool
) -> tuple[jax.Array, ...]:
    """Goes through the vocabulary once, with a running maximum and sum.

    Returns:
        For each position the log of the summed exponentials, the label's logit, the highest logit
        and, with `gradient`, the derivative of the cross-entropy by `hidden` (M, D).
    """
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    zeros = jnp.zeros(hidden.shape[0], dtype)
    state = {"total": zeros, "right": zeros, "top": zeros - jnp.inf}
    if gradient:
        state |= {"mean": jnp.zeros(hidden.shape, dtype), "slope_right": zeros + 1}

    def step(tile: _Tile, old: dict[str, jax.Array]) -> dict[str, jax.Array]:
        _, rows, score, slope, column, here = tile
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
            part = _product(score.astype(hidden.dtype), 1, rows, 0, dtype)
            new["mean"] = old["mean"] * decay[:, None] + part
        return new

    state = _each_tile(hidden, table, labels, soft_cap, step, state)
    total = jnp.log(state["total"]) + state["top"]
    if not gradient:
        return total, state["right"], state["top"]
    own = _part(table, labels, lambda x, i: x[i]).astype(dtype) * state["slope_right"][:, None]
    return total, state["right"], state["top"], state["mean"] / state["total"][:, None] - own


def _take(values: jax.Array, column: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, column, axis=1)[:, 0]


def _walk_counted(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    soft_cap: float | None,
    gradient: bool,
) -> tuple[jax.Array, ...]:
    """Calls `_walk`, on a CPU without the positions of weight 0, whose number varies by batch.

    The results of those positions are zeros, or come from a block that they share with others.
    """
    rows, counted = hidden.shape[0], weights != 0
    # Sorting would move positions between the devices of a data-parallel run. A GPU's host waits
    # for each number that decides how often a loop runs, and which way a switch goes.
    if keras.distribution.distribution() is not None or on_accelerator():
        return _walk(hidden, table, labels, soft_cap, gradient)
    order = jnp.argsort(~counted)
    hidden, labels = hidden[order], labels[order]
    last, block = jnp.sum(counted, dtype="int32"), min(rows, BLOCK)
    dtype = weights.dtype
    found = (jnp.zeros(rows, dtype),) * 3 + (jnp.zeros(hidden.shape, dtype),) * gradient

    def walk(found: tuple[jax.Array, ...], start: jax.Array, size: int) -> tuple[jax.Array, ...]:
        # The last block may reach back into the one before: slices do not pass the end.
        chosen = lax.dynamic_slice_in_dim(hidden, start, size)
        theirs = lax.dynamic_slice_in_dim(labels, start, size)
        new = _walk(chosen, table, theirs, soft_cap, gradient)
        return tuple(
            lax.dynamic_update_slice_in_dim(old, part, start, 0)
            for old, part in zip(found, new, strict=True)
        )

    full = jnp.zeros((), "int32")
    if rows > block:
        full = last // block
        found = lax.fori_loop(0, full, lambda i, done: walk(done, i * block, block), found)
    step = max(-(-block // SIZES), SMALLEST)
    sizes = [*range(0, block, step), block]
    left = last - full * block
    found = lax.switch(
        jnp.searchsorted(jnp.asarray(sizes), left),
        [
            lambda done, start, size=size: walk(done, start, size) if size else done
            for size in sizes
        ],
        found,
        full * block,
    )
    back = jnp.argsort(order)
    return tuple(x[back] for x in found)
