"""What the processes of a run decide together, each at the same step as the others."""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from kmodels.core.errors import InputError
from kmodels.distribution import processes

# Asking the others waits for the slowest of them, so they are asked about so often.
SECONDS = 1.0
T = TypeVar("T")


def all_or_raise(what: str, act: Callable[[], T]) -> T:
    """Does something in every process; where it is an `InputError` in one, it is in all.

    Args:
        what: is done, see `processes.all_gather_object`.
        act: without a collective in it.

    Raises:
        InputError: of this process, or the first that another one had.
    """
    if processes.count() == 1:
        return act()
    try:
        found = act()
    except InputError as error:
        processes.all_gather_object(what, str(error))
        raise
    problems = [
        problem for problem in processes.all_gather_object(what, None) if problem is not None
    ]
    if problems:
        raise InputError(problems[0])
    return found


class Requests:
    """Whether a signal came to one of the processes, or something failed in one.

    Signals come to processes at different steps, and one that stopped alone would leave the others
    waiting for it. So all ask one another after the same steps, about once a second.

    Attributes:
        signum: of the first signal that one of them told of, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._calls, self._asked, self._next = 0, 0, 1
        self._since = perf_counter()

    def ask(self, signum: int | None, failed: bool, due: bool, at_once: bool) -> tuple[bool, bool]:
        """Called by all processes after the same steps.

        Args:
            signum: that came to this process.
            failed: whether something went wrong in this process.
            due: whether it is time for something here; that of the first process counts.
            at_once: asks the others even if it was done a moment ago.

        Returns:
            Whether something failed in one of them, and whether it is time; both False where the
            others were not asked.
        """
        self._calls += 1
        if self._calls < self._next and not at_once:
            return False, False
        now = perf_counter()
        per_call = (now - self._since) / (self._calls - self._asked) if self._asked else SECONDS
        told = processes.all_gather_object("requests", [signum, failed, due, per_call])
        self._since, self._asked = now, self._calls
        self._next = self._calls + max(int(SECONDS / max(told[0][3], 1e-6)), 1)
        signals = [one[0] for one in told if one[0] is not None]
        self.signum = self.signum or (signals[0] if signals else None)
        return any(one[1] for one in told), told[0][2]
