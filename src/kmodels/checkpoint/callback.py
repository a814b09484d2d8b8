"""Checkpoint: a callback that keeps the whole state of `fit` on the disk, and continues from it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from kmodels.checkpoint.extra_state import CallbackStates
from kmodels.checkpoint.fit_run import FitHooks, FitRun
from kmodels.checkpoint.preemption import StopRequest
from kmodels.checkpoint.run_state import RunState
from kmodels.checkpoint.saving import BestEpoch, SaveInterval, Saver
from kmodels.core.errors import InputError
from kmodels.core.files import is_remote, local_path
from kmodels.core.remote import mirror
from kmodels.core.shown import shown
from kmodels.core.types import Logs
from kmodels.data.pipeline.request import RunningFit


class Checkpoint(FitHooks):
    """Saves all that `fit` needs to continue, and resumes from the newest checkpoint that verifies.

        checkpoint = kmodels.callbacks.Checkpoint("runs/first", every=500, keep=3, best="val_loss")
        model.fit(x, y, epochs=10, callbacks=[checkpoint, keras.callbacks.EarlyStopping()])

    The same script, run again, ends with the weights of a run that was never stopped, bit for bit
    on the same machine and backend; on another backend it goes on too. A checkpoint has weights,
    optimizer, running averages, states of seeds and random generators, and what the other callbacks
    know. Within an epoch the data continues with the next batch: a loader with a state is given it
    (`kmodels.data.StatefulLoader`), a PyDataset is asked for batches by their number, and
    anything else is gone through again, as a warning says. Set `keras.utils.set_random_seed`.

    All this holds in `fit` of the models of kmodels and in `kmodels.fit` of any other Keras model.
    Keras' own `fit` says little to a callback: there a run goes on exactly where an epoch ended, a
    cut epoch begins again with the weights that it had, and the other callbacks start from the
    beginning, as a line says.

    SIGTERM, SIGINT and SIGHUP save at the end of the batch, and end the process with 143, 130
    or 129.

    A number of the optimizer that was changed since the run began holds, and a line says so. Of
    several Checkpoints in one `fit`, such as one every 100 steps and one for the best epochs, the
    first one resumes the run and hears signals.

    A run on many devices may go on over another mesh, with another number of processes, on one
    device, and on another backend. One process writes each array whole. Of several each writes the
    parts that it holds, to a directory that all of them see; a signal to one of them stops all,
    after the same step.

    Args:
        directory: directory of the run's checkpoints, local or as "gs://bucket/run"; no other
            process has it.
        every: steps between checkpoints, or seconds as in "300s"; by default one after each epoch.
            Where several steps are executed at once, the first end of them counts.
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
        run: what is called before the state is read, and said where a signal stops it.

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
        remote = is_remote(directory)
        self.directory = (mirror.local_directory if remote else local_path)(directory)
        kept = BestEpoch(self.directory, best, mode)
        self.best, self.mode = best, kept.mode
        saver = Saver(self.directory, keep, kept, only_trainable, shown(origin))
        interval = SaveInterval(every)
        run = FitRun(self.directory, interval, kept, saver, shown(settings or {}), resume)
        super().__init__(run, stop_on_non_finite)
        self._prepared = False

    epoch = property(lambda self: self.run.epoch)
    batch = property(lambda self: self.run.batch)
    step = property(lambda self: self.run.step)

    @property
    def began_with(self) -> RunState:
        """The state that the run was restored from; of a new run that of its beginning."""
        resumer = self.run.resumer
        return RunState(0) if resumer is None else resumer.run

    @property
    def validated(self) -> bool:
        """Whether the epoch of the checkpoint that was restored, cut or not, had its end."""
        return self.began_with.validated

    @property
    def stop(self) -> StopRequest:
        """Whether a signal has come to this process."""
        return self.run.preemption.stop

    def on_train_begin(self, logs: Logs = None) -> None:
        """Takes the directory, and puts the newest state into model and optimizer."""
        fit = self.fit or RunningFit([self])  # Keras' own tells its callbacks nothing.
        beside = fit.callbacks
        first, *more = [c for c in beside if isinstance(c, Checkpoint)]
        if first is not self:
            self.run.follow(first.run, self.model)
        elif len({c.directory.resolve() for c in (self, *more)}) <= len(more):
            raise InputError(
                f"two Checkpoints of one fit have the directory {self.directory}; give each its own"
            )
        elif not self._prepared:
            self.prepare(self.model, self.params.get("steps"), beside)
        self._prepared = False  # A `fit` after one that an error ended restores again.
        others = CallbackStates(c for c in beside if c is not self)
        self.run.begin_fit(self.model, self.params, others, fit)

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
        path = self.run.prepare(model, steps_per_epoch, beside)
        self._prepared = True
        return path

    def save(self) -> None:
        """Saves now, inside `fit`, beside the training."""
        self.run.save()

    def wait(self) -> None:
        """Waits until what is being written is on the disk, and raises what went wrong with it."""
        self.run.saver.writer.wait()
