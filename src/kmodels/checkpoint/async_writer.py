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

    @property
    def failed(self) -> bool:
        """Whether a job has raised something; does not wait."""
        return self._error is not None

    def wait(self) -> None:
        """Waits for the job and raises what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
