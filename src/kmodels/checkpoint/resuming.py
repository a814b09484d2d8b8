"""Resuming: from the checkpoint that fills the model to the step that comes next."""

import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import keras

from kmodels.checkpoint import extra_state, manager, run_state, state
from kmodels.checkpoint.extra_state import CallbackStates
from kmodels.checkpoint.format import Arrays
from kmodels.checkpoint.run_state import RunState
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.pipeline.pipeline import batches_ahead
from kmodels.data.pipeline.position import Continued
from kmodels.distribution import processes
from kmodels.distribution.processes import all_or_raise


class Phase(Enum):
    """The phases of a run that resumes."""

    DONE = "it is there"
    FILLED = "the model is filled; the epoch of the checkpoint has not begun"
    WITHIN = "that epoch has begun; its hooks have not come to where it was saved"


class Resumer:
    """Brings a run back to its newest checkpoint: the model first, all else as its epoch begins.

    Args:
        path: path of the checkpoint, the newest one that verifies.
        run: the state in it.

    Attributes:
        path: path of the checkpoint.
        run: the state in it.
        phase: how far the run is on its way back.
    """

    def __init__(self, path: Path, run: RunState):
        self.path, self.run, self.phase = path, run, Phase.FILLED
        self._rates: Arrays = {}
        self._others = CallbackStates(())

    def restore(
        self,
        model: keras.Model,
        settings: Mapping[str, Any],
        steps: int | None,
        given: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Fills model and optimizer.

        Args:
            model: compiled, its optimizer built.
            settings: that the run must share.
            steps: batches of an epoch, where known.
            given: numbers of the optimizer, as the user gave them.

        Returns:
            The numbers that the next checkpoint keeps as given.

        Raises:
            InputError: where the checkpoint is of another run or model.
        """
        path, run, optimizer = self.path, self.run, model.optimizer
        all_or_raise(
            "same run", lambda: run_state.check_same(path, run, optimizer, settings, steps)
        )
        given_rates = extra_state.capture_rates(optimizer)
        manager.restore(path, run, model)
        say(f"resumed from {path} at step {run.step}")
        if changed := run_state.changed_numbers(run, given, optimizer):
            say(run_state.say_changed(changed))
        self._rates = extra_state.of_slots(given_rates, changed)
        extra_state.restore_rates(optimizer, self._rates)
        return run_state.still_given(run, given, changed)

    def begin_fit(self, model: keras.Model, epochs: int, others: CallbackStates) -> None:
        """Has the `fit` that begins start at the epoch of the checkpoint.

        Args:
            model: inside `fit`.
            epochs: that `fit` was asked for.
            others: the callbacks beside the one that saves.
        """
        self._others = others
        self.run = self.run.with_arrays(self.path)
        keras_internals.set_initial_epoch(model, epochs if self.run.ended else self.run.epoch)
        warn_where_done(self.path.parent, self.run.epoch, epochs, self.run.ended)

    def begin_epoch(self, model: keras.Model, epochs: Any) -> Arrays:
        """Puts callbacks and random generators back, and has a cut epoch begin where it was cut.

        Returns:
            The random generators and the learning rate at the beginning of the epoch.
        """
        run = self.run
        keras_internals.set_initial_epoch(model, None)
        self.phase = Phase.WITHIN if run.batch else Phase.DONE
        if epochs is None:
            self.phase = Phase.DONE
            say_what_is_lost(run)
            extra_state.restore(model.optimizer, self._moment("now"))
            return self._moment("now")
        replays = epochs.data.position.replays(run.data)
        if run.batch and not replays and not keras_internals.metrics_built(model):
            epochs.build_for(next(epochs.data.raw()))
        self._put_back(model, "epoch")
        if run.batch and keras_internals.metrics_built(model):
            self._fill_metrics(model)
        if run.batch or run.data is not None:
            epochs.continued = Continued(
                run.batch,
                run.log_names,
                place=lambda: self._place(model, epochs),
                build=lambda batch: self._build_metrics(model, epochs, batch),
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

    def _place(self, model: keras.Model, epochs: Any) -> bool:
        run, begun = self.run, self._moment("epoch")
        ahead = run.ahead or batches_ahead() > 0
        return epochs.data.position.go_to(
            run.data,
            run.batch,
            over=not run.batch and not epochs.steps_per_epoch,
            undo=lambda: extra_state.restore(model.optimizer, begun),
            alone=lambda: not ahead or extra_state.is_as_now(run.rng["now"]),
        )

    def _put_back(self, model: keras.Model, moment: str) -> None:
        self._others.restore(self.run.callbacks, self.run.callback_arrays)
        extra_state.restore(model.optimizer, self._moment(moment))

    def _moment(self, name: str) -> Arrays:
        return self.run.rng.get(name, {}) | self._rates

    def _build_metrics(self, model: keras.Model, epochs: Any, batch: Tree) -> None:
        if not keras_internals.metrics_built(model):
            epochs.build_for(batch)
            self._fill_metrics(model)

    def _fill_metrics(self, model: keras.Model) -> None:
        state.fill(self.path, {"metrics": state.named(model.metrics_variables)})


def say(line: str) -> None:
    """Prints a line, once for all processes."""
    if processes.is_rank_zero():
        print(line, flush=True)


def say_what_is_lost(run: RunState) -> None:
    """Prints which state of a resumed run Keras' own `fit` cannot restore."""
    begun = f"epoch {run.epoch + 1} begins again, and the" if run.batch else "the"
    say(
        f"{begun} other callbacks start from the beginning, since Keras' own fit does not say "
        "where it is; kmodels.fit(model, ...) continues at the next batch"
    )


def say_who_resumes(directory: Path, newest: int, first: Path, resumes: bool) -> None:
    """Tells that of several Checkpoints the one that stands first resumes the run.

    Args:
        directory: directory of another one.
        newest: step in it, after the one that the run begins at.
        first: directory of the one that stands first.
        resumes: whether that holds checkpoints.

    Raises:
        InputError: where it holds none.
    """
    if not resumes:
        raise InputError(
            f"{directory} holds checkpoints of a run and {first} none, whose Checkpoint stands "
            "first and resumes the run; put the other one first, or give another directory"
        )
    say(
        f"{directory} has step {newest}, but the Checkpoint that stands first resumes the run; put "
        "this one first to continue from there"
    )


def warn_where_done(directory: Path, epoch: int, epochs: int, ended: bool) -> None:
    """Warns where a `fit` continues from a run that has nothing left to do.

    Args:
        directory: directory of the run's checkpoints.
        epoch: finished epochs.
        epochs: that `fit` was asked for.
        ended: whether a callback has ended the run.
    """
    if ended:
        done = f"a callback has ended it after {epoch} epochs; give another directory to start over"
    elif epoch >= epochs:
        done = (
            f"{epoch} of {epochs} epochs are done; give more epochs to continue, or another "
            "directory to start over"
        )
    else:
        return
    if processes.is_rank_zero():
        warnings.warn(
            f"this fit trains nothing, since {directory} holds a finished run: {done}", stacklevel=2
        )
