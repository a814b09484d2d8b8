"""Checkpoint: a callback that keeps the whole state of `fit` on the disk, and goes on from it."""

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras

from kmodels.checkpoint import format, manager, rng_and_lr, run_directory, run_identity, state
from kmodels.checkpoint.async_writer import BackgroundWriter
from kmodels.checkpoint.best_epochs import is_best
from kmodels.checkpoint.callback_state import CallbackStates
from kmodels.checkpoint.consensus import Requests, all_or_raise
from kmodels.checkpoint.finite_loss import FiniteLoss
from kmodels.checkpoint.preemption import Interrupted, StopRequest
from kmodels.checkpoint.replay import Replay
from kmodels.checkpoint.resume import ResumePlan, warn_where_done
from kmodels.checkpoint.save_interval import SaveInterval
from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_whole
from kmodels.core.files import unlock
from kmodels.core.remote import mirror
from kmodels.distribution import processes

_HIGHER_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "score")
Pending = tuple[dict[str, Any], dict[str, state.Arrays]]


class Checkpoint(keras.callbacks.Callback):
    """Saves all that `fit` needs to go on, and goes on from the newest checkpoint that verifies.

        checkpoint = kmodels.callbacks.Checkpoint("runs/first", every=500, keep=3, best="val_loss")
        model.fit(x, y, epochs=10, callbacks=[checkpoint, keras.callbacks.EarlyStopping()])

    The same script, run again, ends with the weights of a run that was never stopped, bit for bit
    on the same machine and backend; on another backend it goes on too. A checkpoint has weights,
    optimizer, running averages, states of seeds and random generators, and what the other callbacks
    know. Batches of an unfinished epoch are gone through again, without training on them, so the
    data must come in the same order: set `keras.utils.set_random_seed`.

    SIGTERM and SIGINT save at the end of the batch, and end the process with 143 or 130.

    A number of the optimizer that was changed since the run began holds, and a line says so. Of
    several Checkpoints in one `fit`, such as one every 100 steps and one for the best epochs, the
    first one resumes the run and hears signals.

    A run on many devices may go on over another mesh, with another number of processes, on one
    device, and on another backend. One process writes each array whole. Of several each writes the
    parts that it holds, to a directory that all of them see; a signal to one of them stops all,
    after the same step.

    Args:
        directory: of the run's checkpoints, local or as "gs://bucket/run"; no other process has it.
        every: steps between checkpoints, or seconds as in "300s"; by default one after each epoch.
            Where Keras executes several steps at once, the first end of them counts.
        keep: how many of the newest stay.
        best: name of a log of an epoch, such as "val_loss"; the checkpoint with its best value
            stays too.
        mode: "min", "max", or "auto", which goes by the name.
        resume: False refuses a directory that holds checkpoints.
        only_trainable: leaves frozen weights out and keeps a hash of them; by default where the
            model has LoRA adapters.
        origin: where the frozen weights came from, for messages.
        settings: plain values that a resumed run must share.
        stop_on_non_finite: raises where the loss of a step is not finite.

    Attributes:
        epoch: finished epochs.
        batch: finished batches of the running epoch.
        step: finished batches of all.
        validated: whether the epoch of the checkpoint that was restored, cut or not, had its end.
        before_save: called before the state is read.
        how_to_go_on: end of the line that is said where a signal stops the run.

    Raises:
        InputError: for wrong settings; in `fit`, where another run uses the directory, where no
            checkpoint in it verifies, or where they are of another run.
    """

    # What it knows is in its own checkpoints, and in no other Checkpoint's.
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
        check_whole("keep", keep)
        if mode not in ("auto", "min", "max"):
            raise InputError(f"mode is {mode!r}; choose one of auto, min, max")
        if mode == "auto":
            mode = "max" if best and any(part in best for part in _HIGHER_IS_BETTER) else "min"
        self.directory = mirror.local_directory(directory)
        self.due = SaveInterval(every)
        self.keep, self.best, self.mode, self.resume = keep, best, mode, resume
        self.only_trainable, self.origin = only_trainable, origin
        self.settings = settings or {}
        self.stop_on_non_finite = stop_on_non_finite
        self.epoch = self.batch = self.step = 0
        self.validated = False
        self.before_save: Callable[[], object] = lambda: None
        self.how_to_go_on = "run it again to go on"
        self.stop = StopRequest()
        self._writer = BackgroundWriter()
        self._begin_run()

    def _begin_run(self) -> None:
        self._restored: tuple[Path, dict[str, Any]] | None = None
        self._others: CallbackStates | None = None
        self._pending: Pending | None = None
        self._before_validation: state.Arrays | None = None
        self._moments: dict[str, state.Arrays] = {}
        self._going_on: ResumePlan | None = None
        self._replayed = 0
        self._saved_step = -1
        self._finite_loss = FiniteLoss(self.directory)
        self._log_names: list[str] = []
        self._base: dict[str, Any] | None = None
        self._leader: Checkpoint | None = None
        self._given: dict[str, Any] = {}
        self._new_rates: state.Arrays = {}
        self._requests = Requests()
        self._begun = False

    # What fit calls

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes the directory, and puts the newest state into model and optimizer."""
        beside, code = keras_internals.fit_callbacks(self)
        first, *more = [c for c in beside if isinstance(c, Checkpoint)]
        if first is not self:
            self._follow(first)
        elif len({c.directory.resolve() for c in (self, *more)}) <= len(more):
            raise InputError(
                f"two Checkpoints of one fit have the directory {self.directory}; give each its own"
            )
        elif not self._begun:
            self.prepare(self.model, self.params.get("steps"), beside)
        self._begun = False  # A `fit` after one that an error ended restores anew.
        if isinstance(step := self.model.train_function, Replay):
            step.end()  # A former `fit` was left within its replay.
        self._others = CallbackStates(c for c in beside if c is not self)
        self.due.begin(self.step)
        if self._leader is None:
            self.stop.begin(code)
        if self._restored is not None:
            self._going_on = ResumePlan(*self._restored, self._others, self._new_rates)
            ended = self._restored[1]["ended"]
            keras_internals.set_initial_epoch(
                self.model, self.params["epochs"] if ended else self.epoch
            )
            keras_internals.set_epoch_of_fit(self, self.epoch)
            warn_where_done(self.directory, self.epoch, self.params["epochs"], ended)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Finishes the checkpoint of the epoch before; begins the replay of a cut one."""
        self._finish()
        self._leave_if_asked()
        self._before_validation, self._replayed = None, 0
        if self._leader is not None:
            self.epoch, self.batch = self._leader.epoch, self._leader.batch
            self._log_names, self._replayed = self._leader._log_names, self._leader._replayed
            self._moments = {"epoch": rng_and_lr.capture(self.model.optimizer)}
            return
        if self._restored is None or self._going_on is None:
            self.epoch, self.batch, self._going_on = epoch, 0, None
            self._moments = {"epoch": rng_and_lr.capture(self.model.optimizer)}
            return
        keras_internals.set_initial_epoch(self.model, None)
        (_, described), self._restored = self._restored, None
        self._log_names, self._replayed = described["log_names"], self.batch
        self._moments = {"epoch": self._going_on.begin_epoch(self.model)}
        if not self.batch:
            self._going_on = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves where it is time, or where a signal came."""
        if batch < self._replayed:
            if batch + 1 == self._replayed and self._going_on is not None:
                self._going_on.reach(self.model, in_validation=False)
            self._ask()
            self._leave_if_asked()
            return
        self.step += batch + 1 - self.batch
        self.batch = batch + 1
        self._log_names = list(logs or {})
        self._check_loss((logs or {}).get("loss"))
        ends_epoch = self.batch == self.params.get("steps")
        is_due = self._ask()
        if self._signum is not None or (is_due and not ends_epoch):
            self.save()
        self._leave_if_asked()

    def on_test_begin(self, logs: Any = None) -> None:
        """Keeps the training's averages, which validation writes over, and the random states."""
        if self._going_on is not None:
            self._going_on.reach(self.model, in_validation=True)
        metrics = state.named(self.model.metrics_variables)
        self._before_validation = state.copied(metrics, "metrics")
        self._moments["validation"] = rng_and_lr.capture(self.model.optimizer)

    def on_test_end(self, logs: Any = None) -> None:
        """Validation is over."""
        self._moments.pop("validation", None)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves and leaves where a signal came."""
        self._ask()
        if self._signum is not None:
            optimizer = self.model.optimizer
            if getattr(optimizer, "swapped", False):
                self._sync()
                optimizer.swap_average()
            self.save()
            self._leave_if_asked()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the state where it is time; it is written once the other callbacks are done."""
        steps = self.params.get("steps")
        complete = steps is None or self.batch >= steps
        numbers = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, int | float)}
        if complete:
            self.epoch, self.batch = epoch + 1, 0
        is_best = self.best is not None and complete and self._is_best(numbers)
        ends = self.model.stop_training or epoch + 1 == self.params["epochs"]
        is_due = self._ask(at_once=True)
        if self.due.once_an_epoch or ends or is_best or is_due or self._signum is not None:
            self._read(numbers)

    def on_train_end(self, logs: Any = None) -> None:
        """Waits until all is written, and lets go of the directory."""
        keras_internals.set_initial_epoch(self.model, None)
        if self._restored is not None and self._going_on is not None:
            self._going_on.end()
        self._finish(trained=True)
        # In this order: a signal may come while the last checkpoint is written.
        self._writer.wait()
        self._ask(at_once=True)
        self._let_go()
        self._leave_if_asked()

    # What else may be called

    def prepare(
        self,
        model: keras.Model,
        steps_per_epoch: int | None = None,
        beside: Iterable[keras.callbacks.Callback] = (),
    ) -> Path | None:
        """Takes the directory and restores model and optimizer; `fit` does it where nobody did.

        Args:
            model: compiled.
            steps_per_epoch: batches of an epoch, where known.
            beside: the callbacks of the `fit`, where known.

        Returns:
            The checkpoint that the model was filled from, or None.
        """
        self._open(model)
        self._begun = True
        self._given = run_identity.given_numbers(model.optimizer, beside)
        found = manager.newest(self.directory)
        if found is None:
            return None
        path, described, passed_over = found
        for reason in passed_over:
            self._say(f"passed over a damaged checkpoint: {reason}")
        optimizer, steps = model.optimizer, steps_per_epoch
        all_or_raise(
            "same run",
            lambda: run_identity.check_same(path, described, optimizer, self.settings, steps),
        )
        given_rates = rng_and_lr.capture_rates(optimizer)
        manager.restore(path, described, model)
        self.epoch, self.batch = described["epoch"], described["batch"]
        self.validated = bool(described["logs"])
        self.step = self._saved_step = described["step"]
        self._restored = path, described
        self._say(f"resumed from {path} at step {self.step}")
        if changed := run_identity.changed_numbers(described, self._given, optimizer):
            self._say(run_identity.say_changed(changed))
        self._given = run_identity.still_given(described, self._given, changed)
        self._new_rates = rng_and_lr.of_slots(given_rates, changed)
        rng_and_lr.restore_rates(optimizer, self._new_rates)
        return path

    def save(self) -> None:
        """Saves now, inside `fit`, beside the training."""
        self._read({})
        self._finish()

    def wait(self) -> None:
        """Waits until what is being written is on the disk, and raises what went wrong with it."""
        self._writer.wait()

    # Parts

    def _open(self, model: keras.Model) -> None:
        """Takes the directory for a new `fit`, or one that goes on."""
        self._writer.wait()
        run_directory.take(self.directory, self.resume)
        self._begin_run()
        self.stop.signum = None
        self.epoch = self.batch = self.step = 0
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if self.only_trainable is None:
            self.only_trainable = state.has_adapters(model)
        if self.only_trainable:
            self._base = {"sha256": state.base_digest(model), "origin": self.origin}

    def _follow(self, leader: "Checkpoint") -> None:
        """Begins where the first Checkpoint of this `fit` does, and saves beside it."""
        self._open(self.model)
        self._leader, self._given = leader, leader._given
        newest = manager.newest_step(self.directory)
        if newest > leader.step and leader._restored is None:
            raise InputError(
                f"{self.directory} holds checkpoints of a run and {leader.directory} none, whose "
                "Checkpoint stands first and resumes the run; put the other one first, or give "
                "another directory"
            )
        if newest > leader.step:
            self._say(
                f"{self.directory} has step {newest}, but the Checkpoint that stands first resumes "
                f"the run; put this one first to go on from there"
            )
        self.step = leader.step

    def _say(self, line: str) -> None:
        if processes.is_rank_zero():
            print(line, flush=True)

    @property
    def _signum(self) -> int | None:
        """Of the signal after which this run stops, or None."""
        return self.stop.signum if processes.count() == 1 else self._requests.signum

    def _ask(self, at_once: bool = False) -> bool:
        """Hears of signals and errors in any of the processes; whether a checkpoint is due."""
        due = self.due.now(self.step)
        failed, by_clock = self._writer.failed, due
        if processes.count() > 1:
            failed, by_clock = self._requests.ask(self.stop.signum, failed, due, at_once)
        if failed:
            self._writer.wait()
        return due if self.due.seconds is None else by_clock

    def _is_best(self, numbers: dict[str, float]) -> bool:
        assert self.best is not None
        self._writer.wait()
        return is_best(self.directory, self.best, self.mode, numbers)

    def _check_loss(self, loss: Any) -> None:
        if self.stop_on_non_finite and not self._finite_loss.is_finite(loss):
            self._writer.wait()
            raise self._finite_loss.error(loss, self.step, self._learning_rate())

    def _learning_rate(self) -> float:
        self._sync()
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _sync(self) -> None:
        keras_internals.sync_values(self.model)

    def _read(self, logs: dict[str, float]) -> None:
        """Copies everything to the host; waits for the write before, so that there is one copy."""
        if self.step == self._saved_step and not logs:
            return
        self.before_save()
        self._writer.wait()
        self._sync()
        variables = state.parts(self.model, bool(self.only_trainable))
        arrays = {part: state.copied(held, part) for part, held in variables.items()}
        if self._before_validation is not None:
            arrays["metrics"] = self._before_validation
        described = {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "steps_per_epoch": self.params.get("steps"),
            "in_validation": "validation" in self._moments,
            "logs": {k: v if math.isfinite(v) else None for k, v in logs.items()},
            "log_names": self._log_names,
            "base": self._base,
            **run_identity.describe(self.model.optimizer, self.settings, self._given, self.epoch),
        }
        self._pending = described, arrays

    def _finish(self, trained: bool = False) -> None:
        """Adds what the other callbacks know by now, and has it written.

        Args:
            trained: the training is over; another one would begin the next epoch.
        """
        if self._pending is None:
            return
        (described, arrays), self._pending = self._pending, None
        other: state.Arrays = {}
        described["callbacks"] = {} if self._others is None else self._others.capture(other)
        # A callback that ended the training has had its reasons at the end of the epoch.
        described["ended"] = bool(self.model.stop_training) and self.batch == 0
        # Validation is gone through again as a whole.
        now = self._moments.get("validation") or rng_and_lr.capture(self.model.optimizer)
        if self.batch:
            begun = self._moments["epoch"]
        else:
            begun = rng_and_lr.without_rate(now) if trained else now
        arrays["optimizer"] = format.replace(arrays["optimizer"], rng_and_lr.rates(now))
        if not processes.is_rank_zero():
            other.clear()
        for moment, held in {"now": now, "epoch": begun}.items():
            other |= {format.here(f"random/{moment}/{name}"): v for name, v in held.items()}
        arrays["other"] = other
        snapshot = manager.Snapshot(described, arrays)
        self._writer.submit(
            lambda: manager.save(self.directory, snapshot, self.keep, self.best, self.mode)
        )
        self._saved_step = self.step
        self.due.restart()

    def _let_go(self) -> None:
        self._writer.wait()
        self.stop.end()
        unlock(self.directory)

    def _leave_if_asked(self) -> None:
        if (signum := self._signum) is None:
            return
        self._let_go()
        message = f"stopped at step {self.step} by signal {signum}; {self.how_to_go_on}"
        if processes.is_rank_zero():
            print(message, file=sys.stderr, flush=True)
        raise Interrupted(signum, message)
