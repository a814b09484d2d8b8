"""One write at a time, beside the training."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs jobs in a thread, each after the one before is done.

    The thread is no daemon: a process that ends waits for what is being written.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Waits for the former job and raises what it raised, then begins this one."""
        self.wait()

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raises what a job that is done raised; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits for the job and raises what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
