"""Saving: when a checkpoint is due, what is read for it, and who writes it beside the training."""

import math
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Any

import keras

from kmodels.checkpoint import extra_state, format, keeper, manager, state
from kmodels.checkpoint.extra_state import CallbackStates
from kmodels.checkpoint.format import Arrays
from kmodels.checkpoint.run_state import RunState
from kmodels.core.errors import InputError, check_whole
from kmodels.distribution import processes

_HIGHER_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "score")


class BestEpoch:
    """Compares an epoch with those whose checkpoints are still there.

    Args:
        directory: directory of the checkpoints.
        name: name of the log to compare; None where no epoch is the best.
        mode: "min", "max", or "auto", which goes by the name.

    Raises:
        InputError: for another mode.
    """

    def __init__(self, directory: Path, name: str | None, mode: str):
        if mode not in ("auto", "min", "max"):
            raise InputError(f"mode is {mode!r}; choose one of auto, min, max")
        if mode == "auto":
            mode = "max" if name and any(part in name for part in _HIGHER_IS_BETTER) else "min"
        self.directory, self.name, self.mode = directory, name, mode

    @property
    def log(self) -> keeper.Best | None:
        """The log that is compared, for others who keep checkpoints."""
        return None if self.name is None else keeper.Best(self.name, self.mode)

    def is_best(self, logs: Mapping[str, float]) -> bool:
        """Compares an epoch with those before it; all processes call it, and the first one decides.

        Args:
            logs: logs of the epoch; nothing is being written to the directory.

        Raises:
            InputError: where no epoch logs such a number.
        """
        name, mode = self.name, self.mode
        if name is None:
            return False
        if name not in logs:
            if name.startswith("val_") and not any(n.startswith("val_") for n in logs):
                return False  # Not every epoch need be validated.
            raise InputError(
                f"best is {name!r}, which no epoch logs; choose one of {', '.join(logs)}"
            )

        def compare() -> bool:
            held = manager.list_checkpoints(self.directory)
            former = manager.find_best(held, name, mode)
            if former is None:
                return True
            return logs[name] < former[0] if mode == "min" else logs[name] > former[0]

        return processes.broadcast("best", compare)


class FiniteLoss:
    """Looks at the losses of the steps, one after another.

    Args:
        directory: directory of the run's checkpoints, for the message.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._last: float | None = None

    def is_finite(self, loss: Any) -> bool:
        """Returns whether a step's loss is finite.

        A loss that the device has not computed yet counts as finite; nothing waits for it.
        """
        if not isinstance(loss, float):
            return True
        if math.isfinite(loss):
            self._last = loss
            return True
        return False

    def error(self, loss: float, step: int, rate: float) -> InputError:
        """Returns what to raise, once nothing is being written any more.

        Args:
            loss: that is not finite.
            step: that gave it.
            rate: the learning rate.
        """
        kept = manager.list_checkpoints(self._directory)
        good = f"checkpoint {kept[0].name} is good" if kept else "no checkpoint was made"
        return InputError(
            f"the loss is {loss} at step {step} (learning rate {rate:.3g}); the last finite one "
            f"was {self._last}; {good}; check the data or the learning rate"
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
        match = re.fullmatch(r"(\d+)(s?)", str(every))
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
        """Whether neither steps nor seconds were given."""
        return self.steps is None and self.seconds is None

    def begin(self, step: int) -> None:
        """The run begins, or continues, after this step."""
        self._counted = self._reached = step
        self.restart()

    def restart(self) -> None:
        """The clock starts over: a checkpoint was made, or the run begins."""
        self._since = perf_counter()

    def now(self, step: int) -> bool:
        """Returns whether it is time after this step.

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


class BackgroundWriter:
    """Runs jobs in a thread, each after the one before is done.

    The thread is no daemon: a process that ends waits for what is being written.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> "Future[object]":
        """Waits for the former job and raises what it raised, then begins this one.

        Returns:
            What tells others that it is done, or what it raised.
        """
        self.wait()
        done: Future[object] = Future()

        def run() -> None:
            try:
                found = job()
            except Exception as error:
                self._error = error
                done.set_exception(error)
            else:
                done.set_result(found)

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()
        return done

    @property
    def failed(self) -> bool:
        """Whether a job has raised something; does not wait."""
        return self._error is not None

    def wait(self) -> None:
        """Waits for the job and raises what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


class EpochStage(Enum):
    """The stages of an epoch."""

    TRAINING = "its steps"
    VALIDATING = "its validation"
    VALIDATED = "after its validation"


class EpochMemory:
    """The state at the beginning of an epoch, and the metrics that its validation overwrites.

    Attributes:
        stage: what the epoch is at.
        rng: random generators and learning rates at its begin.
    """

    def __init__(self) -> None:
        self.begin({})

    def begin(self, rng: Arrays) -> None:
        """An epoch begins, with these random generators and learning rates."""
        self.stage, self.rng = EpochStage.TRAINING, rng
        self._metrics: Arrays = {}
        self._rng: Arrays = {}

    def begin_validation(self, model: keras.Model) -> None:
        """Keeps the training's averages and the random generators."""
        self._metrics = state.copied(state.named(model.metrics_variables), "metrics")
        self._rng = extra_state.capture(model.optimizer)
        self.stage = EpochStage.VALIDATING

    def end_validation(self) -> None:
        """The metrics are those of validation until the next epoch begins."""
        self.stage = EpochStage.VALIDATED

    def metrics(self, now: Arrays) -> Arrays:
        """Returns the training's averages, where `now` are those of the model."""
        return now if self.stage is EpochStage.TRAINING else self._metrics

    def rng_now(self, optimizer: keras.Optimizer) -> Arrays:
        """Returns what a resumed run begins with: validation is gone through again as a whole."""
        return self._rng if self.stage is EpochStage.VALIDATING else extra_state.capture(optimizer)


class Saver:
    """Reads the state of a run into host memory, and has it written beside the training.

    Args:
        directory: directory of the run's checkpoints.
        keep: how many of the newest stay.
        best: whose checkpoint stays too.
        only_trainable: leaves frozen weights out; None where adapters are to decide.
        origin: where the frozen weights came from.

    Attributes:
        writer: at work beside the training.
        memory: memory of the running epoch.
        base: hash and origin of frozen weights that are left out, or None.
        saved_step: step of the last checkpoint that was read or restored; -1 where there is
            none.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        best: BestEpoch,
        only_trainable: bool | None,
        origin: str | None,
    ):
        check_whole("keep", keep)
        self._directory, self._keep, self._best = directory, keep, best
        self._only_trainable, self._origin = only_trainable, origin
        self.writer = BackgroundWriter()
        self.begin()

    @property
    def keeper(self) -> keeper.Keeper | None:
        """Who keeps the checkpoints of the directory, or None where the run itself does."""
        held = keeper.current
        return held if held is not None and held.keeps(self._directory) else None

    def begin(self) -> None:
        """A run begins, whose model is not known yet."""
        self.memory = EpochMemory()
        self.base: dict[str, Any] | None = None
        self.saved_step = -1
        self._read: list[manager.Snapshot] = []

    def look_at(self, model: keras.Model) -> None:
        """Settles what of a model is saved, and builds its optimizer where needed."""
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if self._only_trainable is None:
            self._only_trainable = state.has_adapters(model)
        if self._only_trainable:
            self.base = {"sha256": state.base_digest(model), "origin": self._origin}

    def read(self, run: RunState, model: keras.Model) -> None:
        """Copies everything to the host, while nothing is being written."""
        variables = state.parts(model, bool(self._only_trainable))
        arrays = {part: state.copied(held, part) for part, held in variables.items()}
        arrays["metrics"] = self.memory.metrics(arrays["metrics"])
        in_validation = self.memory.stage is EpochStage.VALIDATING
        self._read = [manager.Snapshot(replace(run, in_validation=in_validation), arrays)]

    def finish(self, model: keras.Model, others: CallbackStates, trained: bool) -> bool:
        """Adds what the other callbacks know by now, and has what was read written.

        Args:
            model: that is trained.
            others: the callbacks beside the one that saves.
            trained: the training is over; another one would begin the next epoch.

        Returns:
            Whether anything was read.
        """
        if not self._read:
            return False
        snapshot = self._read.pop()
        found: Arrays = {}
        now = self.memory.rng_now(model.optimizer)
        begun = now
        if snapshot.run.batch:
            begun = self.memory.rng
        elif trained:
            begun = extra_state.without_rate(now)
        run = replace(
            snapshot.run,
            callbacks=others.capture(found),
            # A callback that ended the training has had its reasons at the end of the epoch.
            ended=bool(model.stop_training) and snapshot.run.batch == 0,
            rng={"now": now, "epoch": begun},
            callback_arrays=found,
        )
        optimizer = format.replace(snapshot.arrays["optimizer"], extra_state.rates(now))
        whole = manager.Snapshot(run, {**snapshot.arrays, "optimizer": optimizer})
        keep = self._keep if self.keeper is None else None
        done = self.writer.submit(
            lambda: manager.save(self._directory, whole, keep, self._best.name, self._best.mode)
        )
        self.saved_step = run.step
        if self.keeper is not None:
            path = manager.path_of(self._directory, run.step)
            self.keeper.tell(path, run, done, self._best.log)
        return True
