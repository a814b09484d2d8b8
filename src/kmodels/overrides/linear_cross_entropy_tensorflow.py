"""Cross-entropy over a large vocabulary on TensorFlow, a tile of it at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kmodels.core import internals_tensorflow
from kmodels.core.dispatch import override
from kmodels.ops.linear_cross_entropy import (
    Scoring,
    check_linear_cross_entropy,
    check_rows,
    gradient_of_rows,
    linear_cross_entropy,
    linear_log_probs,
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
    scores, best, weights, _ = _scores(
        *(hidden, table, labels, weights, rows, row_ids), trainable_table, Scoring(soft_cap)
    )
    return -tf.reduce_sum(weights * scores[0]), tf.reduce_sum(weights * best)


@override(linear_log_probs)
def linear_log_probs_tensorflow(
    hidden: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor | None = None,
    *,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_hits: bool = False,
    trainable_table: bool = False,
    rows: tf.Tensor | None = None,
    row_ids: tf.Tensor | None = None,
) -> tf.Tensor | tuple[tf.Tensor, ...]:
    """See `kmodels.ops.linear_log_probs`; on a CPU, positions of weight 0 are left out."""
    weights = keras.ops.ones(keras.ops.shape(labels)) if weights is None else weights
    scores, best, weights, places = _scores(
        *(hidden, table, labels, weights, rows, row_ids),
        trainable_table,
        Scoring(soft_cap, temperature, with_entropy),
    )
    results = [score * weights for score in scores]
    if with_hits:
        results.append(tf.stop_gradient(best * tf.cast(weights != 0, best.dtype)))
    if places is not None:
        shape = tf.concat([tf.shape(labels, out_type=places.dtype), [1]], 0)
        results = [tf.reshape(tf.scatter_nd(places, each, shape), (-1,)) for each in results]
    return tuple(results) if len(results) > 1 else results[0]


def _scores(
    hidden: Any,
    table: Any,
    labels: Any,
    weights: Any,
    rows: Any,
    row_ids: Any,
    trainable_table: bool,
    scoring: Scoring,
) -> tuple[Any, Any, Any, Any]:
    """Returns the scores of the positions that count.

    Returns:
        (log-probabilities,), or with the entropies, each (M,); whether each label is the best (M,);
        the weights (M,); the indices of these positions in (M, 1), or None for all.
    """
    check_linear_cross_entropy(hidden, table, labels, weights, scoring)
    check_rows(table, rows, row_ids, trainable_table)
    hidden, table, labels, weights = (
        keras.ops.convert_to_tensor(x) for x in (hidden, table, labels, weights)
    )
    dtype = tf.float64 if hidden.dtype == tf.float64 else tf.float32
    weights = without_ignored(labels, weights)
    counted, places = tf.not_equal(weights, 0), None
    labels = tf.cast(labels, tf.int32)
    if on_accelerator():  # whose host would wait for the number of those that stay
        hidden = tf.where(counted[:, None], hidden, tf.zeros((), hidden.dtype))
        labels = tf.where(counted, labels, 0)
    else:
        # With a second index of 0: the derivative of a gradient by one index is IndexedSlices,
        # which forward-mode differentiation does not take.
        places = tf.where(counted[:, None])
        hidden, labels, weights = (tf.boolean_mask(x, counted) for x in (hidden, labels, weights))
    weights = tf.stop_gradient(tf.cast(weights, dtype))
    # Outside of a gradient tape, as in evaluate(), half of the products are left out.
    gradient = internals_tensorflow.may_record()

    def results(walked: _Walked) -> tuple[Any, ...]:
        best = tf.cast(walked.right >= walked.top, dtype)
        if walked.entropy is None:
            return walked.right - walked.total, best
        return walked.right - walked.total, walked.entropy, best

    def by_result(upstream: tuple[Any, ...]) -> tuple[Any, Any]:
        """Returns the gradients of minus the log-probabilities, and of the entropies."""
        return -upstream[0], upstream[1] if scoring.with_entropy else None

    def of_hidden(walked: _Walked, for_loss: Any, for_entropy: Any) -> Any:
        gradient = walked.slopes[0] * for_loss[:, None]
        if for_entropy is not None:
            gradient += walked.slopes[1] * for_entropy[:, None]
        return tf.cast(gradient, hidden.dtype)

    @tf.custom_gradient
    def frozen(hidden: tf.Tensor) -> Any:
        walked = _walk(hidden, table, labels, scoring, gradient)
        return results(walked), lambda *upstream: of_hidden(walked, *by_result(upstream))

    @tf.custom_gradient
    def trainable(hidden: tf.Tensor, table: tf.Tensor) -> Any:
        walked = _walk(hidden, table, labels, scoring, False)

        def backward(*upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            known = *by_result(upstream), walked.total, walked.entropy
            return _gradients(hidden, table, labels, *known, scoring)

        return results(walked), backward

    @tf.custom_gradient
    def with_rows(hidden: tf.Tensor, rows: tf.Tensor) -> Any:
        walked = _walk(hidden, table, labels, scoring, gradient)

        def backward(*upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            slopes = by_result(upstream)
            known = *slopes, walked.total, walked.entropy
            for_rows = gradient_of_rows(hidden, rows, row_ids, labels, *known, scoring)
            return of_hidden(walked, *slopes), for_rows

        return results(walked), backward

    if trainable_table:
        # A variable that is read inside would, eagerly, count as one that the function holds.
        *scores, best = trainable(hidden, tf.convert_to_tensor(table))
        return scores, best, weights, places
    table = tf.stop_gradient(table)
    if rows is None or row_ids is None:
        *scores, best = frozen(hidden)
        return scores, best, weights, places
    rows = keras.ops.convert_to_tensor(rows)
    constants = tf.stop_gradient(keras.ops.cast(rows, table.dtype))
    table = tf.tensor_scatter_nd_update(table, tf.cast(row_ids, tf.int32)[:, None], constants)
    *scores, best = with_rows(hidden, rows)
    return scores, best, weights, places


class _Walked(NamedTuple):
    """The results of a walk over the vocabulary, for each position."""

    total: tf.Tensor  # the log of the summed exponentials
    right: tf.Tensor  # the score of the label
    top: tf.Tensor  # the highest score
    entropy: tf.Tensor | None  # if wanted
    # The derivatives by `hidden` (M, D), if wanted: of minus the log-probability, of the entropy.
    slopes: tuple[tf.Tensor, ...]


class _Tile(NamedTuple):
    """Some classes of the table, and the scores of all positions for them."""

    start: tf.Tensor | int  # first class
    size: int  # classes v
    rows: tf.Tensor  # (v, D)
    score: tf.Tensor  # (M, v)
    slope: tf.Tensor | None  # derivative of the capped logits by the uncapped ones
    column: tf.Tensor  # of each label in the tile, (M,)
    here: tf.Tensor  # whether the tile holds the label, (M,)


def _each_tile(
    hidden: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    scoring: Scoring,
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
        if (cap := scoring.soft_cap) is not None:
            score = tf.tanh(score / cap)
            score, slope = score * cap, 1 - score * score
        if scoring.temperature != 1:
            score = score / scoring.temperature
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
    hidden: tf.Tensor, table: tf.Tensor, labels: tf.Tensor, scoring: Scoring, gradient: bool
) -> _Walked:
    """Goes through the vocabulary once, with a running maximum and sum."""
    dtype = tf.float64 if hidden.dtype == tf.float64 else tf.float32
    zeros = tf.zeros(tf.shape(hidden)[:1], dtype)
    state: dict[str, Any] = {"total": zeros, "right": zeros, "top": zeros + dtype.min}
    # The sums of exponential x (score - top) and, as the second of the means, times the rows.
    if scoring.with_entropy:
        state["below_top"] = zeros
    if gradient:
        means = [tf.zeros(tf.shape(hidden), dtype) for _ in range(1 + scoring.with_entropy)]
        state |= {"means": means, "slope_right": zeros + 1}

    def step(tile: _Tile, old: dict[str, Any]) -> Any:
        _, _, rows, score, slope, column, here = tile
        right = tf.gather(score, column, batch_dims=1)
        new: dict[str, Any] = {"right": tf.where(here, right, old["right"])}
        new["top"] = tf.maximum(old["top"], tf.reduce_max(score, axis=1))
        moved = old["top"] - new["top"]
        decay, score = tf.exp(moved), score - new["top"][:, None]
        shares = [tf.exp(score)]
        new["total"] = old["total"] * decay + tf.reduce_sum(shares[0], axis=1)
        if scoring.with_entropy:
            shares.append(shares[0] * score)
            before = old["below_top"] + moved * old["total"]
            new["below_top"] = before * decay + tf.reduce_sum(shares[1], axis=1)
        if gradient:
            means = list(old["means"])
            if scoring.with_entropy:
                means[1] += moved[:, None] * means[0]
            new["slope_right"] = old["slope_right"]
            if slope is not None:
                own = tf.gather(slope, column, batch_dims=1)
                new["slope_right"] = tf.where(here, own, old["slope_right"])
                shares = [share * slope for share in shares]
            new["means"] = [
                mean * decay[:, None] + tf.cast(product(tf.cast(share, hidden.dtype), rows), dtype)
                for mean, share in zip(means, shares, strict=True)
            ]
        return new

    state = _each_tile(hidden, table, labels, scoring, step, state)
    log_total, entropy, below_top = tf.math.log(state["total"]), None, None
    if scoring.with_entropy:
        below_top = state["below_top"] / state["total"]
        entropy = log_total - below_top
    slopes: list[tf.Tensor] = []
    if gradient:
        means = [mean / state["total"][:, None] for mean in state["means"]]
        own = tf.cast(tf.gather(table, labels), dtype) * state["slope_right"][:, None]
        slopes = [means[0] - own]
        if below_top is not None:
            slopes.append(means[0] * below_top[:, None] - means[1])
        if scoring.temperature != 1:
            slopes = [slope / scoring.temperature for slope in slopes]
    total = log_total + state["top"]
    return _Walked(total, state["right"], state["top"], entropy, tuple(slopes))


def _gradients(
    hidden: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    for_loss: tf.Tensor,
    for_entropy: tf.Tensor | None,
    total: tf.Tensor,
    entropy: tf.Tensor | None,
    scoring: Scoring,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the gradients of `hidden` and `table`; the scores of each tile are recomputed."""
    dtype = total.dtype

    def step(tile: _Tile, old: dict[str, tf.Tensor]) -> Any:
        own = tf.one_hot(tile.column, tile.size, dtype=dtype) * tf.cast(tile.here, dtype)[:, None]
        log_share = tile.score - total[:, None]
        share = tf.exp(log_share)
        score = (share - own) * for_loss[:, None]
        if for_entropy is not None and entropy is not None:
            score -= share * (log_share + entropy[:, None]) * for_entropy[:, None]
        if scoring.temperature != 1:
            score = score / scoring.temperature
        score = tf.cast(score if tile.slope is None else score * tile.slope, hidden.dtype)
        rows = tf.cast(product(score, hidden, transpose_a=True), table.dtype)
        index = (tile.start + tf.range(tile.size))[:, None]
        return {
            "hidden": old["hidden"] + tf.cast(product(score, tile.rows), dtype),
            "table": tf.tensor_scatter_nd_update(old["table"], index, rows),
        }

    state = {"hidden": tf.zeros(tf.shape(hidden), dtype), "table": tf.zeros_like(table)}
    gradients = _each_tile(hidden, table, labels, scoring, step, state)
    return tf.cast(gradients["hidden"], hidden.dtype), gradients["table"]
