"""SIGTERM and SIGINT ask a run to stop; the run does so at its next step boundary."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
    """Whether a signal has come.

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
            within: code of the function that is to be stopped. Once it is left, by an error for
                instance, signals have their former meaning.
        """
        if self._former or threading.current_thread() is not threading.main_thread():
            return
        self._within = within
        self._former = {number: signal.signal(number, self._note) for number in SIGNALS}

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
        while frame is not None and frame.f_code is not self._within:
            frame = frame.f_back
        return frame is not None
