"""Several processes: who writes files, and that their callbacks decide alike."""

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
    """Has the first process write; all gather the values, one tensor after another.

    No process has more than one of them in memory whole. All have to call it, in the same order,
    between steps.

    Args:
        tensors: by name, in the same order in all processes.
        write: writes what it is given, reading each tensor once, in the order given.

    Returns:
        The result of `write`.

    Raises:
        InputError: as `write` raised it, or for a disk that cannot be written to, in all processes.
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

    held = {
        name: replace(tensor, read=lambda name=name: turn(name), read_part=None)
        for name, tensor in tensors.items()
    }

    def run() -> str:
        try:
            return str(write(held))
        except OSError as error:
            raise InputError(
                f"cannot write {error.filename or 'a file'}: {error.strerror or error}; make room "
                "or give another directory"
            ) from error
        finally:
            # The others gather these with this process, whether they are written or not.
            for name in list(left):
                turn(name)

    return Path(processes.broadcast("files", run))


@contextmanager
def without_distribution() -> Iterator[None]:
    """Puts no mesh in force inside the block, so that one of several processes can save with Keras.

    Keras makes an optimizer then, to see what every optimizer has, and over a mesh on JAX each
    variable that is made waits for all processes.
    """
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)


# They write the same in each process.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class SyncStop(keras.callbacks.Callback):
    """Ends training in all processes where a callback ended it in one, at the end of an epoch.

    Keras' own callbacks decide by logs, which are the same in all processes; a user's may go by the
    time or by a file. The learning rate that the first process has set holds for all.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        """Compares how long each process means to train."""
        facts = {"epochs": self.params.get("epochs"), "steps": self.params.get("steps")}
        processes.check_equal("fit", facts)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Compares, after the other callbacks, who stops and which learning rate holds."""
        rate = getattr(self.model.optimizer, "learning_rate", None)
        own = float(keras.ops.convert_to_numpy(rate)) if _is_set(rate) else None
        told = processes.all_gather_object(
            "the end of an epoch", [bool(self.model.stop_training), own]
        )
        if any(stop for stop, _ in told):
            self.model.stop_training = True
        if own is not None and told[0][1] not in (None, own):
            self.model.optimizer.learning_rate = told[0][1]


def followers(
    callbacks: Sequence[keras.callbacks.Callback], plan: "ParallelPlan", use: Method
) -> Any:
    """Returns the callbacks that this process calls.

    Args:
        callbacks: as given to `fit`, `evaluate` or `predict`.
        plan: in force.
        use: which of the three.

    Returns:
        The callbacks that were given, in a run of one process or for a `CallbackList`. Otherwise
        those that write files or show progress are left to the main process.

    Raises:
        InputError: for a callback that cannot work in several processes.
    """
    if processes.count() == 1 or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    given = [callback for callback in given if callback is not None]
    for callback in given:
        _check(callback, plan)
    kept = [c for c in given if plan.engine.main or not isinstance(c, _WRITERS)]
    return [*kept, SyncStop()] if use is Method.FIT else kept


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


def _is_set(rate: object) -> bool:
    return isinstance(rate, keras.Variable)
