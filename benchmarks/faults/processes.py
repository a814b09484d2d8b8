"""A recipe in a process of its own, which says what it does and can be killed."""

import multiprocessing
import os
import runpy
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Begins what a process says at the end of a step: its kind, number and time.
SIGN = ">"
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# One process imports all once and is forked for each run; nothing is computed in it before.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["kmodels.data", "kmodels.models", "kmodels.text", "kmodels.training", "matplotlib.pyplot"]
)


def _train(told: Connection, recipe: str, flags: tuple[str, ...]) -> None:
    """The recipe; it also says its steps, and what its frozen weights are before and after."""
    for handle in (1, 2):
        os.dup2(told.fileno(), handle)
    from kmodels.checkpoint import state
    from kmodels.training import Runner

    step, run = Runner.on_train_batch_end, Runner.run

    def say_step(self: Any, batch: int, logs: Any = None) -> None:
        before = self.step
        step(self, batch, logs)
        # Those before the cut are gone through again without training.
        print(SIGN, "again" if self.step == before else "step", self.step, time.time(), flush=True)

    def say_batch(self: Any, batch: int, logs: Any = None) -> None:
        print(SIGN, "validation", batch, time.time(), flush=True)

    def say_base(self: Any) -> None:
        print("base", state.digest(state.frozen(self.trained)), flush=True)
        run(self)
        print("base", state.digest(state.frozen(self.trained)), flush=True)

    Runner.on_train_batch_end, Runner.run = say_step, say_base
    Runner.on_test_batch_end = say_batch
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe, run_name="__main__")


class Run:
    """A process that trains; `--resume` starts where there is no checkpoint.

    Args:
        recipe: its name.
        out: directory of the run.
        *flags: others.

    Attributes:
        said: what was read of its output so far.
    """

    def __init__(self, recipe: str, out: Path, *flags: str):
        reader, writer = FORKS.Pipe(duplex=False)
        every = (*flags, "--resume", "--out", str(out))
        path = str(RECIPES / f"{recipe}.py")
        self.process = FORKS.Process(target=_train, args=(writer, path, every))
        self.process.start()
        writer.close()
        self.started = time.perf_counter()
        self.said = ""
        self._lines = os.fdopen(os.dup(reader.fileno()))

    @property
    def code(self) -> int | None:
        """The exit code; minus the signal that ended it; It is None while the process runs."""
        return self.process.exitcode

    def to_step(self, number: int = 0) -> float:
        """Waits for a step of at least this number, or the end; gives the seconds since start."""
        for line in self._lines:
            self.said += line
            if line.startswith(f"{SIGN} step ") and int(line.split()[2]) >= number:
                break
        return time.perf_counter() - self.started

    def to_end(self, limit: float | None = None) -> bool:
        """Returns whether it ended within so many seconds."""
        self.process.join(limit)
        if self.code is None:
            return False
        self.said += self._lines.read()
        self._lines.close()
        return True

    def interrupt(self, signum: int) -> float:
        """Sends the signal; gives the seconds from the end of the running step to the process's."""
        begun = time.time()
        os.kill(self.process.pid or 0, signum)
        self.to_end()
        gone = time.time()
        told = [line.split() for line in self.said.splitlines()]
        ends = [float(words[3]) for words in told if words[:1] == [SIGN]]
        return gone - min((end for end in ends if end > begun), default=begun)
