"""Checkpoint: a callback that saves the whole state of `fit`, and resumes from it."""

import inspect
import json
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import CodeType
from typing import Any

import keras

from kmodels.checkpoint import format, manager, state
from kmodels.checkpoint.format import Arrays
from kmodels.checkpoint.preemption import Preemption
from kmodels.checkpoint.state import RunState
from kmodels.core import keras_internals, processes, remote
from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_choice, check_whole, one_line, shown
from kmodels.core.files import is_remote, local_path, unlock
from kmodels.core.metric_names import best_of
from kmodels.core.processes import all_or_raise
from kmodels.core.types import Logs
from kmodels.data.pipeline.pipeline import batches_ahead
from kmodels.data.pipeline.position import Continued
from kmodels.data.pipeline.request import FitCallback, RunningFit


class Checkpoint(Checked, FitCallback):
    """Saves all that `fit` needs to continue, and resumes from the newest checkpoint that verifies.

        checkpoint = kmodels.callbacks.Checkpoint("runs/first", every=500, keep=3, best="val_loss")
        model.fit(x, y, epochs=10, callbacks=[checkpoint, keras.callbacks.EarlyStopping()])

    The same script, run again, ends with the weights of a run that was never stopped, bit for bit
    on the same machine and backend; it can also continue on another backend. A checkpoint has the
    weights, the optimizer, running averages, states of seeds and random generators, and the state
    of the other callbacks. Within an epoch the data continues with the next batch: a loader with a
    state gets its state back (`kmodels.data.StatefulLoader`), a PyDataset is asked for batches by
    their number, and anything else is read again from the beginning of the epoch, as a warning
    says. Set `keras.utils.set_random_seed`.

    This holds in `fit` of the models of kmodels and in `kmodels.fit` of any other Keras model.
    Keras' own `fit` does not pass its position to callbacks: a run in it continues exactly only at
    the end of an epoch. An interrupted epoch begins again with the saved weights, and the other
    callbacks start from the beginning, as a printed line says.

    SIGTERM, SIGINT and SIGHUP save at the end of the batch, and end the process with 143, 130
    or 129.

    A hyperparameter of the model, its loss or its optimizer that the script has changed since the
    run began takes effect, and a line says so. Of several Checkpoints in one `fit`, such as one
    every 100 steps and one for the best epochs, the first one resumes the run and handles signals.

    A run on many devices may continue on another mesh, with another number of processes, on one
    device, and on another backend. One process writes each array whole. Each of several processes
    writes the parts that it holds, to a directory that all of them share; a signal to one of them
    stops all, after the same step.

    Args:
        directory: directory of the run's checkpoints, local or as "gs://bucket/run"; no other
            process uses it.
        every: steps between checkpoints, or seconds as in "300s"; by default one after each epoch.
            If several steps are executed at once, the first end of them counts.
        keep: number of newest checkpoints to keep.
        best: name of a log of an epoch, such as "val_loss"; the checkpoint with its best value is
            kept too.
        mode: "min", "max", or "auto", which depends on words of the name such as loss, error,
            accuracy and iou; another name needs one of the others.
        resume: False refuses a directory that holds checkpoints.
        only_trainable: leaves frozen weights out and saves a hash of them; by default if the model
            has LoRA adapters.
        origin: where the frozen weights came from, for messages.
        settings: plain values that a resumed run must share.
        stop_on_non_finite: raises if the loss of a step is not finite.

    Attributes:
        epoch: finished epochs.
        batch: finished batches of the running epoch.
        step: finished batches of all epochs.
        began_with: state that the run was restored from; of a new run that of its beginning.
        before_save: called before the state is read.
        how_to_go_on: end of the line that is printed when a signal stops the run.

    Raises:
        InputError: for wrong settings; in `fit`, if another run uses the directory, if no
            checkpoint in it verifies, or if they are of another run.
    """

    checks_methods = False  # the loop calls them
    # It saves its own state, so other Checkpoints leave it out.
    saves_itself = True

    def __init__(
        self,
        directory: str | Path,
        every: int | str | None = None,
        keep: int = 2,
        best: str | None = None,
        mode: str = "auto",
        resume: bool = True,
        only_trainable: bool | None = None,
        origin: str | None = None,
        settings: dict[str, Any] | None = None,
        stop_on_non_finite: bool = True,
    ):
        super().__init__()
        to_local = remote.local_directory if is_remote(directory) else local_path
        self.directory = to_local(directory)
        check_choice("mode", mode, ("auto", "min", "max"))
        known = best_of(best or "loss") if mode == "auto" else mode
        if known is None:
            raise InputError(
                f"best is {best!r}, which does not say whether more is better; give mode='min' or "
                "mode='max'"
            )
        check_whole("keep", keep)
        self.best, self.mode = best, known
        self._interval, self._keep, self._resume = SaveInterval(every), keep, resume
        self._only_trainable, self._origin = only_trainable, shown(origin)
        try:  # As state.json gives them back, so that a resumed run compares equal.
            self._settings = json.loads(json.dumps(shown(settings or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"settings cannot be written as JSON: {one_line(error)}") from None
        self._stop_on_non_finite = stop_on_non_finite
        self.before_save: Callable[[], object] = lambda: None
        self.how_to_go_on = "run it again to go on"
        self.preemption = Preemption()
        self._writer = manager.BackgroundWriter()
        self._prepared = False
        self._reset()

    def _reset(self) -> None:
        self.epoch = self.batch = self.step = 0
        # Whether an epoch of this `fit` logged the metric `best`.
        self._has_best = False
        # The first Checkpoint of the `fit`, which resumes the run and handles signals.
        self._leader = self
        self.began_with, self._path = RunState(0), None
        # Until the epoch of the checkpoint begins; until the hook is reached that saved it.
        self._resumes = self._catches_up = False
        self._numbers: Mapping[str, Any] = {}
        self._changed_rates: Arrays = {}
        self._log_names: tuple[str, ...] = ()
        self._last_loss: float | None = None
        self._base: dict[str, Any] | None = None
        # Step of the last checkpoint that was read or restored.
        self._saved_step = -1
        # A state that was read and is not yet written.
        self._pending: tuple[RunState, dict[str, Arrays]] | None = None

    # Restoring

    def prepare(
        self,
        model: keras.Model,
        steps_per_epoch: int | None = None,
        beside: Iterable[keras.callbacks.Callback] = (),
    ) -> Path | None:
        """Reserves the directory and restores model and optimizer; `fit` does it if nobody did.

        Args:
            model: compiled.
            steps_per_epoch: batches of an epoch, or None if unknown.
            beside: the other callbacks of the `fit`, if known.

        Returns:
            The checkpoint that the model was filled from, or None.
        """
        self._reserve(model)
        self._numbers = state.given_numbers(model, beside)
        if (newest := manager.newest(self.directory)) is not None:
            self._restore(model, steps_per_epoch, *newest)
        self._prepared = True
        return self._path

    def _reserve(self, model: keras.Model) -> None:
        self.wait()
        state.built_optimizer(model)
        manager.take(self.directory, self._resume)
        self._reset()
        self.preemption.reset()
        if self._only_trainable is None:
            names = (variable.name for variable in model.trainable_variables)
            self._only_trainable = any(name.startswith("lora_") for name in names)
        if self._only_trainable:
            self._base = {"sha256": state.base_digest(model), "origin": self._origin}

    def _restore(
        self,
        model: keras.Model,
        steps: int | None,
        path: Path,
        run: RunState,
        passed_over: list[str],
    ) -> None:
        for reason in passed_over:
            _say(f"passed over a damaged checkpoint: {reason}")
        optimizer, numbers = model.optimizer, self._numbers
        all_or_raise(
            "same run", lambda: state.check_same(path, run, optimizer, self._settings, steps)
        )
        rates = state.rates(optimizer)
        manager.restore(path, run, model)
        _say(f"resumed from {path} at step {run.step}")
        if changed := state.changed_numbers(run, numbers, optimizer):
            parts = [f"{name} was {former}, is {new}" for name, (former, new) in changed.items()]
            _say(
                "settings were changed since the checkpoint, and the new values are used: "
                f"{state.shortened(parts)}"
            )
        self._changed_rates = {k: v for k, v in rates.items() if k in changed}
        state.restore_rates(optimizer, self._changed_rates)
        # As given, if a callback changed it.
        former = run.numbers or {}
        self._numbers = {k: v if k in changed else former.get(k, v) for k, v in numbers.items()}
        self._path, self.began_with, self._resumes = path, run, True
        self.epoch, self.batch, self.step = run.epoch, run.batch, run.step
        self._saved_step = run.step
        if (keeper := manager.keeper_of(self.directory)) is not None:
            keeper.resume(manager.up_to(path), run, self._compared)

    # The hooks of a fit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Reserves the directory, and restores model and optimizer from the newest checkpoint."""
        fit = self.fit or RunningFit([self])  # Keras' own fit passes nothing to its callbacks.
        if fit.epochs is not None and not self.model.built:
            fit.epochs.build(at_once=True)  # The optimizer needs the weights.
        leader, *others = [one for one in fit.callbacks if isinstance(one, Checkpoint)]
        if leader is not self:
            self._follow(leader)
        elif len({one.directory.resolve() for one in (self, *others)}) <= len(others):
            raise InputError(
                f"two Checkpoints of one fit have the directory {self.directory}; give each its own"
            )
        elif not self._prepared:
            self.prepare(self.model, self.params.get("steps"), fit.callbacks)
        self._prepared = False  # A `fit` after one that an error ended restores again.
        self._others = state.before_fit(one for one in fit.callbacks if one is not self)
        self._steps = self.params.get("steps")
        self._interval.begin(self.step)
        # None in Keras' own fit, which asks for batches ahead of its steps.
        self._epochs = fit.epochs
        if leader is not self:
            return
        self.preemption.begin(None if fit.epochs is not None else _code_of_fit(self.model))
        if fit.epochs is not None:
            fit.epochs.data.position.watch(lambda: self.step)
            if not self._resumes:
                fit.epochs.data.position.check(format.arrays_of_data)
        if not self._resumes:
            return
        assert self._path is not None  # since it resumes
        run = self.began_with = self.began_with.with_arrays(self._path)
        lost = [name for name, changes in run.callbacks.items() if changes]
        if lost := [name for name in lost if name not in self._others]:
            _say(f"the run had other callbacks, whose state is dropped: {', '.join(lost)}")
        epochs = self.params["epochs"]
        keras_internals.set_initial_epoch(self.model, epochs if run.ended else run.epoch)
        if run.ended or run.epoch >= epochs:
            self._warn_done(epochs)

    def _follow(self, leader: "Checkpoint") -> None:
        """Starts at the step of the first Checkpoint of this `fit`, which alone resumes."""
        self._reserve(self.model)
        self._leader, self._numbers, self.step = leader, leader._numbers, leader.step
        newest = manager.newest_step(self.directory)
        if newest > leader.step and not leader._resumes:
            raise InputError(
                f"{self.directory} holds checkpoints of a run and {leader.directory} none, whose "
                "Checkpoint stands first and resumes the run; put the other one first, or give "
                "another directory"
            )
        if newest > leader.step:
            _say(
                f"{self.directory} has step {newest}, but the Checkpoint that stands first resumes "
                "the run; put this one first to continue from there"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Writes the checkpoint of the epoch before; begins an epoch that was cut in its middle."""
        self._write()
        self._leave_if_asked()
        # The training's averages while validation overwrites them, and generators before it.
        self._train_metrics: Arrays | None = None
        self._before_validation: Arrays | None = None
        if self._resumes:
            self._epoch_moment = self._resume_epoch()
            return
        self.epoch, self.batch = epoch, 0
        if (leader := self._leader) is not self:
            self.epoch, self.batch = leader.epoch, leader.batch
            self._log_names = leader._log_names
        self._epoch_moment = state.moment(self.model.optimizer)

    def _resume_epoch(self) -> Arrays:
        """Restores callbacks and generators, and has a cut epoch continue at its next batch.

        Returns:
            Random generators and learning rates at the beginning of the epoch.
        """
        run, model, epochs = self.began_with, self.model, self._epochs
        keras_internals.set_initial_epoch(model, None)
        self._resumes, self._log_names = False, run.log_names
        if epochs is None:
            _say_what_is_lost(run)
            self.batch = 0
            state.restore_moment(model.optimizer, self._moment("now"))
            return self._moment("now")
        self._catches_up = run.batch > 0
        position = epochs.data.position
        ahead = run.ahead or batches_ahead() > 0
        replays = position.replays(run.data)
        if run.batch and not replays and not keras_internals.metrics_built(model):
            epochs.build_for(next(epochs.data.raw()))
        self._put_back("epoch")
        if run.batch and keras_internals.metrics_built(model):
            self._fill_metrics()

        def place() -> bool:
            return position.go_to(
                run.data,
                run.batch,
                over=not run.batch and not epochs.steps_per_epoch,
                undo=lambda: state.restore_moment(model.optimizer, self._moment("epoch")),
                alone=lambda: not ahead or state.host_generators_are(run.rng["now"]),
            )

        def build(batch: Any) -> None:
            if not keras_internals.metrics_built(model):
                epochs.build_for(batch)
                self._fill_metrics()

        if run.batch or run.data is not None:
            epochs.continued = Continued(run.batch, run.log_names, place, build)
        return self._moment("epoch")

    def go_on(self) -> None:
        """Restores the state within the epoch that was cut, as its data is there."""
        self._catch_up(in_validation=False)
        self._ask()
        self._leave_if_asked()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Counts a step, and checks its loss."""
        logs = logs or {}
        self.step += batch + 1 - self.batch
        self.batch, self._log_names = batch + 1, tuple(logs)
        loss = logs.get("loss")
        # A loss that the device has not computed yet is no float, and nothing waits for it.
        if isinstance(loss, float) and math.isfinite(loss):
            self._last_loss = loss
        elif isinstance(loss, float) and self._stop_on_non_finite:
            keras_internals.sync_values(self.model)
            try:
                rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            except InputError:  # An optimizer of optax need not show it.
                rate = math.nan
            raise self.not_finite(loss, self.step, rate, self._last_loss)
        if self.fit is None:
            self.after_step()

    def after_step(self) -> None:
        """Saves if a checkpoint is due, and leaves after a signal."""
        is_due = self._ask()
        if self.preemption.signum is not None or (is_due and self.batch != self._steps):
            self.save()
        self._leave_if_asked()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Keeps the training's averages, which validation overwrites, and the generators."""
        self._catch_up(in_validation=True)
        self._train_metrics = state.copied(state.named(self.model.metrics_variables), "metrics")
        self._before_validation = state.moment(self.model.optimizer)

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Saves and leaves after a signal; the validation is repeated as a whole."""
        self._ask()
        if self.preemption.signum is not None:
            optimizer = self.model.optimizer
            if getattr(optimizer, "swapped", False):
                keras_internals.sync_values(self.model)
                optimizer.swap_average()
            self.save()
            self._leave_if_asked()

    def on_test_end(self, logs: Logs = None) -> None:
        """Ends the validation; the model's averages are its own until the next epoch."""
        self._before_validation = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Reads the state if a checkpoint is due; it is written after the other callbacks."""
        complete = self._steps is None or self.batch >= self._steps
        numbers = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, int | float)}
        if complete:
            self.epoch, self.batch = epoch + 1, 0
        self._has_best |= self.best in numbers
        try:
            is_best = complete and self._is_best(numbers)
        except InputError:  # The epoch is not lost.
            self._read(numbers)
            self._write()
            self.wait()
            raise
        ends = self.model.stop_training or epoch + 1 == self.params["epochs"]
        is_due = self._ask(at_once=True) or self._interval.once_an_epoch
        if is_due or ends or is_best or self.preemption.signum is not None:
            self._read(numbers)

    def on_train_end(self, logs: Logs = None) -> None:
        """Waits until all is written, and releases the directory."""
        if self._resumes:  # There was nothing left to train.
            keras_internals.set_initial_epoch(self.model, None)
            state.restore_callbacks(self._others, self.began_with)
        elif self.best is not None and not self._has_best:
            warnings.warn(
                f"no epoch logged {self.best}, so no checkpoint is kept as the best; give "
                "validation_data, or another best",
                stacklevel=2,
            )
        self._write(trained=True)
        # In this order: a signal may come while the last checkpoint is written.
        self.wait()
        self._ask(at_once=True)
        self._release()
        self._leave_if_asked()

    def leave_fit(self) -> None:
        """Gives signals their former meaning, also if an error ends the `fit`."""
        super().leave_fit()
        self.preemption.end()

    # Saving

    def save(self) -> None:
        """Saves now, inside `fit`, in the background.

        Raises:
            InputError: outside of it.
        """
        if self.model is None:
            raise InputError("a Checkpoint saves inside fit only; give it to fit as a callback")
        self._read({})
        self._write()

    def wait(self) -> None:
        """Waits until the checkpoint is on the disk, and raises the error of its writing."""
        self._writer.wait()

    def _read(self, logs: Mapping[str, float]) -> None:
        """Copies the state to the host, unless this step was saved and has no logs to add."""
        if self.step == self._saved_step and not logs:
            return
        self.before_save()
        self.wait()  # There is one copy at a time.
        model = self.model
        keras_internals.sync_values(model)
        epochs = self._epochs
        run = RunState(
            step=self.step,
            epoch=self.epoch,
            batch=self.batch,
            steps_per_epoch=self._steps,
            in_validation=self._before_validation is not None,
            logs={k: v if math.isfinite(v) else None for k, v in logs.items()},
            log_names=self._log_names,
            base=self._base,
            numbers=dict(self._numbers),
            settings=dict(self._settings),
            ahead=epochs is None or batches_ahead() > 0,
            loss_normalization=getattr(model, "loss_normalization", "positions"),
            data=None if epochs is None else epochs.data.position.state(),
            **state.identity(model.optimizer, self.epoch),
        )
        variables = state.parts(model, bool(self._only_trainable))
        arrays = {part: state.copied(values, part) for part, values in variables.items()}
        if self._train_metrics is not None:
            arrays["metrics"] = self._train_metrics
        self._pending = run, arrays

    def _write(self, trained: bool = False) -> None:
        """Writes the state that was read, with the present state of the other callbacks.

        Args:
            trained: True if the training is over; another one would begin the next epoch.
        """
        if self._pending is None:
            return
        (run, arrays), self._pending = self._pending, None
        now = self._before_validation or state.moment(self.model.optimizer)
        begun = self._epoch_moment if run.batch else now
        if trained and not run.batch:
            begun = {name: values for name, values in now.items() if not state.is_rate(name)}
        callback_arrays: Arrays = {}
        run = replace(
            run,
            callbacks=state.callback_changes(self._others, callback_arrays),
            # A callback that ended the training had its reasons at the end of the epoch.
            ended=bool(self.model.stop_training) and run.batch == 0,
            rng={"now": now, "epoch": begun},
            callback_arrays=callback_arrays,
        )
        rates = {name: values for name, values in now.items() if state.is_rate(name)}
        arrays["optimizer"] = format.replace(arrays["optimizer"], rates)
        keeper = manager.keeper_of(self.directory)
        keep = self._keep if keeper is None else None
        written = self._writer.submit(
            lambda: manager.save(self.directory, run, arrays, keep, self.best, self.mode)
        )
        self._saved_step = run.step
        if keeper is not None:
            path = manager.path_of(self.directory, run.step)
            keeper.tell(path, run, written, self._compared)
        self._interval.restart()

    @property
    def _compared(self) -> manager.Best | None:
        return None if self.best is None else manager.Best(self.best, self.mode)

    def _is_best(self, logs: Mapping[str, float]) -> bool:
        """Compares an epoch with those whose checkpoints are kept; rank zero decides for all."""
        name = self.best
        if name is None:
            return False
        self.wait()
        if name not in logs:
            if name.startswith("val_") and not any(n.startswith("val_") for n in logs):
                return False  # Not every epoch need be validated.
            raise InputError(
                f"best is {name!r}, which no epoch logs; choose one of {', '.join(logs)}"
            )

        def compare() -> bool:
            checkpoints = manager.list_checkpoints(self.directory)
            former = manager.find_best(checkpoints, name, self.mode)
            if former is None:
                return True
            return logs[name] < former[0] if self.mode == "min" else logs[name] > former[0]

        return processes.broadcast("best", compare)

    # Parts

    def not_finite(self, loss: float, step: int, rate: float, last: float | None) -> InputError:
        """Waits for the checkpoint being written, and returns the error for a non-finite loss.

        Args:
            loss: the loss.
            step: its step.
            rate: learning rate of the step.
            last: the last loss that was finite, or None.
        """
        self.wait()
        saved = manager.list_checkpoints(self.directory)
        good = f"checkpoint {saved[0].name} is good" if saved else "no checkpoint was made"
        former = (
            "there was no finite one" if last is None else f"the last finite one was {last:.4g}"
        )
        return InputError(
            f"the loss is {loss} at step {step} (learning rate {rate:.3g}); {former}; {good}; "
            "check the data or the learning rate"
        )

    def _ask(self, at_once: bool = False) -> bool:
        """Exchanges signals and errors with all processes; returns True if a checkpoint is due."""
        due = self._interval.now(self.step)
        failed, by_clock = self.preemption.exchange(self._writer.failed, due, at_once)
        if failed:
            self.wait()
        return due if self._interval.seconds is None else by_clock

    def _release(self) -> None:
        self.wait()
        self.preemption.end()
        unlock(self.directory)

    def _leave_if_asked(self) -> None:
        """Ends the process after a signal, once all is written."""
        if self.preemption.signum is not None:
            self._release()
            self.preemption.leave(self.step, self.how_to_go_on)

    def _catch_up(self, in_validation: bool) -> None:
        """Restores the state in the hook that saved: callbacks before it were called again."""
        if self._catches_up and self.began_with.in_validation == in_validation:
            self._catches_up = False
            keras_internals.sync_values(self.model)
            self._put_back("now")

    def _put_back(self, moment: str) -> None:
        state.restore_callbacks(self._others, self.began_with)
        state.restore_moment(self.model.optimizer, self._moment(moment))

    def _moment(self, name: str) -> Arrays:
        return self.began_with.rng.get(name, {}) | self._changed_rates

    def _fill_metrics(self) -> None:
        assert self._path is not None  # since it resumes
        state.fill(self._path, {"metrics": state.named(self.model.metrics_variables)})

    def _warn_done(self, epochs: int) -> None:
        run = self.began_with
        if run.ended:
            done = (
                f"a callback has ended it after {run.epoch} epochs; give another directory to "
                "start over"
            )
        else:
            done = (
                f"{run.epoch} of {epochs} epochs are done; give more epochs to continue, or "
                "another directory to start over"
            )
        if processes.is_rank_zero():
            warnings.warn(
                f"this fit trains nothing, since {self.directory} holds a finished run: {done}",
                stacklevel=2,
            )


class SaveInterval:
    """Steps or seconds between checkpoints.

    Args:
        every: steps as in 500 or "500", seconds as in "300s"; None and 0 mean once an epoch.

    Raises:
        InputError: for anything else.
    """

    def __init__(self, every: int | str | None):
        self.steps: int | None = None
        self.seconds: float | None = None
        self.begin(0)
        if every in (None, 0, "0"):
            return
        match = re.fullmatch(r"([0-9]{1,18})(s?)", str(every))
        if match is None or int(match[1]) == 0:
            raise InputError(
                f"the distance of checkpoints is {every!r}; give steps as in 500, or seconds as in "
                "300s"
            )
        if match[2]:
            self.seconds = float(match[1])
        else:
            self.steps = int(match[1])

    @property
    def once_an_epoch(self) -> bool:
        """Returns True if neither steps nor seconds were given."""
        return self.steps is None and self.seconds is None

    def begin(self, step: int) -> None:
        """Begins a run, or continues it, after this step."""
        self._counted = self._reached = step
        self.restart()

    def restart(self) -> None:
        """Starts the clock again: a checkpoint was made, or the run begins."""
        self._since = perf_counter()

    def now(self, step: int) -> bool:
        """Returns True if a checkpoint is due after this step.

        Keras reports no step within those that it executes together, so a checkpoint that was due
        within them is due at their end.
        """
        if self.seconds is not None:
            return perf_counter() - self._since >= self.seconds
        if self.steps is None:
            return False
        if step // self.steps > self._counted // self.steps:
            self._counted = self._reached = step
        return step == self._reached


def _code_of_fit(model: keras.Model) -> CodeType | None:
    """Returns the code of Keras' `fit` if it runs: no callback hook follows its errors."""
    code = getattr(inspect.unwrap(type(model).fit), "__code__", None)
    running = any(frame.f_code is code for frame, _ in traceback.walk_stack(None))
    return code if running else None


def _say(line: str) -> None:
    if processes.is_rank_zero():
        print(line, flush=True)


def _say_what_is_lost(run: RunState) -> None:
    begun = f"epoch {run.epoch + 1} begins again, and the" if run.batch else "the"
    _say(
        f"{begun} other callbacks start from the beginning, since Keras' own fit does not say "
        "where it is; kmodels.fit(model, ...) continues at the next batch"
    )
