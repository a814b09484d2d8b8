"""Stops a run whose loss is not finite, and says what is still good."""

import math
from pathlib import Path
from typing import Any

from kmodels.checkpoint import manager
from kmodels.core.errors import InputError


class FiniteLoss:
    """Looks at the losses of the steps, one after another.

    Args:
        directory: of the run's checkpoints, for the message.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._last: float | None = None

    def is_finite(self, loss: Any) -> bool:
        """Whether a step's loss is; losses on the device are not waited for, and count as such."""
        if not isinstance(loss, float):
            return True
        if math.isfinite(loss):
            self._last = loss
            return True
        return False

    def error(self, loss: float, step: int, rate: float) -> InputError:
        """What to raise, once nothing is being written any more.

        Args:
            loss: that is not finite.
            step: that gave it.
            rate: the learning rate.
        """
        kept = manager.list_checkpoints(self._directory)
        good = f"checkpoint {kept[0].name} is good" if kept else "no checkpoint was made"
        return InputError(
            f"the loss is {loss} at step {step} (learning rate {rate:.3g}); the last finite one "
            f"was {self._last}; {good}; check the data or the learning rate"
        )
