"""Cross-entropy over a large vocabulary on JAX, a tile of it at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

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
    """Returns whether programs are made for an accelerator."""
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
def _trainable(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    return _sums(weights, _walk_counted(hidden, table, labels, weights, soft_cap, False))


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

    def step(tile: jax.Array, start: jax.Array | int, state: tuple[jax.Array, jax.Array]) -> Any:
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
    for_hidden, for_table = _each_tile(hidden, table, step, state)
    return for_hidden.astype(hidden.dtype), for_table, None, None


_trainable.defvjp(_trainable_forward, _trainable_backward)


def _sums(weights: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    total, right, top = found[:3]
    return jnp.sum(weights * (total - right)), jnp.sum(weights * (right >= top))


def _each_tile(hidden: jax.Array, table: jax.Array, step: Callable[..., Any], state: Any) -> Any:
    """Repeats state = step(tile, its first row, state) over the whole table."""
    dtype, size = hidden.dtype, tile_of(table.shape[0], hidden.shape[0], on_accelerator())
    whole = table.shape[0] // size

    def read(start: jax.Array | int, rows: int) -> jax.Array:
        return _part(table, start, lambda x, i: lax.dynamic_slice_in_dim(x, i, rows)).astype(dtype)

    state = lax.fori_loop(0, whole, lambda i, s: step(read(i * size, size), i * size, s), state)
    if rest := table.shape[0] - whole * size:
        state = step(read(whole * size, rest), whole * size, state)
    return state


def _part(
    table: jax.Array, index: jax.Array | int, pick: Callable[[jax.Array, Any], jax.Array]
) -> jax.Array:
    """Returns some rows of the table, and nothing of its size beside it."""
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


def _scores(
    hidden: jax.Array, tile: jax.Array, soft_cap: float | None, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """Returns logits of one tile, and their derivative by the uncapped ones."""
    score = _product(hidden, 1, tile, 1, dtype)
    if soft_cap is None:
        return score, None
    score = jnp.tanh(score / soft_cap)
    return score * soft_cap, 1 - score * score


def _product(
    a: jax.Array, a_axis: int, b: jax.Array, b_axis: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns the product; XLA on a CPU takes several times as long for bfloat16 results."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _place(labels: jax.Array, start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns column of each label in the tile, (M, 1), and whether the tile has it, (M,)."""
    local = labels - start
    return jnp.clip(local, 0, size - 1)[:, None], (local >= 0) & (local < size)


def _walk(
    hidden: jax.Array, table: jax.Array, labels: jax.Array, soft_cap: float | None, gradient: bool
) -> tuple[jax.Array, ...]:
    """Returns one pass over the vocabulary with a running maximum and sum.

    Returns:
        Per position the log of the summed exponentials, the label's logit, the highest logit and,
        with `gradient`, the derivative of the cross-entropy by `hidden` (M, D).
    """
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    zeros = jnp.zeros(hidden.shape[0], dtype)
    state = {"total": zeros, "right": zeros, "top": zeros - jnp.inf}
    if gradient:
        state |= {"mean": jnp.zeros(hidden.shape, dtype), "slope_right": zeros + 1}

    def step(
        tile: jax.Array, start: jax.Array | int, old: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
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

    state = _each_tile(hidden, table, step, state)
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
    """`_walk`, on a CPU without the positions of weight 0, whose number is known when it runs.

    Those positions get zeros, or what comes out of a block that they share with others.
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
