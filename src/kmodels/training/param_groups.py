"""Parameter groups: weight decay and learning rate by weight, averages, skipped steps."""

import math
import re
from collections.abc import Sequence
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import LearningRateLike, Tensor

# Biases, norm and layer scales have one axis; these have more, and are not decayed either.
NO_DECAY = (r"(^|/)tokens/", r"(^|/)(class_token|position_embedding)$")
_BLOCK = re.compile(r"(?:^|/)block_(\d+)/")
_FINAL_NORM = re.compile(r"(?:^|/)final_norm/")


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


class ParamGroupOptimizer(keras_internals.OwnDecay):
    """First base of an optimizer whose second is Keras' own, or a backend's body of it.

    Weights with one axis (biases, norms, layer scales) and those whose path matches `no_decay`
    (tokens and position embeddings) are not decayed. Slots are named after the variables, so a
    saved state fits each backend.

    Args:
        learning_rate: a float or a schedule.
        weight_decay: share of a weight that is subtracted per step, times the learning rate.
        no_decay: regular expressions; a variable whose path one of them finds is not decayed.
        layer_decay: factor of the learning rate from each block to the one below, or None.
        clip_norm: largest global norm of the gradients, or None.
        accumulate: micro-batches whose gradients are averaged before one update.
        ema: momentum of the moving average of the weights by update, or None. `swap_average`
            and `finalize_average` put it into the model; `fit` alone never does.
        skip_non_finite: skips a step if a gradient is not finite, and counts such
            steps in the variable `skipped`.
        **kwargs: of Keras' optimizer.

    Raises:
        InputError: for values out of range.
    """

    def __init__(
        self,
        *,
        learning_rate: LearningRateLike,
        weight_decay: float | None,
        no_decay: Sequence[str] = NO_DECAY,
        layer_decay: float | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        skip_non_finite: bool = False,
        **kwargs: Any,
    ):
        _check(learning_rate, weight_decay, layer_decay, clip_norm, accumulate, ema)
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
        self.no_decay = tuple(no_decay)
        self.layer_decay = layer_decay
        self.accumulate = accumulate
        self.ema = ema
        self.skip_non_finite = skip_non_finite
        self.skipped: Any = None
        self.swapped = False
        self._checked = False

    def build(self, variables: list[Any]) -> None:
        """Makes the slots, and settles decay and learning rate of each variable."""
        if self.built:
            return
        super().build(variables)
        if self.skip_non_finite:
            self.skipped = self.add_variable((), dtype="int", name="skipped")
        pattern = re.compile("|".join(self.no_decay) or r"(?!)")
        self._decays = tuple(
            len(v.shape) > 1 and not pattern.search(getattr(v, "path", v.name)) for v in variables
        )
        self._multipliers = (1.0,) * len(variables)
        if self.layer_decay is not None:
            paths = [getattr(v, "path", v.name) for v in variables]
            self._multipliers = depth_multipliers(paths, self.layer_decay)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Makes one step, unless it is to be skipped."""
        if not self.skip_non_finite or self._checked:
            return super().apply(grads, trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        update = super().apply

        def step() -> None:
            update(grads, trainable_variables)

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
            "layer_decay": self.layer_decay,
            "accumulate": self.accumulate,
            "ema": self.ema,
            "skip_non_finite": self.skip_non_finite,
        }


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
    if isinstance(learning_rate, int | float) and not 0 < learning_rate < math.inf:
        raise InputError(f"learning rate is {learning_rate}; give a number above 0")
    if weight_decay is not None and not weight_decay >= 0:
        raise InputError(f"weight decay is {weight_decay}; give 0 or more")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise InputError(f"layer decay is {layer_decay}; give a factor above 0 and at most 1")
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip norm is {clip_norm}; give a number above 0")
    check_whole("accumulate", accumulate)
    if ema is not None and not 0 < ema < 1:
        raise InputError(f"ema is {ema}; give a momentum between 0 and 1, such as 0.999")
