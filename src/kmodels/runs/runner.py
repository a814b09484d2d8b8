"""The training of a recipe: `fit` with losses by step, checkpoints, signals and exact resume."""

import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import keras
import numpy as np

from kmodels.checkpoint.callback import Checkpoint
from kmodels.core import processes
from kmodels.core.errors import InputError, is_out_of_memory, out_of_memory
from kmodels.core.types import Logs
from kmodels.data.pipeline.kinds import pipeline
from kmodels.data.pipeline.request import FitCallback, FitRequest, Method
from kmodels.distribution import current
from kmodels.runs import console, trackers
from kmodels.runs.console import Progress, Speed
from kmodels.runs.history import History
from kmodels.training.loop import run_request
from kmodels.training.optimizers import WarmupSchedule
from kmodels.training.step_loss import KEY, StepCallbacks, track_step_loss

# After this many skipped steps in a row the weights themselves must be NaN or infinite.
MOST_SKIPPED = 50
# Steps after the first one that are timed to estimate the duration of the run.
EARLY_STEPS = 4


class Runner(FitCallback):
    """Trains a compiled model, and writes its checkpoints and its history to a folder.

    Args:
        model: compiled with `kmodels.training.AdamW`.
        folder: folder of the run, which receives `checkpoints/` and `history.csv`.
        loader: training batches by (epoch, number) and of one size, such as
            `kmodels.data.ImageLoader`.
        validation: `validation_data` of `fit`, or None.
        schedule: learning rate schedule of the optimizer, over the steps of the whole run.
        batch_size: images per batch.
        log_every: steps between fetches of the losses.
        checkpoint_every: steps between checkpoints, or seconds as in "300s"; 0 makes one after
            each epoch.
        keep: number of newest checkpoints to keep, besides the best.
        best: log of an epoch that chooses the best checkpoint, which is kept too, or None.
        settings: plain values that a resumed run must share; saved in state.json.
        resume: continues from the newest checkpoint that verifies.
        origin: where frozen weights came from; saved in state.json with their hash.
        log_to: experiment tracker that receives the rows of history.csv, a key of
            `trackers.MODULES`.
        config: settings that the tracker shows.
        callbacks: further callbacks of `fit`, called before its own.

    Attributes:
        epoch: finished epochs.
        step: finished batches of the run.
        history: rows of history.csv.
        speed: measured times of the steps of this process.

    Raises:
        InputError: if checkpoints exist and none verifies, or the settings differ.
    """

    # It restores history and step itself; the checkpoint leaves it out.
    saves_itself = True

    def __init__(
        self,
        model: keras.Model,
        folder: str | Path,
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
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ):
        super().__init__()
        folder, plan = Path(folder), current()
        self._others = [*callbacks]
        # Over a mesh each process trains on its rows of every batch.
        self.feed = pipeline(loader, None if plan is None else plan.rule())
        self.feed.clock.parameter = self.feed.clock.parameter and "--workers"
        self.trained, self.validation, self.batch_size = model, validation, batch_size
        self.total_steps, self.log_every = schedule.total_steps, max(log_every, 1)
        if (steps := self.feed.num_batches) is None:
            raise InputError(f"{type(loader).__name__} has no number of batches; give it a length")
        self.steps_per_epoch = steps
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.checkpoint = Checkpoint(
            folder / "checkpoints",
            checkpoint_every,
            keep,
            best,
            resume=resume,
            origin=origin,
            settings=settings,
        )
        self.checkpoint.before_save = self._write_history
        self.checkpoint.how_to_go_on = "continue with --resume"
        if self.checkpoint.prepare(model, self.steps_per_epoch) is None and resume:
            directory = console.short(self.checkpoint.directory)
            console.say(f"no checkpoint in {directory}; starting from the beginning")
        start = self.checkpoint.began_with
        self.epoch, self.step = start.epoch, start.step
        if self.step > self.total_steps:
            raise InputError(
                f"{self.step} steps are done, and the run is to have {self.total_steps}; give at "
                "least as many with --steps or --epochs"
            )
        # A run that ends within an epoch also evaluates and writes a row for that epoch.
        cut = start.batch > 0
        self._unfinished = self.step < self.total_steps or (cut and not start.validated)
        done = self.epoch + (cut and not self._unfinished)
        writes = processes.is_rank_zero()
        self.history = History(folder / "history.csv", self.step, done, writes)
        if log_to is not None and writes:
            tracker = self.history.tracker = trackers.start(log_to, folder, config or {}, self.step)
            console.say(f"logging to {log_to}: {tracker.shown_by}")
        self.progress = Progress(self.total_steps, self.step, self.epochs)
        self.speed = Speed(batch_size)
        self._advised = False
        self._skipped_in_a_row = 0
        # Losses on the device, of the steps since the last fetch.
        self._pending: list[Any] = []
        track_step_loss(model)
        self._rates = keras.ops.convert_to_numpy(schedule(np.arange(self.total_steps)))

    def run(self) -> None:
        """Trains to the end.

        Raises:
            Interrupted: after a signal, when the state is saved.
            InputError: if the loss is not finite; no checkpoint holds that state.
        """
        model, epochs = self.trained, self.epochs
        callbacks = StepCallbacks(
            [*self._others, self, self.checkpoint], model, epochs=epochs, steps=self.steps_per_epoch
        )
        options = {"callbacks": callbacks, "validation_data": self.validation, "epochs": epochs}
        request = FitRequest.of(Method.FIT, x=self.feed, shuffle=False, verbose=0, **options)
        try:
            if self._unfinished:
                self.progress.start()
                with self.checkpoint.preemption.listen():
                    run_request(model, request)
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory(model, self.batch_size) from None
            raise
        finally:
            self.progress.stop()
        model.optimizer.finalize_average()

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the logs of the last epoch by Keras' names."""
        rows = self.history.epochs
        left_out = {"row", "epoch", "step", "samples_per_s", "learnt_tokens_per_s", "seconds"}
        return {k: v for k, v in rows[-1].items() if k not in left_out} if rows else {}

    @property
    def learnt_tokens_per_s(self) -> float | None:
        """Returns the learnt tokens per second of training, or None if not known."""
        tokens = self.feed.learned_tokens_per_row
        return self.speed.samples_per_s * tokens if tokens and self.speed.windows else None

    @property
    def skipped(self) -> int:
        """Returns the number of steps that were skipped because a gradient was not finite."""
        count = getattr(self.trained.optimizer, "skipped", None)
        return 0 if count is None else int(keras.ops.convert_to_numpy(count.value))

    # The hooks of fit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Starts the clock."""
        self.speed.start()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Starts the clock of an epoch."""
        self.epoch = epoch
        self._epoch_started = perf_counter()
        if self.speed.windows:
            self.speed.start()
            self._show_epoch()

    def go_on(self) -> None:
        """Starts the clock of an epoch that was cut, unless all steps are done."""
        self.speed.start()
        self._stop_at_end()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Keeps the loss on the device, and fetches the losses every `log_every` steps."""
        self._pending.append(logs[KEY])  # type: ignore[index]
        self.step += 1
        windows, count = len(self.speed.windows), len(self._pending)
        # The first step is compiled; the next ones give the estimate of the duration.
        early = windows == 0 or (windows == 1 and count == EARLY_STEPS)
        ends = self.step % self.steps_per_epoch == 0 or self.step == self.total_steps
        if self.step % self.log_every == 0 or early or ends:
            self._fetch()
        self._stop_at_end()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Evaluates the moving average of the weights if there is one."""
        self.progress.doing("validation")
        self.trained.optimizer.swap_average()
        self._validation_started = perf_counter()

    def on_test_end(self, logs: Logs = None) -> None:
        """Continues with the weights themselves."""
        self.speed.validation = perf_counter() - self._validation_started
        self.trained.optimizer.swap_average()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Writes and shows the row of the epoch."""
        seconds = perf_counter() - self._epoch_started
        numbers = {k: v for k, v in (logs or {}).items() if not k.endswith(KEY)}
        # An earlier process may have run all steps of the epoch.
        speed = self.speed.samples_per_s if self.speed.windows else None
        row = {"row": "epoch", "epoch": epoch + 1, "step": self.step, **numbers}
        row["seconds"] = round(seconds, 3)
        speeds = {"samples_per_s": speed, "learnt_tokens_per_s": self.learnt_tokens_per_s}
        row |= {name: round(value, 1) for name, value in speeds.items() if value is not None}
        self.history.add([row])
        self.progress.epoch(epoch + 1, numbers, speed, self._seconds_left)
        line = self.feed.clock.line()  # It ends the epoch's count, too.
        if line is not None and not self._advised:
            self._advised = True
            self.progress.say(line)

    def _stop_at_end(self) -> None:
        if self.step == self.total_steps and self.step % self.steps_per_epoch:
            self.trained.stop_training = True

    def _show_epoch(self) -> None:
        self.progress.doing(f"epoch {self.epoch + 1}/{self.epochs}")

    def _write_history(self) -> None:
        # The rows are on the disk before the checkpoint that counts them.
        self._fetch()
        self.history.sync()

    def _fetch(self) -> None:
        """Fetches the losses since the last time, writes their rows and moves the progress bar."""
        losses = [float(keras.ops.convert_to_numpy(loss)) for loss in self._pending]
        if not losses:
            return
        self._pending = []
        self.speed.add(len(losses))
        skips = getattr(self.trained.optimizer, "skip_non_finite", False)
        rows, bad = [], None
        for step, loss in enumerate(losses, self.step - len(losses) + 1):
            rate = float(self._rates[step - 1])
            self._skipped_in_a_row = 0 if math.isfinite(loss) else self._skipped_in_a_row + 1
            if self._skipped_in_a_row >= (MOST_SKIPPED if skips else 1):
                bad = loss, step, rate
                break
            if self._skipped_in_a_row == 1:
                self.progress.say(f"step {step} was not finite and was skipped")
            row = {"row": "step", "epoch": self.epoch + 1, "step": step}
            rows.append({**row, "loss": loss, "learning_rate": rate})
        self.history.add(rows)
        if bad is not None:
            finite = [loss for loss in self.history.step_losses if math.isfinite(loss)]
            raise self.checkpoint.not_finite(*bad, finite[-1] if finite else None)
        self.progress.update(self.step, losses[-1], self._seconds_left)
        if len(self.speed.windows) == 1:
            self._show_epoch()
        elif len(self.speed.windows) == 2:
            self.progress.estimate(self.total_steps - self.step, self._seconds_left, self.speed)

    @property
    def _seconds_left(self) -> float:
        return self.speed.left(self.total_steps - self.step, self.epochs - self.epoch - 1)
