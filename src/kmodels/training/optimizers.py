"""Optimizers and their learning rates.

All optimizers decay matrices alone, and have a learning rate by depth, moving averages and skipped
steps from `ParamGroupOptimizer`. `WarmupSchedule` is the learning rate by step.
"""

import logging
import math
import re
from collections import deque
from collections.abc import Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.arguments import Checked
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError, check_choice, check_number, check_whole
from kmodels.core.types import LearningRateLike, Tensor
from kmodels.training.normalization import UNIT, batch_weight, nonzero

log = logging.getLogger("kmodels")
# Biases, norm and layer scales have one axis; these have more, and are not decayed either.
NO_DECAY = (r"(^|/)tokens/", r"(^|/)(class_token|position_embedding)$")
_BLOCK = re.compile(r"(?:^|/)block_(\d+)/")
_PROJECTION = re.compile(r"(query|key|value)/kernel$")
_FINAL_NORM = re.compile(r"(?:^|/)final_norm/")
# By Keras' names, the arguments that stand for others of its optimizers.
_INSTEAD = {
    **{"global_clipnorm": "clip_norm", "gradient_accumulation_steps": "accumulate"},
    **{"use_ema": "ema", "ema_momentum": "ema"},
}
SCHEDULES = ("cosine", "linear", "constant", "one_cycle")


def depth_multipliers(paths: Sequence[str], rate: float) -> tuple[float, ...]:
    """Layer-wise decay of the learning rate (Clark et al. 2020; Bao et al. 2021).

    Args:
        paths: variable paths in the order of computation. A path before the first `block_<i>`
            has depth 0, block i depth i + 1, `final_norm` that of the last block, and later
            variables one more. The largest depth learns at the full rate.
        rate: factor from one depth to the one below, such as 0.75.

    Returns:
        A factor per path.

    Source:
        timm 1.0, `timm.optim.param_groups_layer_decay`.
    """
    blocks = [_BLOCK.search(path) for path in paths]
    last = max((int(match.group(1)) + 1 for match in blocks if match), default=0)
    depths: list[int] = []
    for path, match in zip(paths, blocks, strict=True):
        if match:
            depths.append(int(match.group(1)) + 1)
        elif any(depths):
            depths.append(last if _FINAL_NORM.search(path) else last + 1)
        else:
            depths.append(0)
    top = max(depths, default=0)
    return tuple(rate ** (top - depth) for depth in depths)


class ParamGroupOptimizer(Checked, keras_internals.OwnSteps):
    """First base of an optimizer whose second is Keras' own, or a backend's body of it.

    Weights with one axis (biases, norms, layer scales) and those whose path matches `no_decay`
    (tokens and position embeddings) are not decayed. Slots are named after the variables, so a
    saved state fits each backend.

    Args:
        learning_rate: a float or a schedule.
        weight_decay: share of a weight that is subtracted per step, times the learning rate.
        no_decay: regular expressions; a variable whose path one of them finds is not decayed.
        decay_vectors: also decays weights with one axis, as torch's AdamW without groups does.
        layer_decay: factor of the learning rate from each block to the one below, or None.
        clip_norm: largest global norm of the gradients, or None.
        accumulate: micro-batches whose gradients are averaged before one update; by their learnt
            tokens if the loss is divided by those, see `CausalLM.compile`.
        ema: momentum of the moving average of the weights by update, or None. `swap_average`
            and `finalize_average` put it into the model; `fit` alone never does.
        skip_non_finite: skips a step if a gradient is not finite, and counts such
            steps in the variable `skipped`.
        **kwargs: of Keras' optimizer.

    Raises:
        InputError: for values out of range.
    """

    checks_methods = False  # they are parts of a step

    def __init__(
        self,
        *,
        learning_rate: LearningRateLike,
        weight_decay: float | None,
        no_decay: Sequence[str] = NO_DECAY,
        decay_vectors: bool = False,
        layer_decay: float | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        skip_non_finite: bool = False,
        **kwargs: Any,
    ):
        for name in kwargs.keys() & _INSTEAD.keys():
            raise InputError(f"{type(self).__name__} takes no {name}; give {_INSTEAD[name]}")
        _check(learning_rate, weight_decay, layer_decay, clip_norm, accumulate, ema)
        _check_moments(**kwargs)
        momentum = {} if ema is None else {"use_ema": True, "ema_momentum": ema}
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            global_clipnorm=clip_norm,
            gradient_accumulation_steps=accumulate if accumulate > 1 else None,
            **momentum,
            **kwargs,
        )
        keras_internals.average_by_update(self)
        self.no_decay = _patterns("no_decay", no_decay)
        self.decay_vectors = decay_vectors
        self.layer_decay = layer_decay
        self.accumulate = accumulate
        self.ema = ema
        self.skip_non_finite = skip_non_finite
        self.skipped: Any = None
        self.total_weight: Any = None
        self.swapped = False
        self._weighs = self._checked = False

    def build(self, variables: list[Any]) -> None:
        """Makes the slots, and settles decay and learning rate of each variable."""
        if self.built:
            return
        super().build(variables)
        if self.skip_non_finite:
            self.skipped = self.add_variable((), dtype="int", name="skipped")
        self.total_weight = None
        self.weigh(self._weighs)
        pattern = re.compile("|".join(self.no_decay) or r"(?!)")
        self._decays = tuple(
            (self.decay_vectors or len(v.shape) > 1)
            and not pattern.search(getattr(v, "path", v.name))
            and self.may_decay(v)
            for v in variables
        )
        self._multipliers = (1.0,) * len(variables)
        if self.layer_decay is not None:
            paths = [getattr(v, "path", v.name) for v in variables]
            self._multipliers = depth_multipliers(paths, self.layer_decay)

    def weigh(self, active: bool) -> None:
        """Sets if an update weighs its batches; it then has the variable `total_weight`.

        A step that sets `batch_weight` divides its loss by that weight. The update undoes this:
        its gradient is that of the sum of the losses of its batches, divided by the sum of their
        weights; zero if no batch has a weight.
        """
        self._weighs = active
        has = self.total_weight is not None
        if active and self.accumulate > 1 and self.built and not has:
            self.total_weight = self.add_variable((), name="total_weight")
        elif has and not active:
            keras_internals.remove_variable(self, self.total_weight)
            self.total_weight = None

    def _unit_weight(self) -> Any:
        """Returns the weight of the batch of this step; None if the update does not weigh it."""
        weight = batch_weight()
        return None if weight is None or self.total_weight is None else weight.total / UNIT

    def scale_loss(self, loss: Tensor) -> Any:
        """Multiplies the mean loss of a batch by its weight, if the update divides by it."""
        if (weight := self._unit_weight()) is not None:
            loss = keras.ops.multiply(loss, keras.ops.cast(weight, loss.dtype))
        return super().scale_loss(loss)

    def before_clipping(self, grads: list[Any]) -> list[Any]:
        """Returns the mean over the weights of the batches, from that over their number."""
        if self._unit_weight() is None:
            return grads
        factor = self.accumulate / nonzero(self.total_weight.value)
        return [gradient * keras.ops.cast(factor, gradient.dtype) for gradient in grads]

    def clip_all(self, grads: list[Any]) -> Any:
        """Keras' clipping, of the mean over the weights."""
        return super().clip_all(self.before_clipping(grads))

    def decay_all(self, variables: Sequence[keras.Variable]) -> None:
        """Does nothing: the step decays."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Makes one step, unless it is to be skipped."""
        if not self.skip_non_finite or self._checked:
            if (weight := self._unit_weight()) is not None:
                first = keras_internals.batches_seen(self) % self.accumulate == 0
                total = self.total_weight.value
                total = keras.ops.where(first, keras.ops.zeros_like(total), total)
                self.total_weight.assign(total + weight)
            return super().apply(grads, trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)

        def step() -> None:
            self._checked = True
            try:
                self.apply(grads, trainable_variables)
            finally:
                self._checked = False

        def skip() -> None:
            self.skipped.assign_add(1)

        keras.ops.cond(_all_finite(grads), step, skip)
        return self.iterations

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Any,
        trainable_variables: list[keras.Variable],
    ) -> tuple[Any, Any]:
        """Returns the same for JAX, whose branches may not write to variables."""
        if not self.skip_non_finite:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        update = super().stateless_apply

        def step() -> tuple[list[Any], list[Any]]:
            self._checked = True
            try:
                weights, own = update(optimizer_variables, grads, trainable_variables)
            finally:
                self._checked = False
            return list(weights), list(own)

        def skip() -> tuple[list[Any], list[Any]]:
            own = [
                value + 1 if variable is self.skipped else value
                for variable, value in zip(self.variables, optimizer_variables, strict=True)
            ]
            return list(trainable_variables), own

        return keras.ops.cond(_all_finite(grads), step, skip)

    def update_step(self, gradient: Any, variable: keras.Variable, learning_rate: Tensor) -> None:
        """Decays, then moves one variable; torch has a step over all of them instead."""
        ops = keras.ops
        index = keras_internals.variable_index(self, variable)
        rate = ops.cast(learning_rate, "float32") * self._multipliers[index]
        if self.weight_decay and self._decays[index]:
            share = ops.cast(rate * self.weight_decay, variable.dtype)
            self.assign_sub(variable, ops.multiply(variable, share))
        super().update_step(gradient, variable, rate)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Does nothing: a run that is interrupted and resumed calls `fit` more than once."""

    def swap_average(self) -> None:
        """Exchanges the model's weights with their moving average; call it again to undo.

        `swapped` is True while the average is in the model.
        """
        self.swapped = not self.swapped
        for variable, average in self._averages():
            weights = keras.ops.copy(variable.value)
            variable.assign(keras.ops.copy(average.value))
            average.assign(weights)

    def finalize_average(self) -> None:
        """Puts the moving average into the model, at the end of a run."""
        for variable, average in self._averages():
            variable.assign(keras.ops.copy(average.value))

    def _averages(self) -> list[tuple[Any, Any]]:
        if self.ema is None or not self.built:
            return []
        return keras_internals.moving_averages(self)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, plain values."""
        config = super().get_config()
        clip_norm = config.pop("global_clipnorm")
        for name in ("use_ema", "ema_momentum", "gradient_accumulation_steps"):
            config.pop(name)
        return {
            **config,
            "clip_norm": clip_norm,
            "no_decay": list(self.no_decay),
            "decay_vectors": self.decay_vectors,
            "layer_decay": self.layer_decay,
            "accumulate": self.accumulate,
            "ema": self.ema,
            "skip_non_finite": self.skip_non_finite,
        }


def weigh_batches(optimizer: Any, active: bool) -> None:
    """Makes an optimizer that accumulates weigh the batches of an update by `batch_weight`.

    Args:
        optimizer: an optimizer, one around another, or None.
        active: False has it average the batches, as Keras does.

    Raises:
        InputError: for an optimizer of Keras that accumulates, which can only average them.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, ParamGroupOptimizer):
        inner.weigh(active)
        if inner is not optimizer:
            # Keras' method multiplies by the scale alone.
            optimizer.scale_loss = MethodType(_scale_both, optimizer)
    elif active and (steps := getattr(inner, "gradient_accumulation_steps", None)):
        raise InputError(
            f"{type(inner).__name__} with gradient_accumulation_steps={steps} averages batches "
            "that have different numbers of learnt tokens; use kmodels.training.AdamW or SGD with "
            f"accumulate={steps}, or compile with loss_normalization='positions'"
        )


def _scale_both(optimizer: Any, loss: Tensor) -> Any:
    return type(optimizer).scale_loss(optimizer, optimizer.inner_optimizer.scale_loss(loss))


def _all_finite(gradients: Sequence[Any]) -> Any:
    ops = keras.ops
    flags = [ops.all(ops.isfinite(gradient)) for gradient in gradients if gradient is not None]
    return ops.all(ops.stack(flags))


def _check(
    learning_rate: LearningRateLike,
    weight_decay: float | None,
    layer_decay: float | None,
    clip_norm: float | None,
    accumulate: int,
    ema: float | None,
) -> None:
    if isinstance(learning_rate, int | float):
        check_number("learning rate", learning_rate, above=0)
    if weight_decay is not None:
        check_number("weight decay", weight_decay, least=0)
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise InputError(f"layer decay is {layer_decay}; give a factor above 0 and at most 1")
    if clip_norm is not None:
        check_number("clip norm", clip_norm, above=0)
    check_whole("accumulate", accumulate)
    if ema is not None and not 0 < ema < 1:
        raise InputError(f"ema is {ema}; give a momentum between 0 and 1, such as 0.999")


def _check_moments(
    beta_1: float = 0.0, beta_2: float = 0.0, epsilon: float = 0.0, **_: object
) -> None:
    for name, value in (("beta_1", beta_1), ("beta_2", beta_2)):
        check_number(name, value, least=0, below=1)
    check_number("epsilon", epsilon, least=0)


def _patterns(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns regular expressions, checked."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"{name} has {pattern!r}, which is not a regular expression: {error}"
            ) from None
    return tuple(patterns)


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
        corrected_epsilon: adds epsilon to the root after its correction for the first steps, as
            torch and optax do; Keras adds it before, which matters if gradients are near it.
        name: first part of the variables' paths.
        **kwargs: `no_decay`, `decay_vectors`, `layer_decay`, `clip_norm`, `accumulate`, `ema` and
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
        corrected_epsilon: bool = False,
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
        self.corrected_epsilon = corrected_epsilon

    @property
    def epsilon(self) -> Any:
        """The number that Keras' step adds to the uncorrected root: epsilon times its correction.

        A float, or with `corrected_epsilon` a float32 scalar.
        """
        if not self.corrected_epsilon:
            return self.plain_epsilon
        count = keras.ops.cast(self.iterations + 1, "float32")
        return self.plain_epsilon * keras.ops.sqrt(1 - self.beta_2**count)

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self.plain_epsilon = value

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, plain values."""
        own = {"epsilon": self.plain_epsilon, "corrected_epsilon": self.corrected_epsilon}
        return {**super().get_config(), **own}


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


class _MomentumOfGradients:
    """Replaces the step of Keras' SGD, whose momentum is that of the steps."""

    def update_step(
        self: Any, gradient: Any, variable: keras.Variable, learning_rate: Tensor
    ) -> None:
        """Moves a variable by its momentum times the rate."""
        ops = keras.ops
        momentum = self.momentums[keras_internals.variable_index(self, variable)]
        total = ops.cast(momentum, "float32") * self.momentum + ops.cast(gradient, "float32")
        self.assign(momentum, ops.cast(total, momentum.dtype))
        self.assign_sub(variable, ops.cast(learning_rate * total, variable.dtype))


@keras.saving.register_keras_serializable(package="kmodels")
class MomentumSGD(ParamGroupOptimizer, _MomentumOfGradients, keras.optimizers.SGD):
    """Gradient descent by the momentum of gradients, as in torch and optax.

    It differs from `SGD` if the learning rate changes: that has the momentum of its steps.

    Args:
        learning_rate: a float or a schedule.
        momentum: share of the sum of past gradients that is added to a gradient, above 0.
        weight_decay: share of a weight that is subtracted per step, times the learning rate; or
            None.
        name: first part of the variables' paths.
        **kwargs: as in `AdamW`; others as in `keras.optimizers.SGD`, without `nesterov`.

    Raises:
        InputError: for values out of range.
    """

    def __init__(
        self,
        learning_rate: LearningRateLike = 0.01,
        momentum: float = 0.9,
        weight_decay: float | None = None,
        name: str = "momentum_sgd",
        **kwargs: Any,
    ):
        if not 0 < momentum <= 1 or kwargs.get("nesterov"):
            raise InputError(f"momentum is {momentum}; give a share above 0, without nesterov")
        fixed = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        super().__init__(momentum=momentum, name=name, **fixed, **kwargs)


class WholeMatrices(ParamGroupOptimizer):
    """An optimizer whose steps depend on whole matrices, so that fsdp cannot shard them.

    The query, key and value kernels of an attention count as one matrix, as in timm's models.
    """

    whole_matrices = True

    def __init__(self, **kwargs: Any):
        if kwargs.get("amsgrad"):
            raise InputError(f"{type(self).__name__} has no amsgrad; leave it out, or use AdamW")
        super().__init__(**kwargs)

    def build(self, variables: list[Any]) -> None:
        """Makes the slots, and finds the matrices and the kernels that count as one."""
        if self.built:
            return
        super().build(variables)
        paths = [getattr(v, "path", v.name) for v in variables]
        self._whole = [
            self.is_matrix(path, v, decays)
            for path, v, decays in zip(paths, variables, self._decays, strict=True)
        ]
        owners = [
            whole and _PROJECTION.sub("", path)
            for path, whole in zip(paths, self._whole, strict=True)
        ]
        self._parts = [owners.count(owner) for owner in owners]
        # Keras would count the variables in a list of the optimizer among its slots.
        self._waiting: deque[Any] = deque()

    def is_matrix(self, path: str, variable: Any, decays: bool) -> bool:
        """Returns True if the step of a variable is that of a matrix."""
        raise NotImplementedError

    def complete(self, index: int, part: tuple[Any, ...]) -> list[Any]:
        """Returns the parts of a matrix with its last one, before that an empty list."""
        self._waiting.append(part)
        if len(self._waiting) < self._parts[index]:
            return []
        parts = list(self._waiting)
        self._waiting.clear()
        return parts

    def moment(self, slot: Any, target: Tensor, beta: float) -> Any:
        """Moves a slot to a target by 1 - beta, and returns it in float32."""
        old = keras.ops.cast(slot, "float32")
        new = old + (target - old) * (1 - beta)
        self.assign(slot, keras.ops.cast(new, slot.dtype))
        return new

    def adam(self: Any, gradient: Tensor, variable: keras.Variable) -> Any:
        """Returns Adam's step of a variable in float32, and moves its slots."""
        count = keras.ops.cast(self.iterations + 1, "float32")
        momentum, velocity, _ = keras_internals.adam_slots(self, variable)
        first = self.moment(momentum, gradient, self.beta_1) / (1 - self.beta_1**count)
        second = self.moment(velocity, keras.ops.square(gradient), self.beta_2)
        root = keras.ops.sqrt(second / (1 - self.beta_2**count))
        return first / (root + self.epsilon)


@keras.saving.register_keras_serializable(package="kmodels")
class Lamb(WholeMatrices, keras.optimizers.Adam):
    """LAMB (You et al. 2020): Adam's step of a matrix has the length of the matrix.

    The decay of a matrix is part of its step. A weight that is not decayed takes Adam's step. The
    query, key and value kernels of an attention count as one matrix, as in timm's models.

    Args:
        learning_rate: a float or a schedule.
        weight_decay: share of a matrix that is added to its step.
        epsilon: added to the root of the corrected second moment.
        name: first part of the variables' paths.
        **kwargs: as in `AdamW`; others as in `keras.optimizers.Adam`, without `amsgrad`.

    Raises:
        InputError: for values out of range.

    Source:
        timm 1.0, `timm.optim.Lamb`, as apex's `FusedLAMB`.
    """

    def __init__(
        self,
        learning_rate: LearningRateLike = 1e-3,
        weight_decay: float = 0.05,
        epsilon: float = 1e-8,
        name: str = "lamb",
        **kwargs: Any,
    ):
        fixed = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        super().__init__(epsilon=epsilon, name=name, **fixed, **kwargs)

    def is_matrix(self, path: str, variable: Any, decays: bool) -> bool:
        """Returns True for decayed weights."""
        return bool(self.weight_decay) and decays

    def update_step(self, gradient: Any, variable: keras.Variable, learning_rate: Tensor) -> None:
        """Moves a variable, or the last of several with all of them; in float32."""
        ops = keras.ops
        index = keras_internals.variable_index(self, variable)
        rate = ops.cast(learning_rate, "float32") * self._multipliers[index]
        weight = ops.cast(variable, "float32")
        step = self.adam(ops.cast(gradient, "float32"), variable)
        if not self._whole[index]:
            self.assign(variable, ops.cast(weight - rate * step, variable.dtype))
            return
        parts = self.complete(index, (variable, weight, step + self.weight_decay * weight))
        length, norm = (
            ops.sqrt(sum(ops.sum(ops.square(part[i])) for part in parts)) for i in (1, 2)
        )
        for variable, weight, step in parts:
            both = ops.logical_and(length > 0, norm > 0)
            ratio = ops.where(both, length / ops.where(both, norm, 1.0), 1.0)
            self.assign(variable, ops.cast(weight - rate * ratio * step, variable.dtype))


# Factors of X, X X' X and X X' X X' X in each Newton-Schulz step, timm's "quintic".
_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalized(matrix: Tensor) -> Any:
    """Returns a matrix with singular values close to 1 and the same singular vectors.

    Args:
        matrix: float32 (rows, columns).

    Source:
        timm 1.0, `zeropower_via_newtonschulz`, which rounds to bfloat16.
    """
    ops = keras.ops
    across = matrix.shape[0] > matrix.shape[1]
    x = ops.transpose(matrix) if across else matrix
    x = x / ops.maximum(ops.sqrt(ops.sum(ops.square(x))), 1e-7)
    for a, b, c in _QUINTIC:
        square = ops.matmul(x, ops.transpose(x))
        x = a * x + ops.matmul(b * square + c * ops.matmul(square, square), x)
    return ops.transpose(x) if across else x


@keras.saving.register_keras_serializable(package="kmodels")
class Muon(WholeMatrices, keras.optimizers.Adam):
    """Muon (Jordan et al. 2024) for matrices, AdamW for all other weights.

    The step of a matrix is its momentum, orthogonalized and scaled to the size of AdamW's steps
    (Liu et al. 2025), so that rates and decay of AdamW fit. The query, key and value kernels of an
    attention count as one matrix. A matrix with fewer than four rows or columns, or more than 128
    times as many of one as of the other, is AdamW's.

    Args:
        learning_rate: a float or a schedule.
        weight_decay: share of a weight that is subtracted per step, times the learning rate.
        momentum: decay of the momentum of a matrix.
        adamw: regular expressions; a variable whose path one of them finds is AdamW's.
        beta_2: AdamW's decay of the second moment.
        epsilon: added to AdamW's corrected root.
        name: first part of the variables' paths.
        **kwargs: as in `AdamW`; others as in `keras.optimizers.Adam`, without `amsgrad`.

    Raises:
        InputError: for values out of range.

    Source:
        timm 1.0, `timm.optim.Muon`.
    """

    def __init__(
        self,
        learning_rate: LearningRateLike = 1e-3,
        weight_decay: float = 0.05,
        momentum: float = 0.95,
        adamw: Sequence[str] = (),
        beta_2: float = 0.95,
        epsilon: float = 1e-7,
        name: str = "muon",
        **kwargs: Any,
    ):
        fixed = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        super().__init__(beta_2=beta_2, epsilon=epsilon, name=name, **fixed, **kwargs)
        check_number("momentum", momentum, least=0, below=1)
        self.momentum = momentum
        self.adamw = _patterns("adamw", adamw)

    def is_matrix(self, path: str, variable: Any, decays: bool) -> bool:
        """Returns True for a matrix that Muon moves."""
        if len(variable.shape) != 2 or any(re.search(name, path) for name in self.adamw):
            return False
        return min(variable.shape) >= 4 and max(variable.shape) <= 128 * min(variable.shape)

    def update_step(self, gradient: Any, variable: keras.Variable, learning_rate: Tensor) -> None:
        """Moves a variable, or the last of several with all of them; in float32."""
        ops = keras.ops
        index = keras_internals.variable_index(self, variable)
        rate = ops.cast(learning_rate, "float32") * self._multipliers[index]
        weight, gradient = ops.cast(variable, "float32"), ops.cast(gradient, "float32")
        if self.weight_decay and self._decays[index]:
            weight = weight * (1 - rate * self.weight_decay)
        if not self._whole[index]:
            step = self.adam(gradient, variable)
            self.assign(variable, ops.cast(weight - rate * step, variable.dtype))
            return
        slot, _, _ = keras_internals.adam_slots(self, variable)
        parts = self.complete(index, (variable, weight, self.moment(slot, gradient, self.momentum)))
        if not parts:
            return
        step = orthogonalized(ops.concatenate([part[2] for part in parts], axis=1))
        scale = 0.2 * max(step.shape) ** 0.5
        for (variable, weight, _), part in zip(
            parts, ops.split(step, len(parts), axis=1), strict=True
        ):
            self.assign(variable, ops.cast(weight - rate * scale * part, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, plain values."""
        own = {"momentum": self.momentum, "adamw": list(self.adamw)}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="kmodels")
class WarmupSchedule(Checked, keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly to `peak` during the warm-up, then falls to `final` (Loshchilov, Hutter 2017).

    Args:
        peak: the highest learning rate, reached at step `warmup_steps`.
        total_steps: steps of the whole run; from there on the rate stays at `final`.
        warmup_steps: steps of the rise; step 0 has a rate of peak / warmup_steps, not of 0.
        kind: "cosine", "linear" or "constant" after the warm-up; "one_cycle" is the variant of a
            one-cycle schedule of DINOv3's segmentation: the cosine is measured from step 0, the
            warm-up is multiplied by the share of steps that is left, and all rates come one step
            late.
        final: the last rate; "constant" ignores it.
        start: rate of step 0, from which the warm-up reaches `peak` at step `warmup_steps`; None
            for peak / warmup_steps, reached one step earlier.
        steps_per_epoch: number of steps for which a rate is held, as in DeiT: epoch e has the rate
            of the start of epoch e - 1, and the fall is measured from step 0, not from the end of
            the warm-up. None for a rate by step.

    Raises:
        InputError: for an unknown kind, or numbers that do not make a schedule.
    """

    def __init__(
        self,
        peak: float,
        total_steps: int,
        warmup_steps: int = 0,
        kind: str = "cosine",
        final: float = 0.0,
        start: float | None = None,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        check_choice("schedule", kind, SCHEDULES)
        check_number("learning rate", peak, above=0)
        if warmup_steps < 0 or total_steps < 1:
            raise InputError(
                f"a schedule of {total_steps} steps with {warmup_steps} of warm-up; "
                "give at least 1 and at least 0"
            )
        if warmup_steps > total_steps:
            log.warning(
                "the warm-up of %d steps is longer than the schedule of %d, so the learning rate "
                "does not reach %g; give fewer",
                *(warmup_steps, total_steps, peak),
            )
        for name, rate in (("final", final), ("start", start or 0.0)):
            check_number(f"the {name} learning rate", rate, least=0)
        if kind == "constant" and final:
            raise InputError("a constant schedule has no final rate; leave it out")
        if steps_per_epoch is not None:
            check_whole("steps_per_epoch", steps_per_epoch)
        self.peak = float(peak)
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.kind = kind
        self.final = float(final)
        self.start = None if start is None else float(start)
        self.steps_per_epoch = steps_per_epoch

    def __call__(self, step: Tensor | int) -> Any:
        """Returns the rate at a step (an integer scalar, counted from 0), float32."""
        ops = keras.ops
        step, top = ops.cast(step, "float32"), self.warmup_steps
        if self.steps_per_epoch is not None:
            step = ops.maximum(ops.floor(step / self.steps_per_epoch) - 1, 0) * self.steps_per_epoch
            top = 0
        if self.kind == "one_cycle":
            step = ops.maximum(step - 1, 0)
        rise = self.peak * (step + 1.0) / max(self.warmup_steps, 1)
        if self.start is not None:
            rise = self.start + (self.peak - self.start) * step / max(self.warmup_steps, 1)
        done = ops.clip((step - top) / max(self.total_steps - top, 1), 0.0, 1.0)
        if self.kind == "one_cycle":
            rise = rise * (1.0 - step / self.total_steps)
            done = ops.clip((step + 1.0) / self.total_steps, 0.0, 1.0)
        if self.kind in ("cosine", "one_cycle"):
            share = 0.5 * (1.0 + ops.cos(math.pi * done))
        elif self.kind == "linear":
            share = 1.0 - done
        else:
            share = ops.ones_like(done)
        fall = self.final + (self.peak - self.final) * share
        return ops.where(step < self.warmup_steps, rise, fall)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "peak": self.peak,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "kind": self.kind,
            "final": self.final,
            "start": self.start,
            "steps_per_epoch": self.steps_per_epoch,
        }
