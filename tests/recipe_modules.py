"""The recipes as modules, as a user's shell runs them, and a run of one that is killed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def load(name: str) -> ModuleType:
    """Returns a recipe by the name of its file, without the ending."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their annotations up in the module's place.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
