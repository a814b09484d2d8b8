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
    Scoring,
    check_linear_cross_entropy,
    check_rows,
    gradient_of_rows,
    linear_cross_entropy,
    linear_log_probs,
    without_ignored,
)
from kmodels.overrides import meshes
from kmodels.overrides._vocabulary import Vocabulary, Walked

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
    scores, best, weights = _scores(
        *(hidden, table, labels, weights, rows, row_ids), trainable_table, Scoring(soft_cap)
    )
    return -jnp.sum(weights * scores[0]), jnp.sum(weights * best)


@override(linear_log_probs, _supports)
def linear_log_probs_jax(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_hits: bool = False,
    trainable_table: bool = False,
    rows: jax.Array | None = None,
    row_ids: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """See `kmodels.ops.linear_log_probs`."""
    weights = jnp.ones(labels.shape) if weights is None else weights
    scores, best, weights = _scores(
        *(hidden, table, labels, weights, rows, row_ids),
        trainable_table,
        Scoring(soft_cap, temperature, with_entropy),
    )
    results = [*(scores * weights)]
    if with_hits:
        results.append(lax.stop_gradient(jnp.where(weights != 0, best, 0)))
    return tuple(results) if len(results) > 1 else results[0]


def _scores(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    rows: jax.Array | None,
    row_ids: jax.Array | None,
    trainable_table: bool,
    scoring: Scoring,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the scores.

    Returns:
        (1, M) log-probabilities, or (2, M) with the entropies; whether each label is the best (M,);
        the weights (M,). Results at a position of weight 0 are finite, and mean nothing.
    """
    check_linear_cross_entropy(hidden, table, labels, weights, scoring)
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
        scores: Any = _trainable(hidden, table, labels, counted, scoring)
        return *scores, weights
    if rows is not None:
        rows, row_ids = keras.ops.convert_to_tensor(rows), keras.ops.convert_to_tensor(row_ids)
    table = lax.stop_gradient(table)
    scores = _frozen(hidden, rows, table, row_ids, labels, counted, scoring)
    return *scores, weights


def _results(walked: Walked) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities with entropies, and whether each label is the best."""
    results = [walked.right - walked.total]
    if walked.entropy is not None:
        results.append(walked.entropy)
    return jnp.stack(results), (walked.right >= walked.top).astype(walked.total.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _frozen(*arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _results(_walk_frozen(*arguments, gradient=False))


def _frozen_forward(*arguments: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    walked = _walk_frozen(*arguments, gradient=True)
    hidden, rows, _, row_ids, labels, *_ = arguments
    slopes = tuple(slope.astype(hidden.dtype) for slope in walked.slopes)
    residuals = None
    if rows is not None:
        residuals = hidden, rows, row_ids, labels, walked.total, walked.entropy
    return _results(walked), (slopes, residuals)


def _walk_frozen(
    hidden: jax.Array,
    rows: jax.Array | None,
    table: jax.Array,
    row_ids: jax.Array | None,
    labels: jax.Array,
    counted: jax.Array,
    scoring: Scoring,
    gradient: bool,
) -> Walked:
    if rows is not None:
        table = table.at[row_ids].set(rows.astype(table.dtype))
    return _walk_counted(hidden, table, labels, counted, scoring, gradient)


def _frozen_backward(
    scoring: Scoring, residuals: Any, upstream: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    (slopes, of_rows), for_rows = residuals, None
    for_loss, for_entropy = _by_result(upstream[0])
    if of_rows is not None:
        hidden, rows, row_ids, labels, total, entropy = of_rows
        known = labels, for_loss, for_entropy, total, entropy, scoring
        for_rows = gradient_of_rows(hidden, rows, row_ids, *known)
    gradient = slopes[0] * for_loss.astype(slopes[0].dtype)[:, None]
    if for_entropy is not None:
        gradient += slopes[1] * for_entropy.astype(slopes[1].dtype)[:, None]
    return gradient, for_rows, None, None, None, None


_frozen.defvjp(_frozen_forward, _frozen_backward)


def _by_result(upstream: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of minus the log-probabilities, and of the entropies if there are."""
    return -upstream[0], upstream[1] if len(upstream) > 1 else None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _trainable(*arguments: Any) -> tuple[jax.Array, jax.Array]:
    return _trainable_forward(*arguments)[0]


def _trainable_forward(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    counted: jax.Array,
    scoring: Scoring,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    walked = _walk_counted(hidden, table, labels, counted, scoring, False)
    return _results(walked), (hidden, table, labels, walked)


def _trainable_backward(
    scoring: Scoring, residuals: tuple[Any, ...], upstream: tuple[jax.Array, jax.Array]
) -> Any:
    hidden, table, labels, walked = residuals
    vocabulary = _Vocabulary(hidden, table, labels, scoring, on_accelerator())
    return *vocabulary.gradients(*_by_result(upstream[0]), walked), None, None


_trainable.defvjp(_trainable_forward, _trainable_backward)


class _Vocabulary(Vocabulary):
    def rows(self, start: Any, count: int) -> jax.Array:
        return _part(self.table, start, lambda x, i: lax.dynamic_slice_in_dim(x, i, count))

    def rows_of_labels(self) -> jax.Array:
        return _part(self.table, self.labels, lambda x, i: x[i])

    def product(
        self, a: jax.Array, b: jax.Array, transpose_a: bool = False, transpose_b: bool = False
    ) -> jax.Array:
        # XLA on a CPU takes several times as long for bfloat16 results.
        axes = (((int(not transpose_a),), (int(transpose_b),)), ((), ()))
        return lax.dot_general(a, b, axes, preferred_element_type=self.dtype)

    def repeat(self, count: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        return lax.fori_loop(0, count, body, state)

    def put(self, table: jax.Array, rows: jax.Array, start: Any) -> jax.Array:
        return lax.dynamic_update_slice(table, rows, (start, 0))

    def pick(self, values: jax.Array, column: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, column[:, None], axis=1)[:, 0]


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


def _walk_counted(
    hidden: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    counted: jax.Array,
    scoring: Scoring,
    gradient: bool,
) -> Walked:
    """Walks, on a CPU without the positions of weight 0, whose number varies by batch.

    The results of those positions are zeros, or come from a block that they share with others.
    """
    rows = hidden.shape[0]
    # Sorting would move positions between the devices of a data-parallel run. A GPU's host waits
    # for each number that decides how often a loop runs, and which way a switch goes.
    if keras.distribution.distribution() is not None or on_accelerator():
        return _Vocabulary(hidden, table, labels, scoring, on_accelerator()).walk(gradient)
    order = jnp.argsort(~counted)
    hidden, labels = hidden[order], labels[order]
    last, block = jnp.sum(counted, dtype="int32"), min(rows, BLOCK)
    zeros = jnp.zeros(rows, jnp.promote_types(hidden.dtype, jnp.float32))
    slopes = (jnp.zeros(hidden.shape, zeros.dtype),) * (1 + scoring.with_entropy) * gradient
    walked = Walked(zeros, zeros, zeros, zeros if scoring.with_entropy else None, slopes)

    def walk(walked: Walked, start: jax.Array, size: int) -> Walked:
        # The last block may reach back into the one before: slices do not pass the end.
        chosen = lax.dynamic_slice_in_dim(hidden, start, size)
        theirs = lax.dynamic_slice_in_dim(labels, start, size)
        new = _Vocabulary(chosen, table, theirs, scoring, False).walk(gradient)
        return jax.tree.map(
            lambda old, part: lax.dynamic_update_slice_in_dim(old, part, start, 0), walked, new
        )

    full = jnp.zeros((), "int32")
    if rows > block:
        full = last // block
        walked = lax.fori_loop(0, full, lambda i, done: walk(done, i * block, block), walked)
    step = max(-(-block // SIZES), SMALLEST)
    sizes = [*range(0, block, step), block]
    left = last - full * block
    walked = lax.switch(
        jnp.searchsorted(jnp.asarray(sizes), left),
        [
            lambda done, start, size=size: walk(done, start, size) if size else done
            for size in sizes
        ],
        walked,
        full * block,
    )
    back = jnp.argsort(order)
    return jax.tree.map(lambda x: x[back], walked)
