"""A run of `fit` that is saved, from the directory that it takes to the last write."""

import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import keras

from kmodels.checkpoint import extra_state, format, manager, run_state
from kmodels.checkpoint.extra_state import CallbackStates
from kmodels.checkpoint.preemption import Preemption
from kmodels.checkpoint.resuming import Phase, Resumer, say, say_who_resumes
from kmodels.checkpoint.run_state import RunState
from kmodels.checkpoint.saving import BestEpoch, FiniteLoss, SaveInterval, Saver
from kmodels.core import keras_internals
from kmodels.core.files import unlock
from kmodels.core.types import Logs
from kmodels.data.pipeline.pipeline import batches_ahead
from kmodels.data.pipeline.request import FitCallback, RunningFit


class FitRun:
    """Knows where a run is, and has its parts fill the model, save it and stop.

    The arguments are those of `Checkpoint`, made into the parts that have them.

    Attributes:
        epoch: finished epochs.
        batch: finished batches of the running epoch.
        step: finished batches of all.
        resumer: resumer of the checkpoint that the run continues from; None in one that starts
            over.
        given: numbers of the optimizer as the user gave them.
        leader: the run of the first Checkpoint of the `fit`, which resumes and hears signals.
        log_names: names of the logs of a step.
        before_save: called before the state is read.
        how_to_go_on: end of the line that is said where a signal stops the run.
    """

    def __init__(
        self,
        directory: Path,
        interval: SaveInterval,
        best: BestEpoch,
        saver: Saver,
        settings: Mapping[str, Any],
        resume: bool,
    ):
        self.directory, self.interval, self.best, self.saver = directory, interval, best, saver
        self._settings, self._resume = settings, resume
        self.preemption = Preemption()
        self.before_save: Callable[[], object] = lambda: None
        self.how_to_go_on = "run it again to go on"
        self._restart()

    def _restart(self) -> None:
        self.epoch = self.batch = self.step = 0
        self.log_names: tuple[str, ...] = ()
        self.leader: FitRun = self
        self.finite_loss = FiniteLoss(self.directory)
        self.saver.begin()
        self.resumer: Resumer | None = None
        self.given: Mapping[str, Any] = {}

    def open(self, model: keras.Model) -> None:
        """Takes the directory for a new `fit`, or one that continues."""
        self.saver.writer.wait()
        manager.take(self.directory, self._resume)
        self._restart()
        self.preemption.begin()
        self.saver.look_at(model)

    def prepare(self, model: keras.Model, steps: int | None, beside: Iterable[Any]) -> Path | None:
        """See `Checkpoint.prepare`."""
        self.open(model)
        self.given = run_state.given_numbers(model.optimizer, beside)
        if (found := manager.newest(self.directory)) is None:
            return None
        path, run, passed_over = found
        for reason in passed_over:
            say(f"passed over a damaged checkpoint: {reason}")
        self.resumer = Resumer(path, run)
        self.given = self.resumer.restore(model, self._settings, steps, self.given)
        self.epoch, self.batch, self.step = run.epoch, run.batch, run.step
        self.saver.saved_step = run.step
        if (keeper := self.saver.keeper) is not None:
            keeper.resume(manager.up_to(path), run, self.best.log)
        return path

    @property
    def filled(self) -> Resumer | None:
        """Returns what fills the epoch that comes next; None where that is a new one."""
        resumer = self.resumer
        return None if resumer is None or resumer.phase is not Phase.FILLED else resumer

    def follow(self, leader: "FitRun", model: keras.Model) -> None:
        """Begins where the first Checkpoint of this `fit` does, and saves beside it."""
        self.open(model)
        self.leader, self.given = leader, leader.given
        newest = manager.newest_step(self.directory)
        if newest > leader.step:
            say_who_resumes(self.directory, newest, leader.directory, leader.filled is not None)
        self.step = leader.step

    def begin_fit(
        self,
        model: keras.Model,
        params: Mapping[str, Any],
        others: CallbackStates,
        fit: RunningFit,
    ) -> None:
        """Begins a `fit` of the directory that was taken."""
        self._model, self._others, self.steps = model, others, params.get("steps")
        self.interval.begin(self.step)
        self.epochs = fit.epochs
        if self.leader is not self:
            return
        self.preemption.stop.begin(None if self.epochs is not None else _code_of_fit(model))
        if self.epochs is not None:
            self.epochs.data.position.watch(lambda: self.step)
        if (resumer := self.filled) is not None:
            resumer.begin_fit(model, params["epochs"], others)
        elif self.epochs is not None:
            self.epochs.data.position.check(format.arrays_of_data)

    def save(self) -> None:
        """Saves now."""
        self.read({})
        self.finish()

    def read(self, logs: Mapping[str, float]) -> None:
        """Copies the state to the host, unless this step was saved and has no logs to add."""
        if self.step == self.saver.saved_step and not logs:
            return
        self.before_save()
        self.saver.writer.wait()  # There is one copy at a time.
        keras_internals.sync_values(self._model)
        own = self.epochs is None  # Keras' loop, which asks for batches ahead of its steps
        about = run_state.describe(self._model.optimizer, self._settings, self.given, self.epoch)
        run = RunState(
            step=self.step,
            epoch=self.epoch,
            batch=self.batch,
            steps_per_epoch=self.steps,
            logs={k: v if math.isfinite(v) else None for k, v in logs.items()},
            log_names=self.log_names,
            base=self.saver.base,
            ahead=own or batches_ahead() > 0,
            data=None if own else self.epochs.data.position.state(),
            **about,
        )
        self.saver.read(run, self._model)

    def finish(self, trained: bool = False) -> None:
        """Has what was read written, with what the other callbacks know by now."""
        if self.saver.finish(self._model, self._others, trained):
            self.interval.restart()

    def ask(self, at_once: bool = False) -> bool:
        """Receives signals and errors of all processes; returns whether a checkpoint is due."""
        due, writer = self.interval.now(self.step), self.saver.writer
        failed, by_clock = self.preemption.ask(writer.failed, due, at_once)
        if failed:
            writer.wait()
        return due if self.interval.seconds is None else by_clock

    def let_go(self) -> None:
        """Waits until all is written, and gives signals and directory free."""
        self.saver.writer.wait()
        self.preemption.stop.end()
        unlock(self.directory)

    def leave_if_asked(self) -> None:
        """Ends the process where a signal came, once all is written."""
        if self.preemption.signum is not None:
            self.let_go()
            self.preemption.leave(self.step, self.how_to_go_on)


def _code_of_fit(model: keras.Model) -> CodeType | None:
    """Returns the code of Keras' `fit` if it runs: nobody says when an error ends it."""
    code = getattr(inspect.unwrap(type(model).fit), "__code__", None)
    running = any(frame.f_code is code for frame, _ in traceback.walk_stack(None))
    return code if running else None


class FitHooks(FitCallback):
    """Moves a run on with the hooks of one `fit` after another.

    Args:
        run: that is saved.
        checks_loss: raises where the loss of a step is not finite.
    """

    def __init__(self, run: FitRun, checks_loss: bool):
        super().__init__()
        self.run, self._checks_loss = run, checks_loss

    def leave_fit(self) -> None:
        """Gives signals their former meaning, also where an error ends the `fit`."""
        super().leave_fit()
        self.run.preemption.stop.end()

    def go_on(self) -> None:
        """The epoch of the checkpoint goes on: the other callbacks know again what they did."""
        self._reach(in_validation=False)
        self.run.ask()
        self.run.leave_if_asked()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Finishes the checkpoint of the epoch before; a cut epoch begins where it was cut."""
        run = self.run
        run.finish()
        run.leave_if_asked()
        if run.leader is run and (resumer := run.filled) is not None:
            run.log_names = resumer.run.log_names
            begun = resumer.begin_epoch(self.model, run.epochs)
            run.batch = 0 if run.epochs is None else run.batch
        else:
            run.epoch, run.batch = epoch, 0
            if run.leader is not run:
                run.epoch, run.batch = run.leader.epoch, run.leader.batch
                run.log_names = run.leader.log_names
            begun = extra_state.capture(self.model.optimizer)
        run.saver.memory.begin(begun)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Counts a step, and looks at its loss."""
        run, logs = self.run, logs or {}
        run.step += batch + 1 - run.batch
        run.batch, run.log_names = batch + 1, tuple(logs)
        self._check(logs.get("loss"))
        if self.fit is None:
            self.after_step()

    def after_step(self) -> None:
        """Saves where it is time, and leaves where a signal came."""
        run = self.run
        is_due = run.ask()
        if run.preemption.signum is not None or (is_due and run.batch != run.steps):
            run.save()
        run.leave_if_asked()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Keeps the training's averages, which validation writes over, and the random states."""
        self._reach(in_validation=True)
        self.run.saver.memory.begin_validation(self.model)

    def on_test_end(self, logs: Logs = None) -> None:
        """Validation is over."""
        self.run.saver.memory.end_validation()

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Saves and leaves where a signal came."""
        run = self.run
        run.ask()
        if run.preemption.signum is not None:
            optimizer = self.model.optimizer
            if getattr(optimizer, "swapped", False):
                keras_internals.sync_values(self.model)
                optimizer.swap_average()
            run.save()
            run.leave_if_asked()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Reads the state where it is time; it is written once the other callbacks are done."""
        run = self.run
        complete = run.steps is None or run.batch >= run.steps
        numbers = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, int | float)}
        if complete:
            run.epoch, run.batch = epoch + 1, 0
        is_best = False
        if complete and run.best.name is not None:
            run.saver.writer.wait()
            is_best = run.best.is_best(numbers)
        ends = self.model.stop_training or epoch + 1 == self.params["epochs"]
        is_due = run.ask(at_once=True) or run.interval.once_an_epoch
        if is_due or ends or is_best or run.preemption.signum is not None:
            run.read(numbers)

    def on_train_end(self, logs: Logs = None) -> None:
        """Waits until all is written, and lets go of the directory."""
        run = self.run
        if run.resumer is not None:
            run.resumer.end_fit(self.model)
        run.finish(trained=True)
        # In this order: a signal may come while the last checkpoint is written.
        run.saver.writer.wait()
        run.ask(at_once=True)
        run.let_go()
        run.leave_if_asked()

    def _reach(self, in_validation: bool) -> None:
        if (resumer := self.run.leader.resumer) is not None:
            resumer.reach(self.model, in_validation)

    def _check(self, loss: Any) -> None:
        run = self.run
        if self._checks_loss and not run.finite_loss.is_finite(loss):
            run.saver.writer.wait()
            keras_internals.sync_values(self.model)
            rate = keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)
            raise run.finite_loss.error(loss, run.step, float(rate))
