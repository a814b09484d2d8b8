"""The loss by which embedders learn from pairs: each document against those of the whole batch."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.training.pair_loss import ABSENT, PairLoss


@keras.saving.register_keras_serializable(package="kmodels")
class ContrastiveLoss(PairLoss):
    """Cross-entropy of each query's own document among all documents of the batch.

    The logits are cosines times `scale`. Every query is compared with all documents of the batch,
    the hard negatives of other queries included. With `matryoshka_dims` the loss is the weighted
    sum of those of the first numbers of each vector, so that vectors may be cut later.

    The batch is the whole one on JAX, also over a mesh. On torch and TensorFlow each device
    compares its own rows, as in sentence-transformers.

    Args:
        scale: what cosines are multiplied by, the reciprocal of a temperature.
        matryoshka_dims: widths to which vectors are cut, each with a loss; None for whole vectors.
        matryoshka_weights: weights of these losses; 1 for each by default.
        reduction: as of `keras.losses.Loss`.
        name: name of the loss.
        **kwargs: of `keras.losses.Loss`.

    Call:
        y_true: not read.
        y_pred: (B, C, D), of each row the vectors of query, document and C - 2 hard negatives.
        sample_weight: (B,), weights of the rows, or None; a row that weighs nothing is not among
            the negatives of the others either.

        It gives a scalar; without reduction (B,).

    Raises:
        InputError: for a scale, widths or weights that are not above 0, vectors that are narrower
            than a width, or rows of a single vector.

    Source:
        Henderson et al. 2017 (arXiv:1705.00652, section 4.4), Kusupati et al. 2022
        (arXiv:2205.13147). Parity: sentence-transformers' `MultipleNegativesRankingLoss` and
        `MatryoshkaLoss`.
    """

    def __init__(
        self,
        scale: float = 20.0,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str = "contrastive_loss",
        **kwargs: Any,
    ):
        super().__init__(name=name, reduction=reduction, **kwargs)
        if not scale > 0:
            raise InputError(f"scale is {scale}; give a number above 0")
        dims = tuple(matryoshka_dims or ())
        for dim in dims:
            check_whole("matryoshka_dims", dim)
        weights = (1.0,) * len(dims) if matryoshka_weights is None else tuple(matryoshka_weights)
        if len(weights) != len(dims) or not all(weight > 0 for weight in weights):
            raise InputError(
                f"matryoshka_weights are {weights} for {len(dims)} widths; give one above 0 for "
                "each"
            )
        self.scale = scale
        self.matryoshka_dims = dims
        self.matryoshka_weights = weights

    def call(self, y_true: Tensor, y_pred: Tensor) -> Any:
        """Returns the loss of each row.

        Args:
            y_true: (B,), 0 for rows that are not there.
            y_pred: (B, C, D).
        """
        if len(y_pred.shape) != 3 or y_pred.shape[1] == 1:
            raise InputError(
                f"ContrastiveLoss got vectors of shape {tuple(y_pred.shape)}; train on pairs of "
                "anchor and positive, which give (batch, 2, width)"
            )
        if not self.matryoshka_dims:
            return self._of_vectors(y_true, y_pred)
        width, widest = y_pred.shape[-1], max(self.matryoshka_dims)
        if width is not None and widest > width:
            raise InputError(
                f"matryoshka_dims has {widest} and the vectors have {width} numbers; give widths "
                "up to that"
            )
        losses = [
            weight * self._of_vectors(y_true, y_pred[..., :dim])
            for dim, weight in zip(self.matryoshka_dims, self.matryoshka_weights, strict=True)
        ]
        return sum(losses[1:], losses[0])

    def _of_vectors(self, there: Tensor, vectors: Tensor) -> Any:
        ops, columns = keras.ops, vectors.shape[1]
        vectors = vectors * ops.rsqrt(
            ops.maximum(ops.sum(ops.square(vectors), axis=-1, keepdims=True), 1e-24)
        )
        queries, documents = vectors[:, 0], vectors[:, 1:]
        # (B, C - 1, B): every query's row of logits is the softmax' axis 0 and 1.
        logits = self.scale * ops.einsum("jcd,id->icj", documents, queries)
        absent = (1.0 - there) * ABSENT
        own = self.scale * ops.sum(queries * documents[:, 0], axis=-1)
        others = ops.reshape(logits + absent, (-1, (columns - 1) * ops.shape(vectors)[0]))
        # ABSENT is finite, and so is the loss of a row that weighs nothing.
        return ops.logsumexp(others, axis=-1) - own

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {
            **super().get_config(),
            "scale": self.scale,
            "matryoshka_dims": list(self.matryoshka_dims) or None,
            "matryoshka_weights": list(self.matryoshka_weights) or None,
        }
