"""Resuming: from the checkpoint that fills the model to the step that comes next."""

import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import keras

from kmodels.checkpoint import manager, rng, run_identity, state
from kmodels.checkpoint.callback_state import CallbackStates
from kmodels.checkpoint.format import Arrays
from kmodels.checkpoint.run_state import RunState
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.keras_internals import epoch
from kmodels.data.fit.position import FitData, Way
from kmodels.distribution import processes
from kmodels.distribution.processes import all_or_raise


class Phase(Enum):
    """The phases of a run that resumes."""

    DONE = "it is there, or began anew"
    FILLED = "the model is filled; the epoch of the checkpoint has not begun"
    WITHIN = "that epoch has begun; its hooks have not come to where it was saved"


class Resumer:
    """Brings a run back to its newest checkpoint: the model first, all else as its epoch begins.

    Args:
        directory: of the run's checkpoints.

    Attributes:
        run: the state of the checkpoint; before there is one, that of a run that begins.
        phase: how far it is.
        given: numbers of the optimizer as the user gave them, which the next checkpoint keeps.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self.begin()

    def begin(self) -> None:
        """A run begins, and nothing is restored yet."""
        self.run, self.phase = RunState(0), Phase.DONE
        self.given: Mapping[str, Any] = {}
        self._path = self._directory
        self._rates: Arrays = {}
        self._others = CallbackStates(())

    def restore(
        self, model: keras.Model, settings: Mapping[str, Any], steps: int | None
    ) -> Path | None:
        """Fills model and optimizer from the newest checkpoint that verifies.

        Args:
            model: compiled, its optimizer built.
            settings: that the run must share.
            steps: batches of an epoch, where known.

        Returns:
            The checkpoint; None where there is none.

        Raises:
            InputError: where none verifies, or it is of another run or model.
        """
        found = manager.newest(self._directory)
        if found is None:
            return None
        path, run, passed_over = found
        for reason in passed_over:
            say(f"passed over a damaged checkpoint: {reason}")
        optimizer = model.optimizer
        all_or_raise(
            "same run", lambda: run_identity.check_same(path, run, optimizer, settings, steps)
        )
        given_rates = rng.capture_rates(optimizer)
        manager.restore(path, run, model)
        self._path, self.run, self.phase = path, run, Phase.FILLED
        say(f"resumed from {path} at step {run.step}")
        if changed := run_identity.changed_numbers(run, self.given, optimizer):
            say(run_identity.say_changed(changed))
        self.given = run_identity.still_given(run, self.given, changed)
        self._rates = rng.of_slots(given_rates, changed)
        rng.restore_rates(optimizer, self._rates)
        return path

    def begin_fit(self, model: keras.Model, epochs: int, others: CallbackStates) -> None:
        """Has the `fit` that begins start at the epoch of the checkpoint.

        Args:
            model: inside `fit`.
            epochs: that `fit` was asked for.
            others: the callbacks beside the one that saves.
        """
        self._others = others
        if self.phase is not Phase.FILLED:
            return
        self.run = self.run.with_arrays(self._path)
        keras_internals.set_initial_epoch(model, epochs if self.run.ended else self.run.epoch)
        warn_where_done(self._directory, self.run.epoch, epochs, self.run.ended)

    def begin_epoch(self, model: keras.Model, data: FitData) -> Arrays:
        """Puts callbacks and random generators back, and has a cut epoch begin where it was cut.

        Returns:
            The random generators and the learning rate at the begin of the epoch.
        """
        run = self.run
        keras_internals.set_initial_epoch(model, None)
        self.phase = Phase.WITHIN if run.batch else Phase.DONE
        if run.batch and data.iterator is None:
            raise InputError(
                f"{self._path} is within an epoch, which a loop of one's own cannot begin at; give "
                "another directory, or train by Keras' fit"
            )
        replays = data.way(run.data) in (Way.REPLAY, Way.SLICES)
        if run.batch and not replays and not keras_internals.metrics_built(model):
            keras_internals.symbolic_build(model, data.example())
        self._put_back(model, "epoch")
        if run.batch and keras_internals.metrics_built(model):
            self._fill_metrics(model)
        if run.batch or run.data is not None:
            epoch.begin_within(
                data.iterator,
                model,
                run.batch,
                run.log_names,
                place=lambda: self._place(model, data),
                build=lambda batch: self._build_metrics(model, batch),
                after=data.look,
            )
        return self._moment("epoch")

    def reach(self, model: keras.Model, in_validation: bool) -> None:
        """In the hook that saved: the callbacks before it in the list have been called again."""
        if self.phase is Phase.WITHIN and self.run.in_validation == in_validation:
            self.phase = Phase.DONE
            keras_internals.sync_values(model)
            self._put_back(model, "now")

    def end_fit(self, model: keras.Model) -> None:
        """Puts callbacks back where there was nothing left to train."""
        keras_internals.set_initial_epoch(model, None)
        if self.phase is Phase.FILLED:
            self._others.restore(self.run.callbacks, self.run.callback_arrays)

    def _place(self, model: keras.Model, data: FitData) -> bool:
        run, begun = self.run, self._moment("epoch")
        return data.go_to(
            run.data,
            run.batch,
            over=not run.batch and not data.spans_epochs,
            undo=lambda: rng.restore(model.optimizer, begun),
            alone=lambda: not (run.ahead or data.ahead) or rng.is_as_now(run.rng["now"]),
        )

    def _put_back(self, model: keras.Model, moment: str) -> None:
        self._others.restore(self.run.callbacks, self.run.callback_arrays)
        rng.restore(model.optimizer, self._moment(moment))

    def _moment(self, name: str) -> Arrays:
        return self.run.rng.get(name, {}) | self._rates

    def _build_metrics(self, model: keras.Model, batch: Any) -> None:
        if not keras_internals.metrics_built(model):
            keras_internals.symbolic_build(model, batch)
            self._fill_metrics(model)

    def _fill_metrics(self, model: keras.Model) -> None:
        state.fill(self._path, {"metrics": state.named(model.metrics_variables)})


def say(line: str) -> None:
    """Prints a line, once for all processes."""
    if processes.is_rank_zero():
        print(line, flush=True)


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
