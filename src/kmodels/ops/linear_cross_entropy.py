"""Cross-entropy and log-probabilities of a linear classifier over a large vocabulary."""

from typing import Any, NamedTuple

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.ops._wide import matmul, wide

# Bytes of float32 scores in a tile of an accelerator. Their exponentials, a copy in the dtype of
# the operands and, with a soft cap, its slopes take three times as much on top: 0.9 GiB.
BUDGET = 2**28
# The label of a position that does not count, as in torch and transformers.
IGNORED = -100
# Least classes of such a tile, and positions assumed if their number is unknown.
NARROWEST, USUAL = 2048, 8192


class Scoring(NamedTuple):
    """The scores s = cap(hidden @ table.T) / temperature, and which of their results are wanted."""

    soft_cap: float | None = None
    temperature: float = 1.0
    with_entropy: bool = False


@op
def linear_cross_entropy(
    hidden: Tensor,
    table: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    soft_cap: float | None = None,
    trainable_table: bool = False,
    rows: Tensor | None = None,
    row_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of the logits `hidden @ table.T`, and how many labels were the best.

    This body builds the logits; no override does. Their step needs tiles of a few thousand words
    instead of positions x vocabulary.

    Shapes: hidden (M, D), table (V, D), labels (M,), weights (M,) -> two scalars.
    Dtypes: hidden floating, the compute dtype; table floating, cast to it; labels integer; weights
        floating. Logits after the product, the softmax and both results in float32 (float64 for
        float64 hidden).

    Args:
        hidden: the states to classify.
        table: a row per class, such as the token embedding.
        labels: the class of each position, in [0, V); any number if the weight is 0. A position
            labeled -100 counts as one of weight 0.
        weights: weights of each position. Values at a position of weight 0 play no part, not even
            NaN.
        soft_cap: logits are squashed to `soft_cap * tanh(logits / soft_cap)`.
        trainable_table: whether the table gets a gradient; without, it gets none or zeros.
        rows: (N, D) float, which stand in place of some rows of a frozen table and are trained.
        row_ids: (N,) integer, which rows those are, each once.

    Returns:
        The sum of weight x cross-entropy, and the sum of the weights whose label has the highest
        logit (a tie counts). The first has a gradient by `hidden` and, if requested, by `table`,
        or by `rows`.

    Raises:
        InputError: if shapes do not fit, the soft cap is not positive, or rows are given with a
            table that is trained.

    Parity: `torch.nn.functional.cross_entropy(reduction="none")` on the logits.
    Source: https://arxiv.org/abs/2411.09009 (cut cross-entropy), https://arxiv.org/abs/1805.02867
        (running maximum and sum)
    """
    scores, best, weights = _scores(
        *(hidden, table, labels, weights, rows, row_ids), trainable_table, Scoring(soft_cap)
    )
    return -ops.sum(ops.multiply(weights, scores[0])), ops.stop_gradient(
        ops.sum(ops.multiply(weights, best))
    )


@op
def linear_log_probs(
    hidden: Tensor,
    table: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_hits: bool = False,
    trainable_table: bool = False,
    rows: Tensor | None = None,
    row_ids: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probability of each label under the softmax of the logits `hidden @ table.T`.

    This body builds the logits; no override does, as in `linear_cross_entropy`, which is minus the
    sum of the log-probabilities.

    Shapes: hidden (M, D), table (V, D), labels (M,), weights (M,) -> (M,), or up to three of them.
    Dtypes: as in `linear_cross_entropy`.

    Args:
        hidden: the states to classify.
        table: a row per class, such as the token embedding.
        labels: the class of each position, as in `linear_cross_entropy`.
        weights: multiply the results; None for ones. Values at a position of weight 0, or labeled
            -100, play no part, not even NaN, and its results are 0.
        soft_cap: logits are squashed to `soft_cap * tanh(logits / soft_cap)`.
        temperature: divides the logits after the soft cap.
        with_entropy: returns the entropy of each softmax too, in nats. Its gradient takes another
            product of each tile, also if it is not used.
        with_hits: returns 1 for each label with the highest logit too (a tie counts), else 0.
        trainable_table: whether the table gets a gradient; without, it gets none or zeros.
        rows: (N, D) float, which stand in place of some rows of a frozen table and are trained.
        row_ids: (N,) integer, which rows those are, each once.

    Returns:
        The log-probabilities, or a tuple of them, the entropies and the hits, if these are wanted.
        All but the hits have gradients by `hidden` and, if requested, by `table`, or by `rows`.

    Raises:
        InputError: as in `linear_cross_entropy`, and for a temperature that is not positive.

    Parity: `torch.log_softmax` and `torch.distributions.Categorical.entropy` of the logits.
    Source: as for `linear_cross_entropy`
    """
    weights = ops.ones(ops.shape(labels), wide(hidden)) if weights is None else weights
    scoring = Scoring(soft_cap, temperature, with_entropy)
    scores, best, weights = _scores(
        *(hidden, table, labels, weights, rows, row_ids), trainable_table, scoring
    )
    results = [ops.multiply(weights, each) for each in scores]
    if with_hits:
        results.append(ops.stop_gradient(ops.where(ops.not_equal(weights, 0), best, 0.0)))
    return tuple(results) if len(results) > 1 else results[0]


def _scores(
    hidden: Tensor,
    table: Tensor,
    labels: Tensor,
    weights: Tensor,
    rows: Tensor | None,
    row_ids: Tensor | None,
    trainable_table: bool,
    scoring: Scoring,
) -> tuple[list[Any], Any, Any]:
    """Returns [log-probabilities] or [log-probabilities, entropies], the hits, and the weights."""
    check_linear_cross_entropy(hidden, table, labels, weights, scoring)
    check_rows(table, rows, row_ids, trainable_table)
    dtype = wide(hidden)
    weights = ops.stop_gradient(ops.cast(without_ignored(labels, weights), dtype))
    counted = ops.not_equal(weights, 0)
    labels = ops.where(counted, ops.cast(labels, "int32"), 0)
    hidden = ops.where(ops.expand_dims(counted, 1), hidden, ops.zeros((), ops.dtype(hidden)))
    table = ops.cast(table, ops.dtype(hidden))
    if not trainable_table:
        table = ops.stop_gradient(table)
    if rows is not None:
        places = ops.expand_dims(ops.cast(row_ids, "int32"), 1)
        table = ops.scatter_update(table, places, ops.cast(rows, ops.dtype(table)))
    logits = ops.cast(matmul(hidden, ops.transpose(table)), dtype)
    if scoring.soft_cap is not None:
        logits = ops.tanh(logits / scoring.soft_cap) * scoring.soft_cap
    if scoring.temperature != 1:
        logits = logits / scoring.temperature
    right = ops.squeeze(ops.take_along_axis(logits, ops.expand_dims(labels, 1), axis=1), 1)
    total = ops.logsumexp(logits, axis=1)
    results = [ops.subtract(right, total)]
    if scoring.with_entropy:
        log_shares = ops.subtract(logits, ops.expand_dims(total, 1))
        results.append(-ops.sum(ops.multiply(ops.exp(log_shares), log_shares), axis=1))
    # Keras wants `initial` for no rows, and on torch puts it on the CPU.
    highest = ops.max(logits, axis=1) if logits.shape[0] != 0 else logits[:, 0]
    return results, ops.cast(ops.greater_equal(right, highest), dtype), weights


def without_ignored(labels: Tensor, weights: Tensor) -> Any:
    """Sets the weights of positions labeled `IGNORED` to 0; labels have the same shape."""
    ignored = ops.equal(ops.cast(labels, "int32"), IGNORED)
    return ops.where(ignored, ops.zeros((), ops.dtype(weights)), weights)


def check_linear_cross_entropy(
    hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, scoring: Scoring
) -> None:
    """Raises `InputError` for wrong arguments, as far as static shapes are known."""
    shapes = [tuple(x.shape) for x in (hidden, table, labels, weights)]
    ranks_fit = [len(shape) for shape in shapes] == [2, 2, 1, 1]
    rows = {shape[0] for shape in (shapes[0], *shapes[2:])} - {None}
    if not ranks_fit or len(rows) > 1 or shapes[0][1] != shapes[1][1]:
        raise InputError(
            "linear_cross_entropy takes hidden (M, D), table (V, D), labels (M,) and weights (M,), "
            f"got {', '.join(map(str, shapes))}."
        )
    if (cap := scoring.soft_cap) is not None and cap <= 0:
        raise InputError(f"linear_cross_entropy got soft_cap {cap}; it must be positive, or None.")
    if not (temperature := scoring.temperature) > 0:
        raise InputError(f"linear_log_probs got temperature {temperature}; it must be positive.")


def check_rows(
    table: Tensor, rows: Tensor | None, row_ids: Tensor | None, trainable_table: bool
) -> None:
    """Raises `InputError` for wrong `rows` or `row_ids`, as far as static shapes are known."""
    if rows is None and row_ids is None:
        return
    shape, of_ids = (None if x is None else tuple(x.shape) for x in (rows, row_ids))
    if shape is None or of_ids is None or shape != (*of_ids, table.shape[1]):
        raise InputError(
            f"linear_cross_entropy takes rows (N, D) with row_ids (N,), got {shape} and {of_ids} "
            f"for a table {tuple(table.shape)}."
        )
    if trainable_table:
        raise InputError(
            "linear_cross_entropy takes rows beside a frozen table; leave out trainable_table."
        )


def gradient_of_rows(
    hidden: Tensor,
    rows: Tensor,
    row_ids: Tensor,
    labels: Tensor,
    for_loss: Tensor,
    for_entropy: Tensor | None,
    total: Tensor,
    entropy: Tensor | None,
    scoring: Scoring,
) -> Any:
    """Returns the gradient of `rows` (N, D), for overrides that hold no logits.

    `for_loss` is the gradient of minus the log-probabilities, and `for_entropy` that of the
    entropies, or None; `total` is the log of the summed exponentials of all scores, float32 or
    wider. These, the labels and the entropies are (M,).
    """
    dtype = ops.dtype(total)
    score = ops.cast(matmul(hidden, ops.transpose(ops.cast(rows, ops.dtype(hidden)))), dtype)
    slope = 1.0 / scoring.temperature
    if scoring.soft_cap is not None:
        score = ops.tanh(score / scoring.soft_cap)
        slope = (1 - ops.square(score)) * slope
        score = score * scoring.soft_cap
    score = score / scoring.temperature
    labels, row_ids = ops.cast(labels, "int32"), ops.cast(row_ids, "int32")
    own = ops.cast(ops.equal(labels[:, None], row_ids[None]), dtype)
    log_share = score - total[:, None]
    share = ops.exp(log_share)
    gradient = (share - own) * for_loss[:, None]
    if for_entropy is not None and entropy is not None:
        gradient = gradient - share * (log_share + entropy[:, None]) * for_entropy[:, None]
    gradient = ops.cast(gradient * slope, ops.dtype(hidden))
    return ops.cast(matmul(ops.transpose(gradient), hidden), ops.dtype(rows))


def tile_of(vocabulary: int, positions: int | None = None, accelerator: bool = False) -> int:
    """Returns the number of classes in a tile of an override.

    A size near the limit that divides the vocabulary is preferred: it leaves no remainder.

    On a CPU 2,048 to 4,096 classes measured best: the arrays of a tile stay in its caches. On an
    accelerator each tile starts a dozen kernels, whose launches matter less the larger they are; so
    a tile has as many scores as fit `BUDGET`, for few positions the whole vocabulary. It has at
    least `NARROWEST` classes, below which products are bound by memory. None of this was measured
    on a device.
    """
    widest = 4096
    if accelerator:
        rows = max(USUAL if positions is None else positions, 1)
        widest = max(BUDGET // (4 * rows) // 256 * 256, NARROWEST)
    if vocabulary <= widest:
        return vocabulary
    sizes = range(widest, max(widest // 2, NARROWEST) - 1, -256)
    return next((size for size in sizes if vocabulary % size == 0), widest)
