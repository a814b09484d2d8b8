"""One training run: `model.fit` with losses by step, checkpoints, signals and an exact resume."""

import math
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import keras
import numpy as np

from kmodels.errors import InputError
from kmodels.training import checkpoint
from kmodels.training.evaluation import Timed
from kmodels.training.history import History
from kmodels.training.progress import Progress
from kmodels.training.schedules import WarmupSchedule
from kmodels.training.signals import Interrupted, StopRequest
from kmodels.training.step_loss import KEY, StepCallbacks, track_step_loss


class Runner(keras.callbacks.Callback):
    """Trains a compiled model and keeps what has to survive on the disk.

    Args:
        model: compiled with `kmodels.training.AdamW`.
        folder: of the run; `checkpoints/` and `history.csv` are made in it.
        loader: training batches by (epoch, number), as `kmodels.data.ImageLoader`: it has
            `set_epoch(epoch, skip)`. All batches have one size.
        validation: what `fit` takes as `validation_data`, or None.
        schedule: the optimizer's learning rate; it knows the steps of the whole run.
        batch_size: pictures per batch.
        log_every: steps between two fetches of the losses.
        checkpoint_every: steps between two checkpoints; 0 makes one after each epoch.
        keep: newest checkpoints that stay.
        settings: plain values that a resumed run must share; kept in state.json.
        resume: goes on from the newest checkpoint that verifies.

    Attributes:
        epoch: finished epochs.
        batch: finished batches of the running epoch.
        step: finished batches of the run.

    Raises:
        InputError: where checkpoints exist and none verifies, or the settings differ.
    """

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
        checkpoint_every: int = 0,
        keep: int = 2,
        settings: dict[str, Any] | None = None,
        resume: bool = False,
    ):
        super().__init__()
        self.trained, self.loader, self.validation = model, loader, validation
        self.checkpoints = folder / "checkpoints"
        total_steps = schedule.total_steps
        self.batch_size, self.total_steps = batch_size, total_steps
        self.log_every, self.checkpoint_every, self.keep = max(log_every, 1), checkpoint_every, keep
        self.settings = settings or {}
        loader.set_epoch(0, 0)
        self.steps_per_epoch = len(loader)
        self.epochs = math.ceil(total_steps / self.steps_per_epoch)
        self.epoch = self.batch = self.step = 0
        self._metrics_from: Path | None = None
        if resume:
            self._resume()
        self.history = History(folder / "history.csv", self.step, self.epoch)
        self.progress = Progress(total_steps, self.step)
        self.stop = StopRequest()
        self.waited = Timed(loader)
        self._pending: list[Any] = []
        self._windows: list[tuple[int, float]] = []
        self._first_seconds = 0.0
        self._saved_step = self.step if self.step else -1
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
        self.progress.start()
        try:
            with self.stop.listen():
                while self.step < self.total_steps:
                    self.loader.set_epoch(self.epoch, self.batch)
                    # An epoch that was cut is shorter, and Keras counts the batches once per fit.
                    last = self.epoch + 1 if self.batch else self.epochs
                    callbacks = StepCallbacks([self], model, epochs=last, steps=len(self.waited))
                    model.fit(
                        self.waited,
                        validation_data=self.validation,
                        initial_epoch=self.epoch,
                        epochs=last,
                        callbacks=callbacks,
                        shuffle=False,
                        verbose=0,
                    )
        except Exception:
            # tf.data wraps what a loader raises.
            for batches in (self.waited, self.validation):
                if (error := getattr(batches, "error", None)) is not None:
                    raise error from None
            raise
        finally:
            self.progress.stop()
        model.optimizer.finalize_average()

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock."""
        self._mark = perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tells the loader the epoch; puts running averages of a cut epoch back."""
        if self._metrics_from is not None:
            # TensorFlow makes the metrics' variables in the first step, too late to fill them.
            self.trained._symbolic_build(data_batch=self.loader[0])
            checkpoint.restore_metrics(self._metrics_from, self.trained)
            self._metrics_from = None
        self.loader.set_epoch(epoch)
        self._epoch_started = perf_counter()
        if self._windows:
            self._mark = self._epoch_started

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keeps the loss on the device; every so often fetches, shows, saves, stops."""
        self._pending.append(logs[KEY])  # type: ignore[index]
        self.step += 1
        self.batch += 1
        ends_epoch, ends_run = self.batch == self.steps_per_epoch, self.step == self.total_steps
        stops = self.stop.signum is not None and not ends_epoch
        saves = self.checkpoint_every and self.step % self.checkpoint_every == 0 and not ends_epoch
        cut = ends_run and not ends_epoch
        if self.step % self.log_every == 0 or not self._first_seconds or ends_epoch or ends_run:
            self._flush()
        if stops or saves or cut:
            self._save()
        if stops:
            self._leave()
        if ends_run:
            self.trained.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Evaluates the moving average where there is one."""
        self.trained.optimizer.swap_average()

    def on_test_end(self, logs: Any = None) -> None:
        """Trains on with the weights themselves."""
        self.trained.optimizer.swap_average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the epoch's row, and a checkpoint."""
        seconds = perf_counter() - self._epoch_started
        shown = {k: v for k, v in (logs or {}).items() if not k.endswith(KEY)}
        row = {"row": "epoch", "epoch": epoch + 1, "step": self.step, **shown}
        speed = self.samples_per_s
        row |= {"samples_per_s": round(speed, 1), "seconds": round(seconds, 3)}
        self.history.add([row])
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        left = seconds / max(self.batch, 1) * (self.total_steps - self.step)
        text = f"epoch {epoch + 1}/{self.epochs}  {numbers}  {speed:,.0f} samples/s"
        self.progress.epoch(text, left)
        if self.batch < self.steps_per_epoch:
            return  # The run ends within an epoch, and was saved at its last step.
        self.epoch, self.batch = epoch + 1, 0
        stops = self.stop.signum is not None
        due = not self.checkpoint_every or self.step % self.checkpoint_every == 0
        if due or stops or self.step == self.total_steps:
            self._save()
        if stops and self.step < self.total_steps:
            self._leave()

    # Numbers of the run

    @property
    def metrics(self) -> dict[str, float]:
        """Keras' log names and numbers of the last epoch."""
        rows = self.history.epochs
        left_out = {"row", "epoch", "step", "samples_per_s", "seconds"}
        return {k: v for k, v in rows[-1].items() if k not in left_out} if rows else {}

    @property
    def trained_here(self) -> bool:
        """Whether this process made a step, so that there is something to measure."""
        return bool(self._windows)

    @property
    def samples_per_s(self) -> float:
        """Pictures per second of training, without the first step and evaluation."""
        steps, seconds = map(sum, zip(*self._steady(), strict=True))
        return steps * self.batch_size / max(seconds, 1e-9)

    @property
    def step_ms(self) -> float:
        """Median over the windows between two fetches, milliseconds per step."""
        return 1000 * statistics.median(seconds / steps for steps, seconds in self._steady())

    @property
    def compile_s(self) -> float:
        """What the first step of this process took more than another one."""
        return max(self._first_seconds - self.step_ms / 1000, 0.0)

    @property
    def wait_share(self) -> float:
        """Share of the training time spent waiting for batches; see `Timed`."""
        total = self._first_seconds + sum(seconds for _, seconds in self._windows[1:])
        return min(self.waited.seconds / max(total, 1e-9), 1.0)

    def _steady(self) -> list[tuple[int, float]]:
        return self._windows[1:] or self._windows or [(1, 0.0)]

    # Parts

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
        self.history.add([row for row in rows if bad is None or row["step"] < bad["step"]])
        if bad is not None:
            self._not_finite(bad)
        self.progress.update(self.step, losses[-1], self.samples_per_s)

    def _not_finite(self, row: dict[str, Any]) -> None:
        losses = self.history.step_losses
        saved = checkpoint.list_checkpoints(self.checkpoints)
        kept = f"checkpoint {saved[0].name} is good" if saved else "no checkpoint was made"
        last = f"the last finite one was {losses[-1]:.4g}" if losses else "there was no finite one"
        raise InputError(
            f"the loss is {row['loss']} at step {row['step']} (learning rate "
            f"{row['learning_rate']:.3g}); {last}; {kept}; check the data or the learning rate"
        )

    def _save(self) -> None:
        self._flush()
        if self.step == self._saved_step:
            return
        # JAX keeps the state outside the variables during an epoch.
        if (sync := getattr(self.trained, "jax_state_sync", None)) is not None:
            sync()
        state = {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "steps_per_epoch": self.steps_per_epoch,
            "backend": keras.backend.backend(),
            "settings": self.settings,
        }
        checkpoint.save(self.checkpoints, self.trained, state, self.keep)
        self._saved_step = self.step
        self._mark = perf_counter()

    def _leave(self) -> None:
        signum = self.stop.signum
        assert signum is not None
        raise Interrupted(
            signum, f"stopped at step {self.step} by signal {signum}; go on with --resume"
        )

    def _resume(self) -> None:
        found = checkpoint.newest(self.checkpoints)
        if found is None:
            print(f"no checkpoint in {self.checkpoints}; starting from the beginning", flush=True)
            return
        path, state, passed_over = found
        for reason in passed_over:
            print(f"passed over a damaged checkpoint: {reason}", flush=True)
        kept = state["settings"]
        wrong = [name for name, value in self.settings.items() if kept.get(name) != value]
        if wrong or state["steps_per_epoch"] != self.steps_per_epoch:
            said = ", ".join(f"{name} was {kept.get(name)!r}" for name in wrong)
            raise InputError(
                f"{path} is of another run: {said or 'the data had another size'}; give the same "
                "settings or another --out"
            )
        checkpoint.restore_model(path, self.trained)
        checkpoint.restore_optimizer(path, self.trained)
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        if self.batch:
            self._metrics_from = path
        print(f"resumed from {path} at step {self.step}", flush=True)
