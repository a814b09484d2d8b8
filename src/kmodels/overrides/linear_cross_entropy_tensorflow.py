"""Cross-entropy over a large vocabulary on TensorFlow, a tile of it at a time."""

from collections.abc import Callable
from typing import Any

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
from kmodels.overrides._tensors_tensorflow import product, static_shape


def on_accelerator() -> bool:
    """Returns whether TensorFlow puts tensors on an accelerator."""
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


def _each_tile(hidden: tf.Tensor, table: tf.Tensor, step: Callable[..., Any], state: Any) -> Any:
    """Repeats state = step(tile, its first row, its number of rows, state) over the whole table."""
    count = static_shape(table)[0]
    dtype, size = hidden.dtype, tile_of(count, hidden.shape[0], on_accelerator())
    whole = count // size

    def body(i: tf.Tensor, old: Any) -> Any:
        tile = tf.cast(tf.slice(table, (i * size, 0), (size, table.shape[1])), dtype)
        return i + 1, step(tile, i * size, size, old)

    state = tf.while_loop(lambda i, _: i < whole, body, (0, state), parallel_iterations=1)[1]
    if rest := count - whole * size:
        tile = tf.cast(table[whole * size :], dtype)
        state = step(tile, whole * size, rest, state)
    return state


def _scores(
    hidden: tf.Tensor, tile: tf.Tensor, soft_cap: float | None, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns logits of one tile, and their derivative by the uncapped ones."""
    score = tf.cast(product(hidden, tile, transpose_b=True), dtype)
    if soft_cap is None:
        return score, None
    score = tf.tanh(score / soft_cap)
    return score * soft_cap, 1 - score * score


def _place(labels: tf.Tensor, start: tf.Tensor | int, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns column of each label in the tile, and whether the tile has it, both (M,)."""
    local = labels - start
    return tf.clip_by_value(local, 0, size - 1), (local >= 0) & (local < size)


def _walk(
    hidden: tf.Tensor, table: tf.Tensor, labels: tf.Tensor, soft_cap: float | None, gradient: bool
) -> tuple[tf.Tensor, ...]:
    """Returns one pass over the vocabulary with a running maximum and sum.

    Returns:
        Per position the log of the summed exponentials, the label's logit, the highest logit and,
        with `gradient`, the derivative of the cross-entropy by `hidden` (M, D).
    """
    dtype = tf.float64 if hidden.dtype == tf.float64 else tf.float32
    zeros = tf.zeros(tf.shape(hidden)[:1], dtype)
    state = {"total": zeros, "right": zeros, "top": zeros + dtype.min}
    if gradient:
        state |= {"mean": tf.zeros(tf.shape(hidden), dtype), "slope_right": zeros + 1}

    def step(tile: tf.Tensor, start: tf.Tensor | int, size: int, old: dict[str, tf.Tensor]) -> Any:
        score, slope = _scores(hidden, tile, soft_cap, dtype)
        column, here = _place(labels, start, size)
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
            part = tf.cast(product(tf.cast(score, hidden.dtype), tile), dtype)
            new["mean"] = old["mean"] * decay[:, None] + part
        return new

    state = _each_tile(hidden, table, step, state)
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
    """Gradients of `hidden` and `table`; the logits of each tile are made again."""
    dtype = weights.dtype

    def step(tile: tf.Tensor, start: tf.Tensor | int, size: int, old: dict[str, tf.Tensor]) -> Any:
        score, slope = _scores(hidden, tile, soft_cap, dtype)
        column, here = _place(labels, start, size)
        own = tf.one_hot(column, size, dtype=dtype) * tf.cast(here, dtype)[:, None]
        score = (tf.exp(score - total[:, None]) - own) * weights[:, None]
        score = tf.cast(score if slope is None else score * slope, hidden.dtype)
        rows = tf.cast(product(score, hidden, transpose_a=True), table.dtype)
        index = (start + tf.range(size))[:, None]
        return {
            "hidden": old["hidden"] + tf.cast(product(score, tile), dtype),
            "table": tf.tensor_scatter_nd_update(old["table"], index, rows),
        }

    state = {"hidden": tf.zeros(tf.shape(hidden), dtype), "table": tf.zeros_like(table)}
    found = _each_tile(hidden, table, step, state)
    return tf.cast(found["hidden"], hidden.dtype), found["table"]
