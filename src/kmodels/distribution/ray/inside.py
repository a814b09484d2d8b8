"""The work in a Ray worker, its errors, and the checkpoints that it reports to Ray."""

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmodels.checkpoint import manager
from kmodels.checkpoint.preemption import Interrupted
from kmodels.checkpoint.state import RunState
from kmodels.core import processes, remote
from kmodels.core.errors import InputError, one_line
from kmodels.distribution.ray.stopping import Stopped, listening
from kmodels.distribution.ray.workers import workers_backend

# Folder of the checkpoints in the directory of a run.
CHECKPOINTS = "checkpoints"
# Metric by which Ray compares checkpoints, and the value for those without the log.
SCORE, _WORST = "score", 1e300
_LATER = 120.0
# Variable in workers: directory of the run, local or an address.
ENVIRONMENT = "KMODELS_RAY_DIRECTORY"


class WorkerError(InputError):
    """An error of the work in one line, not caused by the loss of another worker.

    `stack` is the stack trace of an unexpected one.
    """

    def __init__(self, line: str, stack: str = ""):
        super().__init__(line)
        self.stack = stack

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.stack)


class WorkerLost(RuntimeError):
    """An error that was caused by the loss of another worker; Ray restarts all of them."""


def directory() -> str:
    """Returns the directory of checkpoints, in a function that `run` has started.

        model.fit(x, y, callbacks=[kmodels.callbacks.Checkpoint(directory(), every=500)])

    Ray lists the checkpoints in it, and removes older ones.

    Returns:
        A local path or an address, the same in all workers.

    Raises:
        InputError: outside of a worker.
    """
    if ENVIRONMENT not in os.environ:
        raise InputError(
            "directory() is asked for outside of a worker of Ray; call it in a function that "
            "kmodels.distribution.ray.run starts"
        )
    return f"{os.environ[ENVIRONMENT]}/{CHECKPOINTS}"


@dataclass(frozen=True)
class Work:
    """The work of each worker, called by Ray.

    Args:
        function: the function to call.
        arguments: its arguments.
        backend: Keras backend of the worker.
        storage: directory of the run, local or an address.
        folder: working directory of the process that started the run.
        patience: seconds in which Ray notices a lost worker.
        best: log of an epoch by which Ray compares checkpoints; True for that of `Checkpoint`.
        mode: "min" or "max", which score is the best.
        key: key of the run, for signals to the process that started it.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    backend: str
    storage: str
    folder: str
    patience: float
    best: str | bool | None
    mode: str
    key: str

    def __call__(self) -> Any:
        """Does the work; errors are `WorkerLost` to restart the workers, else `WorkerError`."""
        # Ray changes the directory, which would break relative paths.
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        os.environ[ENVIRONMENT] = self.storage
        # It would print stack traces of errors that are reported in one line.
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        backend = workers_backend(self.backend)
        manager.set_keeper(_RayKeeper(self.storage, self.best, self.mode))
        try:
            with listening(self.key):
                result = self.function(*self.arguments)
        except Interrupted as stop:
            result = Stopped(stop.signum, str(stop))
        except Exception as error:
            if any(backend.is_lost(one) or isinstance(one, TimeoutError) for one in _chain(error)):
                raise WorkerLost(one_line(error)) from error
            # If the loss of another worker was the cause, Ray notices it in this time.
            if processes.count() > 1:
                time.sleep(self.patience)
            raise _worker_error(error) from error
        finally:
            manager.set_keeper(None)
        backend.leave()
        return result


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _worker_error(error: Exception) -> WorkerError:
    if isinstance(error, InputError):
        return WorkerError(one_line(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    line = f"{type(error).__name__}: {one_line(error)} ({place}, in worker {processes.index()})"
    return WorkerError(line, traceback.format_exc())


class _RayKeeper:
    """Reports checkpoints in the directory of a run to Ray, which removes older ones."""

    def __init__(self, storage: str, best: str | bool | None, mode: str):
        self._storage, self._best, self._mode = storage, best, mode
        self._known: set[str] | None = None

    def keeps(self, directory: Path) -> bool:
        return self._name(directory) is not None

    def tell(
        self, path: Path, run: RunState, written: Future[Any], best: manager.Best | None
    ) -> None:
        compared = self._compared(best)
        value = None if compared is None else run.logs.get(compared.name)
        self._report(path, run.step, run.epoch, run.logs, self._score(compared, value), written)

    def resume(self, paths: Sequence[Path], run: RunState, best: manager.Best | None) -> None:
        # A killed worker may not have reported all of its checkpoints.
        compared = self._compared(best)
        for path in paths:
            newest_best = None if compared is None else manager.find_best([path], *compared)
            score = self._score(compared, None if newest_best is None else newest_best[0])
            if path == paths[-1]:
                self._report(path, run.step, run.epoch, run.logs, score)
            else:
                self._report(path, int(path.name.rpartition("_")[2]), None, {}, score)

    def _compared(self, best: manager.Best | None) -> manager.Best | None:
        if isinstance(self._best, str):
            return manager.Best(self._best, self._mode)
        return best if self._best else None

    def _score(self, compared: manager.Best | None, value: float | None) -> float | None:
        """Returns the score of a checkpoint; None if the newest are kept."""
        if compared is None:
            return None
        if value is None:
            return -_WORST if self._mode == "max" else _WORST
        return value if compared.mode == self._mode else -value

    def _report(
        self,
        path: Path,
        step: int,
        epoch: int | None,
        logs: Mapping[str, float | None],
        score: float | None,
        written: Future[Any] | None = None,
    ) -> None:
        from ray import train

        if self._known is None:
            self._known = {one.checkpoint.path for one in train.get_all_reported_checkpoints()}
        storage: Any = train.get_context().get_storage()
        place = f"{storage.experiment_fs_path}/{self._name(path.parent)}/{path.name}"
        # A damaged checkpoint that was written again is on Ray's list already; with a second entry
        # it would be removed with the first.
        if place in self._known:
            return
        self._known.add(place)

        def wait(checkpoint: Any, name: str) -> Any:
            if written is not None and written.exception() is not None:
                # The training also raises it, in one line, unlike this thread of Ray.
                time.sleep(_LATER)
                written.result()
            return checkpoint

        numbers = {name: value for name, value in logs.items() if value is not None}
        if self._best:  # Ray needs a score for each; by default the newest is best.
            numbers[SCORE] = step if score is None else score
        reported = train.Checkpoint(path=place, filesystem=storage.storage_filesystem)
        # A thread of Ray waits until the checkpoint is written; the training does not.
        train.report(
            {"step": step, "epoch": epoch, **numbers},
            checkpoint=reported if processes.is_rank_zero() else None,
            checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=wait,
            # It is in its final place.
            delete_local_checkpoint_after_upload=False,
        )

    def _name(self, directory: Path) -> str | None:
        """Returns the name of a directory within that of the run; None if it is outside."""
        address = remote.ADDRESSES.get(directory)
        if address is not None:
            inside = address.startswith(f"{self._storage}/")
            return address.removeprefix(f"{self._storage}/") if inside else None
        if "://" in self._storage:
            return None
        try:
            name = directory.resolve().relative_to(Path(self._storage).resolve())
        except ValueError:
            return None
        return name.as_posix()
