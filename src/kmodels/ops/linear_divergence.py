"""Divergence of two linear classifiers over a large vocabulary: distillation without logits."""

import math
from typing import Any

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError, check_choice
from kmodels.core.types import Tensor
from kmodels.ops._recompute import recompute
from kmodels.ops._wide import matmul, wide
from kmodels.ops.linear_cross_entropy import check_rows

KINDS = ("forward_kl", "reverse_kl", "jsd")
# Bytes of float32 scores of one classifier in a part. Up to twenty such arrays are alive at once.
BUDGET = 2**25


@op
def linear_divergence(
    hidden: Tensor,
    table: Tensor,
    teacher_hidden: Tensor,
    teacher_table: Tensor,
    weights: Tensor | None = None,
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
    trainable_table: bool = False,
    rows: Tensor | None = None,
    row_ids: Tensor | None = None,
) -> Tensor:
    """Divergence of a student's softmax from a teacher's, both of logits `hidden @ table.T`.

    With p the teacher's softmax, q the student's, and m = beta p + (1 - beta) q:

    - "forward_kl": KL(p | q), the usual distillation;
    - "reverse_kl": KL(q | p), for which the student concentrates on the most likely classes;
    - "jsd": beta KL(p | m) + (1 - beta) KL(q | m), the generalized Jensen-Shannon divergence.

    Some positions at a time have logits, which the backward pass recomputes. Hinton's factor
    temperature^2 is not in it.

    Shapes: hidden (M, D), table (V, D), teacher_hidden (M, E), teacher_table (V, E),
        weights (M,) -> (M,).
    Dtypes: each pair floating, a table cast to its hidden states' dtype; weights floating. Logits
        after the product, and the result, in float32 (float64 for float64 hidden).

    Args:
        hidden: the student's states.
        table: its row per class, such as the token embedding.
        teacher_hidden: the teacher's states. They and their table get no gradient.
        teacher_table: its row per class.
        weights: multiply the results; None for ones. Values at a position of weight 0 play no part,
            not even NaN.
        kind: "forward_kl", "reverse_kl" or "jsd".
        beta: of "jsd": between 0 (the limit is the forward divergence) and 1 (the reverse one);
            None for 0.5.
        temperature: divides the logits of both after the soft caps.
        soft_cap: the student's logits are squashed to `soft_cap * tanh(logits / soft_cap)`.
        teacher_soft_cap: the same of the teacher's.
        trainable_table: whether the student's table gets a gradient.
        rows: (N, D) float, which stand in place of some rows of a frozen table and are trained.
        row_ids: (N,) integer, which rows those are, each once.

    Returns:
        The divergences in nats, with gradients by `hidden` and, if requested, by `table`, or by
        `rows`.

    Raises:
        InputError: for shapes that do not fit, an unknown kind, and numbers out of range.

    Parity: `torch.nn.functional.kl_div` of the log-softmax of both logits.
    Source: https://arxiv.org/abs/1503.02531 (distillation), https://arxiv.org/abs/2306.13649
        (reverse and Jensen-Shannon divergence of language models)
    """
    hidden, table, teacher_hidden, teacher_table = (
        ops.convert_to_tensor(x) for x in (hidden, table, teacher_hidden, teacher_table)
    )
    weights = ops.ones(ops.shape(hidden)[:1], wide(hidden)) if weights is None else weights
    check_linear_divergence(hidden, table, teacher_hidden, teacher_table, weights)
    check_rows(table, rows, row_ids, trainable_table)
    share = check_kind(kind, beta)
    check_positive(temperature, soft_cap, teacher_soft_cap)
    dtype = wide(hidden)
    weights = ops.stop_gradient(ops.cast(weights, dtype))
    counted = ops.expand_dims(ops.not_equal(weights, 0), 1)
    hidden, teacher_hidden = (
        ops.where(counted, x, ops.zeros((), ops.dtype(x))) for x in (hidden, teacher_hidden)
    )
    teacher_hidden, teacher_table = map(ops.stop_gradient, (teacher_hidden, teacher_table))
    if not trainable_table:
        table = ops.stop_gradient(table)
    places = None if row_ids is None else ops.expand_dims(ops.cast(row_ids, "int32"), 1)

    def log_softmax(hidden: Tensor, table: Tensor, cap: float | None, rows: Any) -> Any:
        table = ops.transpose(ops.cast(table, ops.dtype(hidden)))
        logits = ops.cast(matmul(hidden, table), dtype)
        if rows is not None:
            own = matmul(hidden, ops.transpose(ops.cast(rows, ops.dtype(hidden))))
            own = ops.transpose(ops.cast(own, dtype))
            logits = ops.transpose(ops.scatter_update(ops.transpose(logits), places, own))
        if cap is not None:
            logits = ops.tanh(logits / cap) * cap
        if temperature != 1:
            logits = logits / temperature
        return ops.subtract(logits, ops.logsumexp(logits, axis=-1, keepdims=True))

    def part(hidden: Tensor, teacher_hidden: Tensor, *trained: Tensor) -> Any:
        own_table = trained[0] if trainable_table else table
        log_q = log_softmax(hidden, own_table, soft_cap, None if rows is None else trained[0])
        log_p = log_softmax(teacher_hidden, teacher_table, teacher_soft_cap, None)
        if kind == "forward_kl":
            return _kl(log_p, log_q)
        if kind == "reverse_kl":
            return _kl(log_q, log_p)
        # `logaddexp` rounds float64 on torch.
        both = ops.stack([log_p + math.log(share), log_q + math.log(1 - share)])
        log_m = ops.logsumexp(both, axis=0)
        return share * _kl(log_p, log_m) + (1 - share) * _kl(log_q, log_m)

    count = max(BUDGET // (4 * table.shape[0]), 8)
    if hidden.shape[0] is not None:
        count = max(min(count, hidden.shape[0]), 1)
    trained = [table] if trainable_table else [] if rows is None else [rows]
    parts = [_parts(x, count) for x in (hidden, teacher_hidden)]
    divergences = ops.transpose(recompute.by_rows(part, parts, trained))
    divergences = ops.reshape(divergences, (-1,))[: ops.shape(hidden)[0]]
    return ops.multiply(weights, divergences)


def _kl(log_p: Tensor, log_q: Tensor) -> Any:
    return ops.sum(ops.multiply(ops.exp(log_p), ops.subtract(log_p, log_q)), axis=-1)


def _parts(x: Tensor, count: int) -> Any:
    """(M, D) -> (parts, count, D), filled up with zeros.

    Neighbors are in different parts, so that each part has positions of all devices.
    """
    missing = count if x.shape[0] == 0 else -ops.shape(x)[0] % count
    x = ops.pad(x, [[0, missing], [0, 0]])
    return ops.swapaxes(ops.reshape(x, (count, -1, x.shape[1])), 0, 1)


def check_linear_divergence(*tensors: Tensor) -> None:
    """Raises `InputError` for tensors that do not fit, as far as shapes are known."""
    shapes = [tuple(x.shape) for x in tensors]
    ranks_fit = [len(shape) for shape in shapes] == [2, 2, 2, 2, 1]
    rows = {shape[0] for shape in shapes[::2]} - {None}
    if not ranks_fit or len(rows) > 1 or any(shapes[i][1] != shapes[i + 1][1] for i in (0, 2)):
        raise InputError(
            "linear_divergence takes hidden (M, D), table (V, D), teacher_hidden (M, E), "
            f"teacher_table (V, E) and weights (M,), got {', '.join(map(str, shapes))}."
        )
    if shapes[1][0] != shapes[3][0]:
        raise InputError(
            f"linear_divergence got a student of {shapes[1][0]} classes and a teacher of "
            f"{shapes[3][0]}; both need the same vocabulary."
        )


def check_kind(kind: str, beta: float | None) -> float:
    """Returns beta, 0.5 by default.

    Raises:
        InputError: for an unknown kind, a beta that it does not use, or one out of range.
    """
    check_choice("kind", kind, KINDS)
    if beta is not None and kind != "jsd":
        raise InputError(f"linear_divergence got beta {beta} with kind {kind!r}; only jsd has one.")
    if beta is not None and not 0 < beta < 1:
        raise InputError(f"linear_divergence got beta {beta}; it must be between 0 and 1.")
    return 0.5 if beta is None else beta


def check_positive(
    temperature: float, soft_cap: float | None, teacher_soft_cap: float | None
) -> None:
    """Raises `InputError` for a number that is not positive."""
    numbers = {
        "temperature": temperature,
        "soft_cap": soft_cap,
        "teacher_soft_cap": teacher_soft_cap,
    }
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise InputError(f"linear_divergence got {name} {value}; it must be positive.")
