"""Cross-entropy over a large vocabulary on TensorFlow, a tile of it at a time."""

from collections.abc import Callable
from typing import Any

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
    without_ignored,
)
from kmodels.overrides._tensors_tensorflow import product, static_shape, wide
from kmodels.overrides._vocabulary import Vocabulary, Walked


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

    def vocabulary(hidden: tf.Tensor, table: tf.Tensor) -> _Vocabulary:
        return _Vocabulary(hidden, table, labels, scoring, on_accelerator())

    def results(walked: Walked) -> tuple[Any, ...]:
        best = tf.cast(walked.right >= walked.top, dtype)
        if walked.entropy is None:
            return walked.right - walked.total, best
        return walked.right - walked.total, walked.entropy, best

    def by_result(upstream: tuple[Any, ...]) -> tuple[Any, Any]:
        """Returns the gradients of minus the log-probabilities, and of the entropies."""
        return -upstream[0], upstream[1] if scoring.with_entropy else None

    def of_hidden(walked: Walked, for_loss: Any, for_entropy: Any) -> Any:
        gradient = walked.slopes[0] * for_loss[:, None]
        if for_entropy is not None:
            gradient += walked.slopes[1] * for_entropy[:, None]
        return tf.cast(gradient, hidden.dtype)

    @tf.custom_gradient
    def trainable(hidden: tf.Tensor, table: tf.Tensor) -> Any:
        tiles = vocabulary(hidden, table)
        walked = tiles.walk(False)
        return (
            results(walked),
            lambda *upstream: tiles.gradients(*by_result(upstream), walked),
        )

    @tf.custom_gradient
    def frozen(hidden: tf.Tensor, *rows: tf.Tensor) -> Any:
        walked = vocabulary(hidden, table).walk(gradient)

        def backward(*upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            slopes = by_result(upstream)
            known = labels, *slopes, walked.total, walked.entropy, scoring
            for_rows = [gradient_of_rows(hidden, each, row_ids, *known) for each in rows]
            return of_hidden(walked, *slopes), *for_rows

        return results(walked), backward

    if trainable_table:
        # A variable that is read inside would, eagerly, count as one that the function holds.
        *scores, best = trainable(hidden, tf.convert_to_tensor(table))
        return scores, best, weights, places
    table = tf.stop_gradient(table)
    trained = []
    if rows is not None:
        trained = [keras.ops.convert_to_tensor(rows)]
        constants = tf.stop_gradient(keras.ops.cast(trained[0], table.dtype))
        table = tf.tensor_scatter_nd_update(table, tf.cast(row_ids, tf.int32)[:, None], constants)
    *scores, best = frozen(hidden, *trained)
    return scores, best, weights, places


class _Vocabulary(Vocabulary):
    def rows(self, start: Any, count: int) -> tf.Tensor:
        return tf.slice(self.table, (start, 0), (count, self.table.shape[1]))

    def rows_of_labels(self) -> tf.Tensor:
        return tf.gather(self.table, self.labels)

    def product(
        self, a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
    ) -> tf.Tensor:
        return wide(product(a, b, transpose_a, transpose_b))

    def repeat(self, count: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        def step(i: tf.Tensor, state: Any) -> Any:
            return i + 1, body(i, state)

        return tf.while_loop(lambda i, _: i < count, step, (0, state), parallel_iterations=1)[1]

    def put(self, table: tf.Tensor, rows: tf.Tensor, start: Any) -> tf.Tensor:
        index = (start + tf.range(static_shape(rows)[0]))[:, None]
        return tf.tensor_scatter_nd_update(table, index, rows)

    def pick(self, values: tf.Tensor, column: tf.Tensor) -> tf.Tensor:
        return tf.gather(values, column, batch_dims=1)
