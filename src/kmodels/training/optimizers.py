"""AdamW and SGD without decay of biases and norms, with a learning rate by depth."""

from typing import TYPE_CHECKING, Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.types import LearningRateLike, Tensor
from kmodels.training.param_groups import ParamGroupOptimizer


class OptimizersBackend(Protocol):
    """The optimizers of a backend that replaces Keras' own by faster ones."""

    @property
    def AdamW(self) -> type[keras.optimizers.AdamW]:
        """The base of `AdamW`."""
        ...

    @property
    def SGD(self) -> type[keras.optimizers.SGD]:
        """The base of `SGD`."""
        ...


_native = backend_module("kmodels.training.optimizers", OptimizersBackend, optional=True)
if TYPE_CHECKING or _native is None:
    _AdamW, _SGD = keras.optimizers.AdamW, keras.optimizers.SGD
else:
    _AdamW, _SGD = _native.AdamW, _native.SGD


class _InFloat32:
    """Replaces the step of Keras' AdamW, which rounds 0.999 to 1 in bfloat16 and moves nothing."""

    def update_step(
        self: Any, gradient: Any, variable: keras.Variable, learning_rate: Tensor
    ) -> None:
        """Moves narrow variables by steps in float32; slots and variable are rounded at the end."""
        kind = keras.backend.standardize_dtype(variable.dtype)
        if kind not in ("bfloat16", "float16"):
            super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]
            return
        ops = keras.ops
        count = ops.cast(self.iterations + 1, "float32")
        rate = ops.cast(learning_rate, "float32") * ops.sqrt(1 - self.beta_2**count)
        gradient = ops.cast(gradient, "float32")

        def moved(slot: keras.Variable, target: keras.Variable, beta: float) -> Any:
            old = ops.cast(slot, "float32")
            new = old + (target - old) * (1 - beta)
            self.assign(slot, ops.cast(new, kind))
            return new

        momentum, velocity, highest = keras_internals.adam_slots(self, variable)
        first = moved(momentum, gradient, self.beta_1)
        second = moved(velocity, ops.square(gradient), self.beta_2)
        if highest is not None:
            second = ops.maximum(ops.cast(highest, "float32"), second)
            self.assign(highest, ops.cast(second, kind))
        step = first * rate / (1 - self.beta_1**count) / (ops.sqrt(second) + self.epsilon)
        self.assign(variable, ops.cast(ops.cast(variable, "float32") - step, kind))


@keras.saving.register_keras_serializable(package="kmodels")
class AdamW(ParamGroupOptimizer, _InFloat32, _AdamW):
    """AdamW with decoupled decay (Loshchilov, Hutter 2019) of the matrices alone.

    Args:
        learning_rate: a float or a schedule.
        weight_decay: share of a weight that is subtracted per step, times the learning rate.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: added to the root of the second moment.
        name: first part of the variables' paths.
        **kwargs: `no_decay`, `layer_decay`, `clip_norm`, `accumulate`, `ema` and
            `skip_non_finite`, see `ParamGroupOptimizer`; others as in `keras.optimizers.AdamW`.

    Raises:
        InputError: for values out of range.
    """

    def __init__(
        self,
        learning_rate: LearningRateLike = 1e-3,
        weight_decay: float = 0.05,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        name: str = "adamw",
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            name=name,
            **kwargs,
        )


@keras.saving.register_keras_serializable(package="kmodels")
class SGD(ParamGroupOptimizer, _SGD):
    """Gradient descent as in `keras.optimizers.SGD`, with decay of the matrices alone.

    Args:
        learning_rate: a float or a schedule.
        momentum: share of the last step that is added to the next, 0 to 1.
        nesterov: looks ahead by the momentum (Sutskever et al. 2013).
        weight_decay: share of a weight that is subtracted per step, times the learning rate; or
            None.
        name: first part of the variables' paths.
        **kwargs: as in `AdamW`; others as in `keras.optimizers.SGD`.

    Raises:
        InputError: for values out of range.
    """

    def __init__(
        self,
        learning_rate: LearningRateLike = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        name: str = "sgd",
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            name=name,
            **kwargs,
        )
