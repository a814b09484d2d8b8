"""Standard output that may be closed or full: no traceback, and no training is lost."""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

# Exit codes: that of a process ended by SIGPIPE, and sysexits' EX_IOERR.
CLOSED, FAILED = 128 + signal.SIGPIPE, 74


class Output:
    """Standard output; after an error all that is written to it is dropped.

    Attributes:
        code: exit code after an error, else 0.
        trains: whether a run goes on when nothing can be printed. A closed pipe stops it as
            SIGTERM does, after saving; any other command ends at the first error.
    """

    def __init__(self, stream: Any):
        self._stream, self.code, self.trains = stream, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, see `flush`."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._fail(error)
        self._stop()
        return len(text)

    def flush(self) -> None:
        """Raises SystemExit where the error of a write ends the command."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)
        self._stop()

    def _fail(self, error: OSError) -> None:
        if self.code:
            return
        self.code = CLOSED if error.errno == errno.EPIPE else FAILED
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self.code == FAILED:
            then = "the run goes on without it" if self.trains else "the command ends"
            _tell(f"cannot write to standard output: {error.strerror}; {then}")
        elif self.trains:
            _tell("standard output was closed; the run stops")

    def _stop(self) -> None:
        if not self.code or (self.trains and self.code == FAILED):
            return
        # It comes with Keras: before that there is nothing to save.
        preemption = sys.modules.get("kmodels.checkpoint.preemption")
        if self.trains and preemption is not None:
            preemption.tell(signal.SIGPIPE)
        elif threading.current_thread() is threading.main_thread():
            raise SystemExit(self.code)


@contextlib.contextmanager
def checked_output() -> Iterator[Output]:
    """Checks standard output inside the block, which may set `trains`."""
    if isinstance(sys.stdout, Output):
        output = sys.stdout
    else:
        # There is none where a shell closes it by ">&-".
        output = Output(sys.stdout or open(os.devnull, "w"))  # noqa: SIM115
    try:
        with contextlib.redirect_stdout(output):
            yield output
            output.flush()
    finally:
        output.trains = False
        if preemption := sys.modules.get("kmodels.checkpoint.preemption"):
            preemption.tell(None)


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"kmodels: {line}", file=sys.stderr, flush=True)
