"""Self-distillation without labels: the loss of DINO, with its center and temperatures."""

from typing import Any

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor

CENTERINGS = ("mean", "sinkhorn_knopp")


@keras.saving.register_keras_serializable(package="kmodels")
class DINOLoss(keras.layers.Layer):
    """Cross-entropy of a teacher's and a student's distributions over views of the same image.

    The teacher's are centered and sharpened by a low temperature, so that neither one number nor
    none wins. The center is a moving average of what it gives; or Sinkhorn-Knopp's iterations give
    each number the same share of a batch, which holds in batches of some dozens of images too. That
    batch is the whole one on JAX, also over a mesh; on torch and TensorFlow each device shares out
    its own rows. It is a layer, since the center and the number of steps are state: put it among
    the models of a `kmodels.training.TrainStep`.

    Args:
        units: width K of what student and teacher give.
        student_temperature: the student's logits are divided by it.
        teacher_temperature: the teacher's logits likewise, after `warmup_steps`.
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
            if not value > 0:
                raise InputError(f"{name} is {value}; give a number above 0")
        if not 0 <= center_momentum <= 1:
            raise InputError(f"center_momentum is {center_momentum}; give 0 to 1")
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
        views, given = student.shape[1], teacher.shape[1]
        if views < 2 or views < given:
            raise InputError(
                f"the student has {views} views and the teacher {given}; give at least two, and "
                "those of the teacher first"
            )
        teacher = ops.stop_gradient(ops.cast(teacher, "float32"))
        wanted = self.probabilities(teacher)
        found = ops.log_softmax(ops.cast(student, "float32") / self.student_temperature, axis=-1)
        entropies = -ops.einsum("bgk,bvk->bgv", wanted, found)
        # A view is not compared with itself.
        different = 1.0 - ops.eye(given, views, dtype="float32")
        rows = ops.sum(entropies * different, axis=(1, 2)) / (given * (views - 1))
        if training:
            new = ops.mean(teacher, axis=(0, 1))
            self.center.assign(new + (self.center - new) * self.center_momentum)
            self.steps.assign(self.steps + 1)
        return rows

    def probabilities(self, teacher: Tensor) -> Any:
        """Returns the teacher's distributions, centered and sharpened: (..., K), float32.

        Sinkhorn-Knopp's are those of a batch: each depends on all that are given with it.
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
        """Returns by how much a collapse is seen, two scalars from 0 to 1.

        Args:
            teacher: (..., K), what the teacher gives for a batch.

        Returns:
            "entropy", the mean entropy of the distributions, and "marginal_entropy", that of their
            mean, as shares of log K. Where the first nears 1, the teacher says the same of all
            numbers; where the second nears 0, it says the same number of all images. Under
            Sinkhorn-Knopp the second is always near 1, and the first alone tells.
        """
        ops = keras.ops
        found = ops.reshape(self.probabilities(teacher), (-1, self.units))
        most = ops.log(float(self.units))

        def entropy(shares: Tensor) -> Any:
            return -ops.sum(shares * ops.log(shares + 1e-12), axis=-1) / most

        return {
            "entropy": ops.mean(entropy(found)),
            "marginal_entropy": entropy(ops.mean(found, axis=0)),
        }

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        names = ("units", "student_temperature", "teacher_temperature")
        names = (*names, "warmup_teacher_temperature", "warmup_steps", "center_momentum")
        names = (*names, "centering", "iterations")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
