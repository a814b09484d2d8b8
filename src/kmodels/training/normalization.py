"""The divisor of the loss of a language task, over a whole update.

The sum of the weighted losses is divided by the sum of the weights, over all batches of an update
and over all devices. A step divides by the weight of its batch on all devices. An optimizer that
accumulates multiplies that by the weight again, and divides the sum of the gradients by the sum of
the weights. `weighed` hands the weight to both: only the step has the labels.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from keras import ops

from kmodels.core.errors import check_choice
from kmodels.core.types import Tensor

NORMALIZATIONS = ("tokens", "positions", "examples")
# An optimizer counts weights in units of so many tokens, so that a scaled loss is about as large as
# a mean: float16 overflows. A power of two rounds nothing.
UNIT = 1024.0


class TokenWeights(NamedTuple):
    """The weights of the tokens of a batch on this device, and the tensors that they come from.

    Attributes:
        labels: as in the batch.
        sample_weight: as in the batch.
        weights: (B, T) float32, see `normalized`.
        weight: the weight of the batch on this device, a float32 scalar.
    """

    labels: Any
    sample_weight: Any
    weights: Tensor
    weight: Tensor


class BatchWeight(NamedTuple):
    """The weight of a batch: the number of its learnt tokens, or of its examples that have some.

    Attributes:
        total: the weight on all devices, a float32 scalar.
        shards: number of devices; each computes the loss of its rows, and the loss is their mean.
        tokens: spares the loss of the same labels and weights their computation; None if the loss
            may be of others.
    """

    total: Tensor
    shards: int
    tokens: TokenWeights | None = None

    @property
    def share(self) -> Any:
        """The weight of a device if all have the same."""
        return self.total / self.shards


class _Step(threading.local):  # Replicas on TensorFlow are threads.
    def __init__(self):
        # Not on the class: see `kmodels.core.dispatch._Settled`.
        self.weight: BatchWeight | None = None


_step = _Step()


def batch_weight() -> BatchWeight | None:
    """Returns the weight of the batch of the running step, or None if nothing is divided by it."""
    return _step.weight


@contextmanager
def weighed(weight: BatchWeight | None) -> Iterator[None]:
    """Sets `batch_weight` in the block."""
    former, _step.weight = _step.weight, weight
    try:
        yield
    finally:
        _step.weight = former


def check_normalization(name: str) -> None:
    """Raises `InputError` for an unknown normalization."""
    check_choice("loss_normalization", name, NORMALIZATIONS)


def normalized(name: str, weights: Tensor) -> tuple[Any, Any]:
    """Returns the weights of the losses, and the weight of the batch on this device.

    Args:
        name: "tokens" or "examples".
        weights: (B, T) float, 0 for tokens that are not learnt.

    Returns:
        (B, T), for "examples" with the sum 1 or 0 in each row; and a scalar.
    """
    if name == "tokens":
        return weights, ops.sum(weights)
    rows = ops.sum(weights, axis=1, keepdims=True)
    learns = ops.cast(ops.greater(rows, 0.0), rows.dtype)
    return ops.divide(weights, rows + (1.0 - learns)), ops.sum(learns)


def mean_loss(total: Tensor, weight: Tensor) -> Any:
    """Returns the loss of this device; 0 for a batch without weight.

    Args:
        total: sum of the weighted losses of this device, a scalar.
        weight: weight of its batch, used outside of a step; a step divides by that of all devices.
    """
    whole = batch_weight()
    if whole is not None:
        weight = whole.share
    return ops.divide(total, nonzero(weight))


def nonzero(weight: Tensor) -> Any:
    """Returns a weight, or 1 for 0: `divide_no_nan` has a gradient of NaN there."""
    return ops.where(ops.greater(weight, 0.0), weight, ops.ones_like(weight))
