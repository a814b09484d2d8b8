"""Callbacks of `fit` in several processes: who writes, and that all decide alike."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Logs
from kmodels.data.pipeline.request import Method
from kmodels.distribution import processes

if TYPE_CHECKING:
    from kmodels.distribution.plan import ParallelPlan

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
