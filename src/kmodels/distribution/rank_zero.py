"""Files and callbacks in a run of several processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kmodels.core import processes
from kmodels.core.errors import InputError
from kmodels.core.types import Logs
from kmodels.data.pipeline.request import Method
from kmodels.weights.tensors import LazyArray

if TYPE_CHECKING:
    from kmodels.distribution.plan import ParallelPlan


Tensors = Mapping[str, LazyArray]


def write_on_rank_zero(tensors: Tensors, write: Callable[[Tensors], Path]) -> Path:
    """Writes tensors on rank zero; all processes gather the values, one tensor after another.

    A process has at most one whole tensor in memory. All must call it between steps, with the same
    names in the same order; `write` reads each once, in this order. If it raises `InputError` or
    the disk cannot be written, all processes raise.
    """
    if processes.count() == 1:
        return write(tensors)
    if not processes.is_rank_zero():
        for tensor in tensors.values():
            tensor.read()
        return Path(processes.broadcast("files", lambda: None))
    left = dict(tensors)

    def turn(name: str) -> np.ndarray:
        return left.pop(name).read()

    gathered = {
        name: replace(tensor, read=lambda name=name: turn(name), read_part=None)
        for name, tensor in tensors.items()
    }

    def run() -> str:
        try:
            return str(write(gathered))
        except OSError as error:
            raise InputError(
                f"cannot write {error.filename or 'a file'}: {error.strerror or error}; make room "
                "or give another directory"
            ) from error
        finally:
            # The others gather these with this process, even after an error.
            for name in list(left):
                turn(name)

    return Path(processes.broadcast("files", run))


@contextmanager
def without_distribution() -> Iterator[None]:
    """Suspends the mesh inside the block, so that one of several processes can save with Keras.

    Keras creates an optimizer when it saves, and over a mesh on JAX each new variable waits for all
    processes.
    """
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)


# Callbacks that write files or show progress.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class SyncStop(keras.callbacks.Callback):
    """Ends training in all processes at the end of an epoch if a callback ended it in one.

    Keras' own callbacks decide by logs, which are the same in all processes; other callbacks may
    decide by the time or by a file. All processes take the learning rate of rank zero.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        """Compares the numbers of epochs and steps of the processes."""
        facts = {"epochs": self.params.get("epochs"), "steps": self.params.get("steps")}
        processes.check_equal("fit", facts)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Stops, and sets the learning rate, in all processes, after the other callbacks."""
        rate = getattr(self.model.optimizer, "learning_rate", None)
        is_set = isinstance(rate, keras.Variable)
        own = float(keras.ops.convert_to_numpy(rate)) if is_set else None
        states = processes.all_gather_object(
            "the end of an epoch", [bool(self.model.stop_training), own]
        )
        if any(stop for stop, _ in states):
            self.model.stop_training = True
        if own is not None and states[0][1] not in (None, own):
            self.model.optimizer.learning_rate = states[0][1]


def followers(
    callbacks: Sequence[keras.callbacks.Callback], plan: "ParallelPlan", use: Method
) -> Any:
    """Returns the callbacks that this process calls in a method of Keras.

    In a run of one process, or for a `CallbackList`, these are the callbacks themselves. Otherwise
    those that write files or show progress are called on rank zero alone.

    Raises:
        InputError: for a callback that cannot work in several processes.
    """
    if processes.count() == 1 or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    every = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    every = [callback for callback in every if callback is not None]
    for callback in every:
        _check(callback, plan)
    here = [c for c in every if processes.is_rank_zero() or not isinstance(c, _WRITERS)]
    return [*here, SyncStop()] if use is Method.FIT else here


def _check(callback: keras.callbacks.Callback, plan: "ParallelPlan") -> None:
    kind = type(callback).__name__
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise InputError(
            f"{kind} restores in one process and not in the others; give plan.callbacks(directory)"
        )
    holds_all = isinstance(callback, keras.callbacks.ModelCheckpoint) or getattr(
        callback, "restore_best_weights", False
    )
    if holds_all and plan.mesh.size != plan.mesh.data:
        raise InputError(
            f"{kind} needs whole weights, and the mesh {plan.mesh} has each process hold a part; "
            "give plan.callbacks(directory, best=...), and plan.export(model, directory) at the end"
        )
