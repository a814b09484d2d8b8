"""The loss of each step, left on the device.

Keras' logs hold running averages, and its callback list turns every log into a Python number after
each step, which waits for the device. In kmodels the last loss travels with the metrics' state, and
the callbacks get it as it is.
"""

from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Logs, Tensor
from kmodels.training.normalization import batch_weight

KEY, PERPLEXITY = "step_loss", "perplexity"


class LossTracker(keras.metrics.Mean):
    """Keras' loss tracker that also keeps the last value, and weighs batches by `batch_weight`.

    Args:
        finite_only: leaves values that are not finite out of the average.
        name: name of the average.
        keeps_last: False for the average alone.
        perplexity: logs the perplexity too, the exponential of the average.
        **kwargs: as in `keras.metrics.Mean`.
    """

    def __init__(
        self,
        finite_only: bool = False,
        name: str = "loss",
        keeps_last: bool = True,
        perplexity: bool = False,
        **kwargs: Any,
    ):
        super().__init__(name=name, **kwargs)
        self.finite_only, self.perplexity = finite_only, perplexity
        self.last: Any = None
        if keeps_last:
            self.last = self.add_variable(
                shape=(), initializer="zeros", aggregation="mean", name="last"
            )

    def update_state(self, values: Tensor, sample_weight: Any = None) -> None:
        """Adds a scalar loss to the average and keeps it."""
        if (weight := batch_weight()) is not None:
            sample_weight = weight.share
        if self.last is not None:
            self.last.assign(keras.ops.cast(values, self.last.dtype))
        if self.finite_only:
            ops, dtype = keras.ops, self.dtype
            finite = ops.isfinite(values)
            values = ops.where(finite, values, ops.zeros_like(values))
            weight = ops.cast(1.0 if sample_weight is None else sample_weight, dtype)
            sample_weight = ops.cast(finite, dtype) * weight
        super().update_state(values, sample_weight=sample_weight)

    def result(self) -> dict[str, Any]:
        """Returns the average as "loss", the last value as "step_loss", and "perplexity"."""
        mean = super().result()
        results = {self.name: mean}
        if self.last is not None:
            # A copy: on torch the variable is written in place by the next step.
            results[KEY] = keras.ops.copy(self.last.value)
        return results | ({PERPLEXITY: keras.ops.exp(mean)} if self.perplexity else {})

    def reset_state(self) -> None:
        """Goes back to zero."""
        super().reset_state()
        if self.last is not None:
            self.last.assign(keras.ops.zeros((), dtype=self.last.dtype))


def track_step_loss(model: keras.Model) -> None:
    """Makes a compiled model log "step_loss", the loss of the last batch, next to the averages.

    Call it after `compile`. Regularisers are part of it; rounding is float32's. Steps that the
    optimizer skips, since they are not finite, do not count in the averages.
    """
    if not getattr(model, "compiled", False):
        raise InputError(f"{model!r} is not compiled; call track_step_loss after compile")
    skips = getattr(model.optimizer, "skip_non_finite", False)
    perplexity = getattr(keras_internals.loss_tracker(model), "perplexity", False)
    keras_internals.set_loss_tracker(model, LossTracker(skips, perplexity=perplexity))
    # Functions that were traced before count with the former one, which nobody resets any more.
    model.train_function = model.test_function = None


class StepCallbacks(keras.callbacks.CallbackList):
    """A callback list whose batch hooks get logs as device values, on the main thread.

    Pass it to `fit(callbacks=...)`. Only the batch hooks of training and those at the end of a
    batch of evaluation reach the callbacks.
    """

    def __init__(
        self, callbacks: list[keras.callbacks.Callback], model: keras.Model, **params: Any
    ):
        super().__init__(callbacks, add_history=True, add_progbar=False, model=model, **params)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Passes the step to the callbacks."""
        for callback in self.callbacks:
            callback.on_train_batch_begin(batch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Hands the device values on."""
        for callback in self.callbacks:
            callback.on_train_batch_end(batch, logs)

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Does nothing."""

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Hands the device values on; the averages are read once, at the end."""
        for callback in self.callbacks:
            callback.on_test_batch_end(batch, logs)
