"""The losses by which CLIP and SigLIP learn from pairs of an image and a text."""

from typing import Any

import keras
from keras import ops

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.training.pair_loss import ABSENT, PairLoss


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPLoss(PairLoss):
    """Cross-entropy of each image's text among all texts, and of each text's image likewise.

    The batch is the whole one on JAX, also over a mesh. On torch and TensorFlow each device
    compares its own rows.

    Args:
        reduction: as of `keras.losses.Loss`.
        name: name of the loss.
        **kwargs: of `keras.losses.Loss`.

    Call:
        y_true: not read.
        y_pred: (B, B), the logits of each image with each text, as `ImageTextSimilarity` gives.
        sample_weight: (B,), weights of the pairs, or None; a pair that weighs nothing is not among
            the negatives of the others either.

        It gives a scalar; without reduction (B,).

    Raises:
        InputError: for logits that are not of as many images as texts.

    Source:
        Radford et al. 2021, arXiv:2103.00020, figure 3. Parity: `CLIPModel(return_loss=True)` of
        transformers.
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str = "clip_loss",
        **kwargs: Any,
    ):
        super().__init__(name=name, reduction=reduction, **kwargs)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Any:
        """Returns the loss of each pair: (B,), (B, B) -> (B,)."""
        logits, own = _pairs(self, y_pred)
        absent = (1.0 - y_true) * ABSENT
        images = ops.logsumexp(logits + absent, axis=1)
        texts = ops.logsumexp(logits + ops.expand_dims(absent, 1), axis=0)
        return (images + texts) / 2 - ops.sum(logits * own, axis=1)


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPLoss(PairLoss):
    """Binary cross-entropy of every pair of an image and a text, summed over the texts.

    The batch is the whole one on JAX, also over a mesh. On torch and TensorFlow each device
    compares its own rows.

    Args:
        reduction: as of `keras.losses.Loss`.
        name: name of the loss.
        **kwargs: of `keras.losses.Loss`.

    Call:
        y_true: not read.
        y_pred: (B, B), the logits of each image with each text, as `ImageTextSimilarity` gives.
        sample_weight: (B,), weights of the images, or None; a pair that weighs nothing is not among
            the negatives of the others either.

        It gives a scalar; without reduction (B,).

    Raises:
        InputError: for logits that are not of as many images as texts.

    Source:
        Zhai et al. 2023, arXiv:2303.15343, algorithm 1. Parity: `SiglipModel(return_loss=True)` of
        transformers.
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str = "siglip_loss",
        **kwargs: Any,
    ):
        super().__init__(name=name, reduction=reduction, **kwargs)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Any:
        """Returns the loss of each image: (B,), (B, B) -> (B,)."""
        logits, own = _pairs(self, y_pred)
        losses = ops.softplus(logits * (1.0 - 2.0 * own))
        return ops.sum(losses * y_true, axis=1)


def _pairs(loss: PairLoss, logits: Tensor) -> tuple[Any, Any]:
    """Returns the logits, and a matrix with 1 for the pairs that belong together."""
    shape = tuple(logits.shape)
    if len(shape) != 2 or (None not in shape and shape[0] != shape[1]):
        raise InputError(
            f"{type(loss).__name__} got logits of shape {shape}; train on pairs of an image and a "
            "text, which give (batch, batch)"
        )
    return logits, ops.eye(ops.shape(logits)[0], dtype=logits.dtype)
