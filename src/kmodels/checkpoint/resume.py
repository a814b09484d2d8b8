"""How `fit` gets from the checkpoint that filled the model to the step that comes next."""

import warnings
from pathlib import Path
from typing import Any

import keras

from kmodels.checkpoint import format, rng_and_lr, state
from kmodels.checkpoint.callback_state import CallbackStates
from kmodels.checkpoint.replay import Replay
from kmodels.core import keras_internals
from kmodels.distribution import processes


class ResumePlan:
    """What is put back beside the weights, and when.

    Args:
        path: of the checkpoint that the model was filled from.
        described: its state.
        others: the callbacks beside the one that saves.
        rates: learning rates that hold in place of the checkpoint's, as `moments` names them.
    """

    def __init__(
        self, path: Path, described: dict[str, Any], others: CallbackStates, rates: state.Arrays
    ):
        self._path, self._described, self._others = path, described, others
        self._rates = rates
        arrays = format.read(path, "other").items()
        self._arrays: state.Arrays = {name: array.read() for name, array in arrays}
        self._waiting = False

    def begin_epoch(self, model: keras.Model) -> state.Arrays:
        """Puts callbacks and random generators back; begins the replay of an epoch that was cut.

        Returns:
            The random generators and the learning rate at the begin of the epoch.
        """
        self._put_back(model, "epoch")
        if self._described["batch"]:
            if keras_internals.metrics_built(model):
                self._fill_metrics(model)
            # The hooks of this epoch are gone through again up to the one that saved.
            self._waiting = True
            Replay(
                model,
                self._described["batch"],
                self._described["log_names"],
                first=lambda batch: self._build_metrics(model, batch),
            )
        return self._moment("epoch")

    def reach(self, model: keras.Model, in_validation: bool) -> None:
        """After the replay, in the hook that saved: its callbacks have been called again."""
        if self._waiting and self._described["in_validation"] == in_validation:
            self._waiting = False
            self._put_back(model, "now")

    def end(self) -> None:
        """There was nothing left to train."""
        self._others.restore(self._described["callbacks"], self._arrays)

    def _put_back(self, model: keras.Model, moment: str) -> None:
        self._others.restore(self._described["callbacks"], self._arrays)
        rng_and_lr.restore(model.optimizer, self._moment(moment))

    def _moment(self, name: str) -> state.Arrays:
        prefix = f"random/{name}/"
        held = {k.removeprefix(prefix): v for k, v in self._arrays.items() if k.startswith(prefix)}
        return held | self._rates

    def _build_metrics(self, model: keras.Model, batch: Any) -> None:
        if not keras_internals.metrics_built(model):
            keras_internals.symbolic_build(model, batch)
            self._fill_metrics(model)

    def _fill_metrics(self, model: keras.Model) -> None:
        state.fill(self._path, {"metrics": state.named(model.metrics_variables)})


def warn_where_done(directory: Path, epoch: int, epochs: int, ended: bool) -> None:
    """Warns where a `fit` goes on from a run that has nothing left to do.

    Args:
        directory: of the run's checkpoints.
        epoch: finished epochs.
        epochs: that `fit` was asked for.
        ended: whether a callback has ended the run.
    """
    if ended:
        done = f"a callback has ended it after {epoch} epochs; give another directory to begin anew"
    elif epoch >= epochs:
        done = (
            f"{epoch} of {epochs} epochs are done; give more epochs to go on, or another directory "
            "to begin anew"
        )
    else:
        return
    if processes.is_rank_zero():
        warnings.warn(
            f"this fit trains nothing, since {directory} holds a finished run: {done}", stacklevel=2
        )
