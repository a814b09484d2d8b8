"""Cross-entropy over a large vocabulary on TensorFlow, a tile of it at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmodels.core import internals_tensorflow
from kmodels.core.dispatch import override
from kmodels.ops.linear_cross_entropy import (
    check_linear_cross_entropy,
    check_rows,
    gradient_of_rows,
    linear_cross_entropy,
    tile_of,
    without_ignored,
)
from kmodels.overrides._tensors_tensorflow import product, static_shape, wide


def on_accelerator() -> bool:
    """Returns True if TensorFlow puts tensors on an accelerator."""
    return bool(tf.config.list_physical_devices("GPU"))


@override(linear_cross_entropy)
def linear_cross_entropy_tensorflow(
    hidden: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    *,
    soft_cap: float | None = None,
    trainable_table: bool = False,
    rows: tf.Tensor | None = None,
    row_ids: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `kmodels.ops.linear_cross_entropy`; on a CPU, positions of weight 0 are left out.

    Compile the step without XLA: it takes longer and more memory over the loop (measured).
    """
    check_linear_cross_entropy(hidden, table, labels, weights, soft_cap)
    check_rows(table, rows, row_ids, trainable_table)
    hidden, table, labels, weights = (
        keras.ops.convert_to_tensor(x) for x in (hidden, table, labels, weights)
    )
    dtype = tf.float64 if hidden.dtype == tf.float64 else tf.float32
    weights = without_ignored(labels, weights)
    counted = tf.not_equal(weights, 0)
    labels = tf.cast(labels, tf.int32)
    if on_accelerator():  # whose host would wait for the number of those that stay
        hidden = tf.where(counted[:, None], hidden, tf.zeros((), hidden.dtype))
        labels = tf.where(counted, labels, 0)
    else:
        hidden, labels, weights = (tf.boolean_mask(x, counted) for x in (hidden, labels, weights))
    weights = tf.stop_gradient(tf.cast(weights, dtype))
    # Outside of a gradient tape, as in evaluate(), half of the products are left out.
    gradient = internals_tensorflow.may_record()

    def sums(total: tf.Tensor, right: tf.Tensor, top: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        hits = tf.cast(right >= top, dtype)
        return tf.reduce_sum(weights * (total - right)), tf.reduce_sum(weights * hits)

    @tf.custom_gradient
    def frozen(hidden: tf.Tensor) -> Any:
        found = _walk(hidden, table, labels, soft_cap, gradient)

        def backward(upstream: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return tf.cast(found[3] * weights[:, None] * upstream, hidden.dtype)

        return sums(*found[:3]), backward

    @tf.custom_gradient
    def trainable(hidden: tf.Tensor, table: tf.Tensor) -> Any:
        found = _walk(hidden, table, labels, soft_cap, False)

        def backward(upstream: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _gradients(hidden, table, labels, weights * upstream, found[0], soft_cap)

        return sums(*found[:3]), backward

    @tf.custom_gradient
    def with_rows(hidden: tf.Tensor, rows: tf.Tensor) -> Any:
        found = _walk(hidden, table, labels, soft_cap, gradient)

        def backward(upstream: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            scaled = weights * upstream
            ids: Any = row_ids  # given with the rows, as was checked
            for_rows = gradient_of_rows(hidden, rows, ids, labels, scaled, found[0], soft_cap)
            return tf.cast(found[3] * scaled[:, None], hidden.dtype), for_rows

        return sums(*found[:3]), backward

    if trainable_table:
        # A variable that is read inside would, eagerly, count as one that the function holds.
        return trainable(hidden, tf.convert_to_tensor(table))
    table = tf.stop_gradient(table)
    if rows is None or row_ids is None:
        return frozen(hidden)
    rows = keras.ops.convert_to_tensor(rows)
    places: Any = tf.cast(row_ids, tf.int32)[:, None]
    held = tf.stop_gradient(keras.ops.cast(rows, table.dtype))
    table = tf.tensor_scatter_nd_update(table, places, held)
    return with_rows(hidden, rows)  # type: ignore[arg-type]


class _Tile(NamedTuple):
    """Some classes of the table, and the logits of all positions for them."""

    start: tf.Tensor | int  # first class
    size: int  # classes v
    rows: tf.Tensor  # (v, D)
    score: tf.Tensor  # logits (M, v)
    slope: tf.Tensor | None  # derivative of the logits by the uncapped ones
    column: tf.Tensor  # of each label in the tile, (M,)
    here: tf.Tensor  # whether the tile holds the label, (M,)


def _each_tile(
    hidden: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    soft_cap: float | None,
    step: Callable[[_Tile, Any], Any],
    state: Any,
) -> Any:
    """Repeats state = step(tile, state) over the whole table."""
    count = static_shape(table)[0]
    size = tile_of(count, hidden.shape[0], on_accelerator())
    whole = count // size

    def run(start: tf.Tensor | int, size: int, rows: tf.Tensor, state: Any) -> Any:
        rows, slope = tf.cast(rows, hidden.dtype), None
        score = wide(product(hidden, rows, transpose_b=True))
        if soft_cap is not None:
            score = tf.tanh(score / soft_cap)
            score, slope = score * soft_cap, 1 - score * score
        local = labels - start
        column, here = tf.clip_by_value(local, 0, size - 1), (local >= 0) & (local < size)
        return step(_Tile(start, size, rows, score, slope, column, here), state)

    def body(i: tf.Tensor, state: Any) -> Any:
        rows = tf.slice(table, (i * size, 0), (size, table.shape[1]))
        return i + 1, run(i * size, size, rows, state)

    state = tf.while_loop(lambda i, _: i < whole, body, (0, state), parallel_iterations=1)[1]
    if rest := count - whole * size:
        state = run(whole * size, rest, table[whole * size :], state)
    return state


def _walk(
    hidden: tf.Tensor, table: tf.Tensor, labels: tf.Tensor, soft_cap: float | None, gradient: bool
) -> tuple[tf.Tensor, ...]:
    """Goes through the vocabulary once, with a running maximum and sum.

    Returns:
        For each position the log of the summed exponentials, the label's logit, the highest logit
        and, with `gradient`, the derivative of the cross-entropy by `hidden` (M, D).
    """
    dtype = tf.float64 if hidden.dtype == tf.float64 else tf.float32
    zeros = tf.zeros(tf.shape(hidden)[:1], dtype)
    state = {"total": zeros, "right": zeros, "top": zeros + dtype.min}
    if gradient:
        state |= {"mean": tf.zeros(tf.shape(hidden), dtype), "slope_right": zeros + 1}

    def step(tile: _Tile, old: dict[str, tf.Tensor]) -> Any:
        _, _, rows, score, slope, column, here = tile
        new = {"right": tf.where(here, tf.gather(score, column, batch_dims=1), old["right"])}
        new["top"] = tf.maximum(old["top"], tf.reduce_max(score, axis=1))
        decay = tf.exp(old["top"] - new["top"])
        score = tf.exp(score - new["top"][:, None])
        new["total"] = old["total"] * decay + tf.reduce_sum(score, axis=1)
        if gradient:
            new["slope_right"] = old["slope_right"]
            if slope is not None:
                own = tf.gather(slope, column, batch_dims=1)
                new["slope_right"] = tf.where(here, own, old["slope_right"])
                score = score * slope
            part = tf.cast(product(tf.cast(score, hidden.dtype), rows), dtype)
            new["mean"] = old["mean"] * decay[:, None] + part
        return new

    state = _each_tile(hidden, table, labels, soft_cap, step, state)
    total = tf.math.log(state["total"]) + state["top"]
    if not gradient:
        return total, state["right"], state["top"]
    own = tf.cast(tf.gather(table, labels), dtype) * state["slope_right"][:, None]
    return total, state["right"], state["top"], state["mean"] / state["total"][:, None] - own


def _gradients(
    hidden: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    total: tf.Tensor,
    soft_cap: float | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the gradients of `hidden` and `table`; the logits of each tile are recomputed."""
    dtype = weights.dtype

    def step(tile: _Tile, old: dict[str, tf.Tensor]) -> Any:
        own = tf.one_hot(tile.column, tile.size, dtype=dtype) * tf.cast(tile.here, dtype)[:, None]
        score = (tf.exp(tile.score - total[:, None]) - own) * weights[:, None]
        score = tf.cast(score if tile.slope is None else score * tile.slope, hidden.dtype)
        rows = tf.cast(product(score, hidden, transpose_a=True), table.dtype)
        index = (tile.start + tf.range(tile.size))[:, None]
        return {
            "hidden": old["hidden"] + tf.cast(product(score, tile.rows), dtype),
            "table": tf.tensor_scatter_nd_update(old["table"], index, rows),
        }

    state = {"hidden": tf.zeros(tf.shape(hidden), dtype), "table": tf.zeros_like(table)}
    found = _each_tile(hidden, table, labels, soft_cap, step, state)
    return tf.cast(found["hidden"], hidden.dtype), found["table"]
