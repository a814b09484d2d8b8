"""One training run: `model.fit` with losses by step, checkpoints, signals and an exact resume."""

import math
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import keras
import numpy as np

from kmodels.checkpoint import manager
from kmodels.checkpoint.callback import Checkpoint
from kmodels.core.errors import InputError
from kmodels.core.out_of_memory import is_out_of_memory, out_of_memory
from kmodels.core.types import Logs
from kmodels.core.units import pluralize
from kmodels.data.pipeline.kinds import pipeline
from kmodels.data.pipeline.request import FitCallback, FitRequest, Method
from kmodels.distribution import current, processes
from kmodels.runs import console, trackers
from kmodels.runs.history import History
from kmodels.runs.progress import Progress
from kmodels.training.keras_methods import run_request
from kmodels.training.optim.schedules import WarmupSchedule
from kmodels.training.step.step_loss import KEY, StepCallbacks, track_step_loss

# This many steps without a finite one are no accident: the weights do not give numbers any more.
MOST_SKIPPED = 50
# Steps after the first one that are timed, to say how long the run will take.
EARLY_STEPS = 4


class Runner(FitCallback):
    """Trains a compiled model and keeps what has to survive on the disk.

    Args:
        model: compiled with `kmodels.training.AdamW`.
        folder: of the run; `checkpoints/` and `history.csv` are made in it.
        loader: training batches by (epoch, number), as `kmodels.data.ImageLoader`: it has
            `set_epoch(epoch, skip)`. All batches have one size.
        validation: what `fit` takes as `validation_data`, or None.
        schedule: the optimizer's learning rate; it knows the steps of the whole run.
        batch_size: images per batch.
        log_every: steps between two fetches of the losses.
        checkpoint_every: steps between two checkpoints, or seconds as in "300s"; 0 makes one after
            each epoch.
        keep: newest checkpoints that stay, with the best.
        best: log of an epoch whose best checkpoint stays, or None.
        settings: plain values that a resumed run must share; kept in state.json.
        resume: continues from the newest checkpoint that verifies.
        origin: where frozen weights came from; kept in state.json with their hash.
        log_to: experiment tracker that gets the rows of history.csv, a key of `trackers.MODULES`.
        config: settings that the tracker shows.

    Attributes:
        epoch: finished epochs.
        batch: finished batches of the running epoch.
        step: finished batches of the run.

    Raises:
        InputError: where checkpoints exist and none verifies, or the settings differ.
    """

    # History and step are restored here, not by the checkpoint.
    saves_itself = True

    def __init__(
        self,
        model: keras.Model,
        folder: Path,
        loader: Any,
        validation: Any,
        schedule: WarmupSchedule,
        *,
        batch_size: int,
        log_every: int = 10,
        checkpoint_every: int | str = 0,
        keep: int = 2,
        best: str | None = None,
        settings: dict[str, Any] | None = None,
        resume: bool = False,
        origin: str | None = None,
        log_to: str | None = None,
        config: dict[str, Any] | None = None,
    ):
        super().__init__()
        rule = None
        if (plan := current()) is not None:
            plan.check(model)
            # Each process trains on its rows of every batch.
            rule = plan.rule()
            if validation is not None:
                validation = pipeline(validation, rule, Method.EVALUATE)
        self.feed = pipeline(loader, rule)
        self.trained, self.loader, self.validation = model, self.feed.source.data, validation
        total_steps = schedule.total_steps
        self.batch_size, self.total_steps = batch_size, total_steps
        self.log_every = max(log_every, 1)
        self.loader.set_epoch(0, 0)
        self.steps_per_epoch: int = self.feed.num_batches or 0
        self.epochs = math.ceil(total_steps / self.steps_per_epoch)
        self.checkpoint = Checkpoint(
            folder / "checkpoints",
            checkpoint_every,
            keep,
            best,
            resume=resume,
            origin=origin,
            settings=settings,
        )
        self.checkpoint.run.before_save = self._write_history
        self.checkpoint.run.how_to_go_on = "continue with --resume"
        if self.checkpoint.prepare(model, self.steps_per_epoch) is None and resume:
            directory = console.short(self.checkpoint.directory)
            console.say(f"no checkpoint in {directory}; starting from the beginning")
        begun = self.checkpoint.began_with
        self.epoch, self.batch, self.step = begun.epoch, begun.batch, begun.step
        cut = self.batch > 0
        # A run that ends within an epoch has its evaluation and its row all the same.
        self._unfinished = self.step < total_steps or (cut and not begun.validated)
        done = self.epoch + (cut and not self._unfinished)
        writes = processes.is_rank_zero()
        self.history = History(folder / "history.csv", self.step, done, writes)
        if self.history.missing and writes:
            console.say(
                f"history.csv lacks {self.history.missing} of {self.step} steps; the run goes on "
                "without their rows"
            )
        if log_to is not None and writes:
            tracker = trackers.start(log_to, folder, config or {}, self.step)
            self.history.tracker = tracker
            console.say(f"logging to {log_to}: {tracker.shown_by}")
        self.progress = Progress(total_steps, self.step, self.epochs)
        if self.feed.clock.parameter is not None:
            self.feed.clock.parameter = "--workers"
        self._pending: list[Any] = []
        self._windows: list[tuple[int, float]] = []
        self._waited = False
        self._validation_begun = self._validation_seconds = 0.0
        self._first_seconds = 0.0
        self._skips = getattr(model.optimizer, "skip_non_finite", False)
        self._in_a_row = 0
        track_step_loss(model)
        self._rates = keras.ops.convert_to_numpy(schedule(np.arange(total_steps)))

    # Running

    def run(self) -> None:
        """Trains to the end.

        Raises:
            Interrupted: after a signal, when the state is saved.
            InputError: where the loss is not finite; no checkpoint holds that state.
        """
        model = self.trained
        self.loader.set_epoch(self.epoch, 0)
        callbacks = [self, self.checkpoint]
        steps = self.steps_per_epoch
        try:
            if self._unfinished:
                self.progress.start()
                with self.checkpoint.stop.listen():
                    request = FitRequest.of(
                        Method.FIT,
                        x=self.feed,
                        validation_data=self.validation,
                        epochs=self.epochs,
                        callbacks=StepCallbacks(callbacks, model, epochs=self.epochs, steps=steps),
                        shuffle=False,
                        verbose=0,
                    )
                    run_request(model, request)
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory(model, self.batch_size) from None
            raise
        finally:
            self.progress.stop()
        model.optimizer.finalize_average()

    def on_train_begin(self, logs: Logs = None) -> None:
        """Starts the clock."""
        self._mark = perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Tells the loader the epoch."""
        if epoch != self.epoch:
            self.epoch, self.batch = epoch, 0
        self.loader.set_epoch(epoch, 0)
        self._epoch_started = perf_counter()
        if self._windows:
            self._mark = self._epoch_started
            self.progress.doing(f"epoch {epoch + 1}/{self.epochs}")

    def go_on(self) -> None:
        """The epoch goes on where it was cut, unless all steps are done."""
        self._mark = perf_counter()
        self._stop_at_end()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Keeps the loss on the device; every so often fetches and shows it."""
        self._pending.append(logs[KEY])  # type: ignore[index]
        self.step += 1
        self.batch += 1
        ends_epoch, ends_run = self.batch == self.steps_per_epoch, self.step == self.total_steps
        # The first step is compiled; those after it tell how long the run will take.
        early = not self._windows or (len(self._windows) == 1 and len(self._pending) == EARLY_STEPS)
        if self.step % self.log_every == 0 or early or ends_epoch or ends_run:
            self._flush()
        self._stop_at_end()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Evaluates the moving average where there is one."""
        self.progress.doing("validation")
        self.trained.optimizer.swap_average()
        self._validation_begun = perf_counter()

    def on_test_end(self, logs: Logs = None) -> None:
        """Trains on with the weights themselves."""
        self._validation_seconds = perf_counter() - self._validation_begun
        self.trained.optimizer.swap_average()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Writes the epoch's row."""
        seconds = perf_counter() - self._epoch_started
        shown = {k: v for k, v in (logs or {}).items() if not k.endswith(KEY)}
        row = {"row": "epoch", "epoch": epoch + 1, "step": self.step, **shown}
        row |= {"seconds": round(seconds, 3)}
        # The epoch may have had all of its steps in a former process.
        speed = self.samples_per_s if self.trained_here else None
        if speed is not None:
            row |= {"samples_per_s": round(speed, 1)}
        self.history.add([row])
        self.progress.epoch(epoch + 1, shown, speed, self._seconds_left)
        self._say_waited()

    # Numbers of the run

    @property
    def metrics(self) -> dict[str, float]:
        """Keras' log names and numbers of the last epoch."""
        rows = self.history.epochs
        left_out = {"row", "epoch", "step", "samples_per_s", "seconds"}
        return {k: v for k, v in rows[-1].items() if k not in left_out} if rows else {}

    @property
    def skipped(self) -> int:
        """Steps that changed nothing, since their gradients were not finite."""
        count = getattr(self.trained.optimizer, "skipped", None)
        return 0 if count is None else int(keras.ops.convert_to_numpy(count.value))

    @property
    def trained_here(self) -> bool:
        """True if this process made a step, so that there is something to measure."""
        return bool(self._windows)

    @property
    def samples_per_s(self) -> float:
        """Images per second of training here, without the first step and evaluation."""
        steps, seconds = map(sum, zip(*self._steady(), strict=True))
        return steps * self.batch_size / max(seconds, 1e-9)

    @property
    def step_ms(self) -> float:
        """Median over the windows between two fetches, milliseconds per step."""
        return 1000 * statistics.median(seconds / steps for steps, seconds in self._steady())

    @property
    def compile_s(self) -> float:
        """The seconds that the first step of this process took more than a later one."""
        return max(self._first_seconds - self.step_ms / 1000, 0.0)

    @property
    def wait_share(self) -> float:
        """Share of the training time spent waiting for batches, see `data.pipeline.wait`."""
        return self.feed.clock.share

    def _steady(self) -> list[tuple[int, float]]:
        return self._windows[1:] or self._windows

    # Parts

    def _stop_at_end(self) -> None:
        if self.step == self.total_steps and self.batch < self.steps_per_epoch:
            self.trained.stop_training = True

    def _write_history(self) -> None:
        """Has the rows on the disk before the checkpoint that counts them."""
        self._flush()
        self.history.sync()

    def _flush(self) -> None:
        losses = [float(keras.ops.convert_to_numpy(loss)) for loss in self._pending]
        now = perf_counter()
        if not losses:
            return
        self._first_seconds = self._first_seconds or now - self._mark
        self._windows.append((len(losses), now - self._mark))
        self._mark = now
        self._pending = []
        first = self.step - len(losses) + 1
        rows = [
            {
                "row": "step",
                "epoch": self.epoch + 1,
                "step": first + number,
                "loss": loss,
                "learning_rate": float(self._rates[first + number - 1]),
            }
            for number, loss in enumerate(losses)
        ]
        bad = next((row for row in rows if not math.isfinite(row["loss"])), None)
        if bad is not None and self._skips:
            self._in_a_row = _tail(losses, self._in_a_row)
            self.progress.say(f"step {bad['step']} was not finite and was skipped")
            bad = bad if self._in_a_row >= MOST_SKIPPED else None
        else:
            self._in_a_row = 0
        self.history.add([row for row in rows if bad is None or row["step"] < bad["step"]])
        if bad is not None:
            self._not_finite(bad)
        self.progress.update(self.step, losses[-1], self._seconds_left)
        if len(self._windows) <= 2:
            self._say_estimate()

    @property
    def _seconds_left(self) -> float:
        """The seconds that the run has left, as far as steps and validation were measured."""
        if not self.trained_here:
            return 0.0
        steps = self.total_steps - self.step
        epochs = self.epochs - self.epoch - 1
        return self.step_ms / 1000 * steps + self._validation_seconds * epochs

    def _say_estimate(self) -> None:
        """Tells after the first steps how long the run will take."""
        if len(self._windows) == 1:
            self.progress.doing(f"epoch {self.epoch + 1}/{self.epochs}")
            return
        steps, left = self.total_steps - self.step, self._seconds_left
        if steps and left > console.SILENT_SECONDS:
            first, each = console.seconds(self._first_seconds), console.seconds(self.step_ms / 1000)
            self.progress.say(
                f"about {console.seconds(left)} for the {pluralize(steps, 'step')} left, "
                f"validation aside ({each} a step; the first took {first})"
            )

    def _say_waited(self) -> None:
        """Tells once that steps waited for data, with the flag that ends it."""
        line = self.feed.clock.line()  # It ends the epoch's count, too.
        if line is not None and not self._waited:
            self._waited = True
            self.progress.say(line)

    def _not_finite(self, row: dict[str, Any]) -> None:
        losses = self.history.step_losses
        self.checkpoint.wait()
        saved = manager.list_checkpoints(self.checkpoint.directory)
        kept = f"checkpoint {saved[0].name} is good" if saved else "no checkpoint was made"
        losses = [loss for loss in losses if math.isfinite(loss)]
        last = f"the last finite one was {losses[-1]:.4g}" if losses else "there was no finite one"
        raise InputError(
            f"the loss is {row['loss']} at step {row['step']} (learning rate "
            f"{row['learning_rate']:.3g}); {last}; {kept}; check the data or the learning rate"
        )


def _tail(losses: list[float], before: int) -> int:
    """Returns how many of the last losses are not finite, one after another."""
    for count, loss in enumerate(reversed(losses)):
        if math.isfinite(loss):
            return count
    return before + len(losses)
