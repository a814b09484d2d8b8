"""Signals ask a run to stop, which all of its processes do at the same step boundary."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from kmodels.distribution import processes

# A terminal that is closed sends SIGHUP; Windows has none.
HANGUP = getattr(signal, "SIGHUP", None)
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([] if HANGUP is None else [HANGUP]))
# Asking the others waits for the slowest of them, so they are asked about so often.
SECONDS = 1.0
# The signal that came to whoever started this process elsewhere, as on a cluster.
_told: int | None = None


def tell(signum: int | None) -> None:
    """Has a signal count as one that came to this process; None takes it back."""
    global _told
    _told = signum


class Interrupted(SystemExit):
    """The run was stopped by a signal, after its state was saved.

    A script that does not catch it ends with 128 + the signal's number and no stack trace.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum
        self.code = 128 + signum


class StopRequest:
    """A flag that a signal sets.

    Attributes:
        signum: its number, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._former: dict[int, Any] = {}
        self._within: CodeType | None = None

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Catches signals inside the block: the first is noted, a second one ends the process."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self, within: CodeType | None = None) -> None:
        """Catches signals from here on, in the main thread.

        Args:
            within: code of the function that is to be stopped, where nobody calls `end` when an
                error ends it: signals that come outside of it have their former meaning.
        """
        if self._former or threading.current_thread() is not threading.main_thread():
            return
        self._within = within
        # nohup has a process ignore SIGHUP, and so does this.
        heard = [
            number
            for number in SIGNALS
            if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN
        ]
        self._former = {number: signal.signal(number, self._note) for number in heard}

    def end(self) -> None:
        """Gives signals their former meaning."""
        former, self._former = self._former, {}
        for number, handler in former.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_running(frame):
            self.end()
            os.kill(os.getpid(), signum)
        elif self.signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        else:
            self.signum = signum

    def _is_running(self, frame: FrameType | None) -> bool:
        if self._within is None:
            return True
        return any(caller.f_code is self._within for caller, _ in traceback.walk_stack(frame))


class Requests:
    """Signals and failures of any process, told to all.

    Signals come to processes at different steps, and one that stopped alone would leave the others
    waiting for it. So all ask one another after the same steps, about once a second.

    Attributes:
        signum: signum of the first signal that one of them reported, or None.
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


class Preemption:
    """Stops a run after a signal to any of its processes.

    Attributes:
        stop: whether a signal has come to this process.
    """

    def __init__(self) -> None:
        self.stop = StopRequest()
        self._requests = Requests()

    def begin(self) -> None:
        """A run begins, to which no signal has come."""
        self.stop.signum = None
        self._requests = Requests()

    @property
    def signum(self) -> int | None:
        """The number of the signal after which this run stops, or None."""
        return self._own if processes.count() == 1 else self._requests.signum

    def ask(self, failed: bool, due: bool, at_once: bool) -> tuple[bool, bool]:
        """Asks the other processes if there are several, see `Requests.ask`."""
        if processes.count() == 1:
            return failed, due
        return self._requests.ask(self._own, failed, due, at_once)

    @property
    def _own(self) -> int | None:
        return self.stop.signum or _told

    def leave(self, step: int, how_to_go_on: str) -> None:
        """Ends the process after a signal; the caller has released all that it held."""
        if (signum := self.signum) is None:
            return
        message = f"stopped at step {step} by signal {signum}; {how_to_go_on}"
        if processes.is_rank_zero():
            print(message, file=sys.stderr, flush=True)
        raise Interrupted(signum, message)
