"""Signals stop a run, all of its processes after the same step."""

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

from kmodels.core import processes

# A terminal that is closed sends SIGHUP; Windows has none.
HANGUP = getattr(signal, "SIGHUP", None)
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([] if HANGUP is None else [HANGUP]))
# Seconds between two exchanges with the other processes, each of which waits for the slowest.
SECONDS = 1.0
# A signal to the process that started this one elsewhere, as on a cluster.
_told: int | None = None


def tell(signum: int | None) -> None:
    """Treats a signal as one to this process; None takes it back."""
    global _told
    _told = signum


def _owner_of(signum: int) -> object:
    """Returns the object whose method handles a signal, or None."""
    return getattr(signal.getsignal(signum), "__self__", None)


def _depth(code: CodeType | None, frame: FrameType | None) -> int:
    """Returns how often a function runs in a frame and its callers; None for this frame."""
    if code is None:
        return 0
    return sum(each.f_code is code for each, _ in traceback.walk_stack(frame))


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


class Preemption:
    """Stops a run after a signal to any of its processes.

    Signals come to processes at different steps, and one that stopped alone would leave the others
    waiting for it. So all processes exchange signals and failures after the same steps, about once
    a second.
    """

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self._within: CodeType | None = None
        self._depth = 0
        self.reset()

    def reset(self) -> None:
        """Begins a run, to which no signal has come."""
        self._received: int | None = None
        self._agreed: int | None = None
        self._calls, self._asked, self._next = 0, 0, 1
        self._since = perf_counter()

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Catches signals inside the block: the first is noted, a second one ends the process."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self, within: CodeType | None = None) -> None:
        """Catches signals from here on, if this is the main thread.

        Args:
            within: code of the function that is to be stopped, if nobody calls `end` when an error
                ends it: signals outside of it have their former meaning.
        """
        if self._former or threading.current_thread() is not threading.main_thread():
            return
        # Runs that errors ended left theirs, each of which would hold its run for good.
        while isinstance(left := _owner_of(SIGNALS[0]), Preemption):
            runs = left._depth <= _depth(left._within, None) - (left._within is within)
            if runs or not left._former:
                break
            left.end()
        self._within, self._depth = within, _depth(within, None)
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
        if _depth(self._within, frame) < self._depth:
            self.end()
            if _owner_of(signum) is self:  # somebody put it back
                usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
                signal.signal(signum, usual)
            os.kill(os.getpid(), signum)
        elif self._received is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        else:
            self._received = signum

    @property
    def signum(self) -> int | None:
        """Returns the signal after which all processes stop, or None."""
        return (self._received or _told) if processes.count() == 1 else self._agreed

    def exchange(self, failed: bool, due: bool, at_once: bool) -> tuple[bool, bool]:
        """Exchanges signals and failures; all processes call it after the same steps.

        Args:
            failed: True if something went wrong in this process.
            due: True if a checkpoint is due here; the answer of rank zero counts.
            at_once: exchanges even if the last time was a moment ago.

        Returns:
            True if something failed in one of them, and True if a checkpoint is due; both False if
            nothing was exchanged.
        """
        if processes.count() == 1:
            return failed, due
        self._calls += 1
        if self._calls < self._next and not at_once:
            return False, False
        now = perf_counter()
        per_call = (now - self._since) / (self._calls - self._asked) if self._asked else SECONDS
        own = [self._received or _told, failed, due, per_call]
        answers = processes.all_gather_object("requests", own)
        self._since, self._asked = now, self._calls
        self._next = self._calls + max(int(SECONDS / max(answers[0][3], 1e-6)), 1)
        signals = [answer[0] for answer in answers if answer[0] is not None]
        self._agreed = self._agreed or (signals[0] if signals else None)
        return any(answer[1] for answer in answers), answers[0][2]

    def leave(self, step: int, how_to_go_on: str) -> None:
        """Ends the process after a signal; the caller has released its resources."""
        if (signum := self.signum) is None:
            return
        message = f"stopped at step {step} by signal {signum}; {how_to_go_on}"
        if processes.is_rank_zero():
            print(message, file=sys.stderr, flush=True)
        raise Interrupted(signum, message)
