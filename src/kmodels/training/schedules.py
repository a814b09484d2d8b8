"""Learning rate by step: a warm-up, then cosine, linear or constant."""

import math
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor

SCHEDULES = ("cosine", "linear", "constant")


@keras.saving.register_keras_serializable(package="kmodels")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly to `peak` during the warm-up, then falls to `final` (Loshchilov, Hutter 2017).

    Args:
        peak: the highest learning rate, reached at step `warmup_steps`.
        total_steps: steps of the whole run; from there on the rate stays at `final`.
        warmup_steps: steps of the rise; step 0 has a rate of peak / warmup_steps, not of 0.
        kind: "cosine", "linear" or "constant" after the warm-up.
        final: the last rate; "constant" ignores it.

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
    ):
        super().__init__()
        if kind not in SCHEDULES:
            raise InputError(f"schedule is {kind!r}; choose one of {', '.join(SCHEDULES)}")
        if not (math.isfinite(peak) and peak > 0):
            raise InputError(f"learning rate is {peak}; give a number above 0")
        if warmup_steps < 0 or total_steps < 1:
            raise InputError(
                f"a schedule of {total_steps} steps with {warmup_steps} of warm-up; "
                "give at least 1 and at least 0"
            )
        self.peak = float(peak)
        self.total_steps = int(total_steps)
        self.warmup_steps = int(warmup_steps)
        self.kind = kind
        self.final = float(final)

    def __call__(self, step: Tensor | int) -> Any:
        """Returns the rate at a step (an integer scalar, counted from 0), float32."""
        ops = keras.ops
        step = ops.cast(step, "float32")
        rise = self.peak * (step + 1.0) / max(self.warmup_steps, 1)
        span = max(self.total_steps - self.warmup_steps, 1)
        done = ops.clip((step - self.warmup_steps) / span, 0.0, 1.0)
        if self.kind == "cosine":
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
        }
