"""SIGTERM and SIGINT ask a run to stop; the run does so at its next step boundary."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run was stopped by a signal, after its state was saved.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum


class StopRequest:
    """Whether a signal has come.

    Attributes:
        signum: its number, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Catches signals inside the block: the first is noted, a second one kills."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note(self, signum: int, _: Any) -> None:
        if self.signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.signum = signum
