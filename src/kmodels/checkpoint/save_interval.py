"""When the next checkpoint is due."""

import re
from time import perf_counter

from kmodels.core.errors import InputError


class SaveInterval:
    """Steps or seconds between checkpoints.

    Args:
        every: steps as in 500 or "500", seconds as in "300s"; None and 0 mean once an epoch.

    Raises:
        InputError: for anything else.
    """

    def __init__(self, every: int | str | None):
        self.steps: int | None = None
        self.seconds: float | None = None
        self.begin(0)
        if every in (None, 0, "0"):
            return
        match = re.fullmatch(r"(\d+)(s?)", str(every))
        if match is None or int(match[1]) == 0:
            raise InputError(
                f"the distance of checkpoints is {every!r}; give steps as in 500, or seconds as in "
                "300s"
            )
        if match[2]:
            self.seconds = float(match[1])
        else:
            self.steps = int(match[1])

    @property
    def once_an_epoch(self) -> bool:
        """Whether neither steps nor seconds were given."""
        return self.steps is None and self.seconds is None

    def begin(self, step: int) -> None:
        """The run begins, or goes on, after this step."""
        self._counted = self._reached = step
        self.restart()

    def restart(self) -> None:
        """The clock starts anew: a checkpoint was made, or the run begins."""
        self._since = perf_counter()

    def now(self, step: int) -> bool:
        """Whether it is time after this step.

        Keras tells of no step within those that it executes together, so a checkpoint that was due
        within them is due at their end.
        """
        if self.seconds is not None:
            return perf_counter() - self._since >= self.seconds
        if self.steps is None:
            return False
        if step // self.steps > self._counted // self.steps:
            self._counted = self._reached = step
        return step == self._reached
