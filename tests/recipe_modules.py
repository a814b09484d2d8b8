"""The recipes as modules, as a user's shell runs them, and runs of them that are stopped."""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their annotations up in the module's place.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result(folder: Path, name: str = "result.json") -> dict[str, Any]:
    """Returns the content of a JSON file in the folder of a run."""
    return json.loads((folder / name).read_text())


class Killed(BaseException):
    """What stands for kill -9 inside a test: nothing of the run is saved after it."""


def run_killed(
    recipe: ModuleType, arguments: list[str], step: int, checkpoint_is_written: bool = True
) -> None:
    """Runs a recipe until it is killed at the end of a step.

    Args:
        recipe: a module of `load`.
        arguments: of its command line.
        step: number of the step, from 1.
        checkpoint_is_written: whether one that is being written is waited for.
    """
    from kmodels.runs.runner import Runner

    real = Runner.on_train_batch_end

    def on_train_batch_end(self, batch, logs=None):
        real(self, batch, logs)
        if self.step == step:
            if checkpoint_is_written:
                self.checkpoint.wait()
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Runner, "on_train_batch_end", on_train_batch_end)
        recipe.main(arguments)


@contextmanager
def without_figures() -> Iterator[None]:
    """Saves no figures, a fifth of a small run; each recipe draws them in another one."""
    from kmodels.runs import plots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_save", lambda figure, path: None)
        yield


def check_killed_run(
    recipe: ModuleType, arguments: list[str], whole: Path, out: Path, step: int, **settings: bool
) -> None:
    """Kills a run at a step, resumes it, and compares it with one that nothing interrupts."""
    import keras

    run_killed(recipe, [*arguments, "--out", str(out)], step, **settings)
    keras.utils.set_random_seed(5)
    with without_figures():
        assert recipe.main(["--resume", "--out", str(out)]) == 0
    check_same_run(out, whole)


def check_same_run(out: Path, whole: Path) -> None:
    """Compares the losses, weights and metrics of two runs bit by bit."""
    found, expected = result(out), result(whole)
    for key in ("step_losses", "weights_digest", "metrics"):
        assert found[key] == expected[key], key
    # Other masks, orders or dropped units would give other losses.
    assert max(found["step_losses"]) - min(found["step_losses"]) > 1e-3


def stop_at(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """Sends this process SIGTERM before the end of each of the steps."""
    from kmodels.runs.runner import Runner

    real, left = Runner.on_train_batch_end, [*steps]

    def on_train_batch_end(self, batch, logs=None):
        if left and self.step + 1 == left[0]:
            left.pop(0)
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, batch, logs)

    patch.setattr(Runner, "on_train_batch_end", on_train_batch_end)
