"""Losses that Keras lacks: of pairs, of pixels, of self-distillation; and a warning of logits."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_number, check_whole, same_shape
from kmodels.core.types import Tensor
from kmodels.training.sparse_labels import check_classes, check_pixels, like

# As a logit, so far below all cosines that its share of a softmax is 0, and finite.
ABSENT = -1e9


class PairLoss(Checked, keras.losses.Loss):
    """A loss that gets a mask of the rows of a batch that count.

    Call:
        y_true: not read; `call` gets (B,) in its place, 0 for rows that weigh nothing.
        y_pred: the model's outputs for the pairs.
        sample_weight: (B,), weights of the rows, or None; a row that weighs nothing is not among
            the negatives of the others either.
    """

    def __call__(
        self, y_true: Tensor | None, y_pred: Tensor, sample_weight: Tensor | None = None
    ) -> Any:
        """Returns the loss; Keras' own `__call__` does not pass the weights on to `call`."""
        there = ops.ones(ops.shape(y_pred)[:1], dtype=self.dtype)
        if sample_weight is not None:
            sample_weight = there * like(sample_weight, there, self.dtype)
            there = ops.cast(ops.greater(sample_weight, 0.0), self.dtype)
        return super().__call__(there, y_pred, sample_weight)


@keras.saving.register_keras_serializable(package="kmodels")
class ContrastiveLoss(PairLoss):
    """Cross-entropy of each query's own document among all documents of the batch.

    The logits are cosines times `scale`. Every query is compared with all documents of the batch,
    the hard negatives of other queries included. With `matryoshka_dims` the loss is the weighted
    sum of those of the first numbers of each vector, so that vectors may be cut later.

    The batch is the whole one on JAX, also over a mesh. On torch and TensorFlow each device
    compares its own rows, as in sentence-transformers.

    Args:
        scale: factor of the cosines, the reciprocal of a temperature.
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
        check_number("scale", scale, above=0)
        dims = () if matryoshka_dims is None else tuple(matryoshka_dims)
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


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPLoss(PairLoss):
    """Cross-entropy of each image's text among all texts, and the same from texts to images.

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


@keras.saving.register_keras_serializable(package="kmodels")
class MixedBinaryCrossentropy(keras.losses.BinaryCrossentropy):
    """Binary cross-entropy from logits in which each class of a mixed image counts fully.

    Call:
        y_true: (B, classes), one-hot or mixed; a share above 0 becomes 1.
        y_pred: (B, classes), logits.
        sample_weight: (B,), weights of the rows, or None.

        It gives a scalar, the mean over images and classes.

    Source:
        Touvron et al. 2022 (DeiT III), section 3; Wightman et al. 2021, section 2.
    """

    def __init__(self, name: str = "mixed_binary_crossentropy", **kwargs: Any):
        super().__init__(**{"from_logits": True, "name": name, **kwargs})

    def call(self, y_true: Tensor, y_pred: Tensor) -> Any:
        """Returns the losses (B,)."""
        return super().call(ops.cast(ops.greater(y_true, 0), y_pred.dtype), y_pred)


@keras.saving.register_keras_serializable(package="kmodels")
class PixelCrossentropy(Checked, keras.losses.Loss):
    """Cross-entropy of whole-number masks from logits; pixels of `ignore_class` do not count.

    The mean is over the pixels that have a label, as torch's `cross_entropy(ignore_index=...)`
    takes it: an image of which half is labelled does not learn half as much. Of a batch without any
    it is 0. Keras' `SparseCategoricalCrossentropy(ignore_class=...)` gives the same number, on
    JAX through one-hot labels: an array as large as the logits, which are the largest of a step.

    Over several devices the mean is that of the whole batch on JAX; on torch and TensorFlow each
    device averages over its rows' pixels.

    Args:
        ignore_class: label of pixels that are ignored; None if all count.
        reduction: as of `keras.losses.Loss`; None gives each pixel's loss.
        name: name of the loss.
        count_ignored: divides by the number of all pixels, as the code of DINOv3 and
            mmsegmentation do: an image of which half is labeled then counts half.
        **kwargs: of `keras.losses.Loss`.

    Call:
        y_true: whole numbers (B, H, W), or (B, H, W, 1). A number that is neither a class nor
            `ignore_class` makes the loss NaN; `kmodels.fit` and tasks refuse it.
        y_pred: logits (B, H, W, classes).
        sample_weight: (B,) or (B, H, W), or None. It scales losses, and the mean is divided by the
            number of labeled pixels all the same, as Keras does.

        It gives a scalar; without reduction (B, H, W).
    """

    def __init__(
        self,
        ignore_class: int | None = 255,
        reduction: str | None = "sum_over_batch_size",
        name: str = "pixel_crossentropy",
        count_ignored: bool = False,
        **kwargs: Any,
    ):
        super().__init__(name=name, reduction=reduction, **kwargs)
        self.ignore_class = ignore_class
        self.count_ignored = count_ignored

    def __call__(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor | None = None) -> Any:
        """Returns the loss; Keras' own call would divide by all pixels."""
        ops = keras.ops
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        losses = self.call(y_true, y_pred)
        if sample_weight is not None:
            sample_weight = like(sample_weight, losses, losses.dtype)
            losses = losses * sample_weight
        if self.reduction is None or self.reduction == "none":
            return losses
        total = ops.sum(losses)
        if self.reduction == "sum":
            return total
        # By Keras' rule weights are no part of it: rows that fill a batch up count as rows.
        if self.count_ignored:
            return ops.mean(losses)
        counted = ops.cast(self._labelled(self._masks(y_true, y_pred)), losses.dtype)
        if self.reduction == "mean_with_sample_weight" and sample_weight is not None:
            return ops.divide_no_nan(total, ops.sum(counted * sample_weight))
        return total / ops.maximum(ops.sum(counted), 1.0)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Any:
        """Returns the loss of each pixel, (B, H, W): 0 without a label, NaN if no class has it."""
        ops = keras.ops
        masks, logits = self._masks(y_true, y_pred), ops.cast(y_pred, self.dtype)
        # Of other numbers torch would look up the logits of other pixels.
        known = (masks >= 0) & (masks < logits.shape[-1])
        there = self._labelled(masks)
        labels = ops.where(there & known, masks, 0)
        own = ops.take_along_axis(logits, ops.expand_dims(labels, -1), axis=-1)
        losses = ops.logsumexp(logits, axis=-1) - ops.squeeze(own, -1)
        return ops.where(there, ops.where(known, losses, float("nan")), 0.0)

    def check_labels(self, y: Any, model: keras.Model) -> None:
        """Raises `InputError` for arrays of labels that the output of a plain model does not have.

        Args:
            y: labels of a batch.
            model: a model of Keras that is trained with this loss.
        """
        outputs = getattr(model, "outputs", None) or ()
        if len(outputs) == 1 and isinstance(y, np.ndarray) and y.dtype.kind in "iuf":
            ignored = () if self.ignore_class is None else (self.ignore_class,)
            check_classes(y, outputs[0].shape[-1], ignored)

    def _labelled(self, masks: Tensor) -> Any:
        if self.ignore_class is None:
            return keras.ops.ones_like(masks, dtype="bool")
        return keras.ops.not_equal(masks, self.ignore_class)

    @staticmethod
    def _masks(y_true: Tensor, y_pred: Tensor) -> Any:
        check_pixels(y_true, y_pred)
        masks = keras.ops.cast(y_true, "int32")
        return keras.ops.squeeze(masks, -1) if len(masks.shape) == len(y_pred.shape) else masks

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        own = {"ignore_class": self.ignore_class, "count_ignored": self.count_ignored}
        return {**super().get_config(), **own}


CENTERINGS = ("mean", "sinkhorn_knopp")


@keras.saving.register_keras_serializable(package="kmodels")
class DINOLoss(Checked, keras.layers.Layer):
    """Cross-entropy of a teacher's and a student's distributions over views of the same image.

    The teacher's are centered and sharpened by a low temperature, so that neither one number nor
    none wins. The center is a moving average of what it gives; or Sinkhorn-Knopp's iterations give
    each number the same share of a batch, which holds in batches of some dozens of images too. That
    batch is the whole one on JAX, also over a mesh; on torch and TensorFlow each device shares out
    its own rows. It is a layer, since the center and the number of steps are state: put it among
    the models of a `kmodels.training.TrainStep`.

    Args:
        units: number of prototypes K, the output size of student and teacher.
        student_temperature: the student's logits are divided by it.
        teacher_temperature: the teacher's logits are divided by it, after `warmup_steps`.
        warmup_teacher_temperature: the same at the first step; it changes linearly.
        warmup_steps: number of steps until then; 0 for the last temperature at once.
        center_momentum: share of the old center that stays at each step.
        centering: "mean" for the moving average, or "sinkhorn_knopp".
        iterations: of Sinkhorn-Knopp.
        **kwargs: of `keras.layers.Layer`.

    Call:
        student (B, V, K), teacher (B, G, K), of which the first G views are the same -> (B,),
        float32: the mean over all pairs of different views. In training center and steps move.

    Weights:
        center (K,), steps (), neither of which is trained.

    Raises:
        InputError: for temperatures that are not above 0, a momentum out of range, another
            centering, or a single view, which no other can be compared with.

    Source:
        Caron et al. 2021 (arXiv:2104.14294), equations 1 to 4 and appendix D; Sinkhorn-Knopp as in
        Caron et al. 2020 (arXiv:2006.09882), equation 5, and Oquab et al. 2024 (arXiv:2304.07193),
        section 4.
    """

    def __init__(
        self,
        units: int,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.07,
        warmup_teacher_temperature: float = 0.04,
        warmup_steps: int = 0,
        center_momentum: float = 0.9,
        centering: str = "mean",
        iterations: int = 3,
        **kwargs: Any,
    ):
        super().__init__(**{"dtype": "float32", **kwargs})
        check_whole("units", units)
        check_whole("warmup_steps", warmup_steps, 0)
        check_whole("iterations", iterations)
        if centering not in CENTERINGS:
            raise InputError(f"centering is {centering!r}; give {' or '.join(CENTERINGS)}")
        for name, value in (
            ("student_temperature", student_temperature),
            ("teacher_temperature", teacher_temperature),
            ("warmup_teacher_temperature", warmup_teacher_temperature),
        ):
            check_number(name, value, above=0)
        check_number("center_momentum", center_momentum, least=0, most=1)
        self.units = units
        self.student_temperature = student_temperature
        self.teacher_temperature = teacher_temperature
        self.warmup_teacher_temperature = warmup_teacher_temperature
        self.warmup_steps = warmup_steps
        self.center_momentum = center_momentum
        self.centering = centering
        self.iterations = iterations
        self.center = self.add_weight(
            shape=(units,), initializer="zeros", trainable=False, name="center"
        )
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32", name="steps"
        )
        self.built = True

    def call(self, student: Tensor, teacher: Tensor, training: bool = False) -> Any:
        """(B, V, K), (B, G, K) -> (B,)."""
        ops = keras.ops
        shapes = tuple(student.shape), tuple(teacher.shape)
        if any(not same_shape(shape, (None, None, self.units)) for shape in shapes):
            raise InputError(
                f"student and teacher have the shapes {shapes[0]} and {shapes[1]}; give (batch, "
                f"views, {self.units})"
            )
        views, global_views = student.shape[1], teacher.shape[1]
        if views < 2 or views < global_views:
            raise InputError(
                f"the student has {views} views and the teacher {global_views}; give at least "
                "two, and those of the teacher first"
            )
        teacher = ops.stop_gradient(ops.cast(teacher, "float32"))
        wanted = self.probabilities(teacher)
        log_shares = ops.log_softmax(
            ops.cast(student, "float32") / self.student_temperature, axis=-1
        )
        entropies = -ops.einsum("bgk,bvk->bgv", wanted, log_shares)
        # A view is not compared with itself.
        different = 1.0 - ops.eye(global_views, views, dtype="float32")
        rows = ops.sum(entropies * different, axis=(1, 2)) / (global_views * (views - 1))
        if training:
            new = ops.mean(teacher, axis=(0, 1))
            self.center.assign(new + (self.center - new) * self.center_momentum)
            self.steps.assign(self.steps + 1)
        return rows

    def probabilities(self, teacher: Tensor) -> Any:
        """Returns the teacher's distributions, centered and sharpened: (..., K), float32.

        With Sinkhorn-Knopp each distribution depends on the whole batch.
        """
        ops = keras.ops
        logits = ops.cast(teacher, "float32")
        if self.centering == "mean":
            logits = logits - ops.convert_to_tensor(self.center)
            return ops.softmax(logits / self.temperature(), axis=-1)
        # In logarithms, where no number's share of a batch becomes zero.
        shares = logits / self.temperature()
        every = tuple(range(len(shares.shape) - 1))
        for _ in range(self.iterations):
            shares = shares - ops.logsumexp(shares, axis=every, keepdims=True)
            shares = shares - ops.logsumexp(shares, axis=-1, keepdims=True)
        return ops.exp(shares)

    def temperature(self) -> Any:
        """Returns the teacher's temperature at the step that comes, a float32 scalar."""
        first, last = self.warmup_teacher_temperature, self.teacher_temperature
        if not self.warmup_steps:
            return keras.ops.convert_to_tensor(last, dtype="float32")
        done = keras.ops.cast(keras.ops.convert_to_tensor(self.steps), "float32")
        return first + (last - first) * keras.ops.minimum(done / self.warmup_steps, 1.0)

    def entropies(self, teacher: Tensor) -> dict[str, Any]:
        """Returns two scalars from 0 to 1 that show a collapse.

        Args:
            teacher: (..., K), the teacher's logits of a batch.

        Returns:
            "entropy", the mean entropy of the distributions, and "marginal_entropy", that of their
            mean, as shares of log K. If the first nears 1, all prototypes are equally likely; if
            the second nears 0, all images have the same one. Under Sinkhorn-Knopp the second is
            always near 1, and only the first is informative.
        """
        ops = keras.ops
        distributions = ops.reshape(self.probabilities(teacher), (-1, self.units))
        most = ops.log(float(self.units))

        def entropy(shares: Tensor) -> Any:
            return -ops.sum(shares * ops.log(shares + 1e-12), axis=-1) / most

        return {
            "entropy": ops.mean(entropy(distributions)),
            "marginal_entropy": entropy(ops.mean(distributions, axis=0)),
        }

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        names = ("units", "student_temperature", "teacher_temperature")
        names = (*names, "warmup_teacher_temperature", "warmup_steps", "center_momentum")
        names = (*names, "centering", "iterations")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


_OF_PROBABILITIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.BinaryFocalCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.CategoricalFocalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)
# The functions of the same losses, which a name such as "binary_crossentropy" stands for.
_BY_FUNCTION = {
    getattr(keras.losses, function): of.__name__
    for function, of in zip(
        (
            "binary_crossentropy",
            "binary_focal_crossentropy",
            "categorical_crossentropy",
            "categorical_focal_crossentropy",
            "sparse_categorical_crossentropy",
        ),
        _OF_PROBABILITIES,
        strict=True,
    )
}


def warn_of_logits(model: keras.Model, loss: object) -> None:
    """Warns if a loss would take logits for probabilities: it falls, but little is learnt.

    Args:
        model: a task that gives logits.
        loss: as `compile` takes it.
    """
    for part in keras.tree.flatten(loss):
        if (name := _of_probabilities(part)) is not None:
            shown = repr(part) if isinstance(part, str) else name
            warnings.warn(
                f"{type(model).__name__} gives logits, and the loss {shown} takes probabilities; "
                f"give keras.losses.{name}(from_logits=True), or make the model with an activation",
                stacklevel=4,
            )


def _of_probabilities(loss: Any) -> str | None:
    """Returns the class of a loss, if it takes probabilities for granted."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # Keras says so, too
            return None
    if isinstance(loss, _OF_PROBABILITIES):
        return None if loss.get_config().get("from_logits") else type(loss).__name__
    return _BY_FUNCTION.get(loss) if callable(loss) else None


class InsideStep:
    """Switches a model's output inside a step to the input of the model's own loss.

    It is a separate object, which Keras does not track.

    Attributes:
        chosen: True if `compile` chose the model's own loss.
    """

    def __init__(self, chosen: bool = False) -> None:
        # Replicas on TensorFlow are threads, which enter and leave a step in turns.
        self._inside = 0
        self.chosen = chosen

    @contextmanager
    def inside_step(self) -> Iterator[None]:
        """Switches inside the block, if the model's own loss was chosen."""
        self._inside += self.chosen
        try:
            yield
        finally:
            self._inside -= self.chosen

    @property
    def active(self) -> bool:
        """True inside a step with the model's own loss."""
        return self._inside > 0


class StepsWithOwnLoss(keras.Model if TYPE_CHECKING else object):
    """First base of a task with a loss of its own, whose steps run inside its `InsideStep`."""

    _step: InsideStep

    def train_step(self, *args: object) -> Any:
        """Runs one step of `fit`."""
        with self._step.inside_step():
            return super().train_step(*args)

    def test_step(self, *args: object) -> Any:
        """Runs one step of `evaluate`."""
        with self._step.inside_step():
            return super().test_step(*args)
