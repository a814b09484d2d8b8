"""A recipe, one process of which is killed after a step, the first time that it gets there.

python tests/nightly/launch/dying_recipe.py recipes/vit.py FLAGS...

KMODELS_TEST_DEATH is "RANK STEP CHECKPOINT": the process of that rank dies by SIGKILL after the
step, once all have written that checkpoint, and leaves a file `died` in the directory of the run.
With KMODELS_TEST_SMALL, the recipe's command line trains a model that compiles in a moment.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kmodels.runs import recipe

RANKS = ("RANK", "KERAS_DISTRIBUTION_PROCESS_ID", "SLURM_PROCID")


def die_after(step: int, checkpoint: Path, died: Path) -> None:
    """Has this process die after a step of the whole run."""
    from kmodels.training import Checkpoint

    steps = 0
    end = Checkpoint.on_train_batch_end

    def count(self, batch, logs=None):
        nonlocal steps
        end(self, batch, logs)
        steps += 1
        if steps == step:
            # Others write their parts of the checkpoint while this one waits.
            while not (checkpoint / "state.json").exists():
                time.sleep(0.01)
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpoint.on_train_batch_end = count


def train(settings: Any, folder: recipe.Folder) -> None:
    """What stands for the training of a recipe."""
    import keras
    import numpy as np

    from kmodels import distribution
    from kmodels.weights import gather

    recipe.prepare(settings)
    first = keras.initializers.RandomNormal(seed=0)
    layers = [keras.Input((3,)), keras.layers.Dense(4, kernel_initializer=first, name="dense")]
    model: Any = keras.Sequential(layers, name="small")
    model = recipe.parallelize(model)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(settings.steps * settings.batch_size, 3))
    plan = distribution.current()
    saved = plan.callbacks(folder.path / "checkpoints", every=int(settings.checkpoint_every))
    x = x.astype("float32")
    y = x @ np.ones((3, 4), x.dtype)
    losses = model.fit(x, y, settings.batch_size, shuffle=False, verbose=0, callbacks=saved)
    kernel = gather.values(model.layers[0].kernel).tolist()
    folder.write_json("result.json", {"kernel": kernel, "loss": losses.history["loss"]})


def main(path: str, *flags: str) -> int:
    rank, step, checkpoint = os.environ["KMODELS_TEST_DEATH"].split(" ", 2)
    own = next(os.environ[name] for name in RANKS if name in os.environ)
    died = Path(checkpoint).parents[1] / "died"
    if own == rank and not died.exists():
        die_after(int(step), Path(checkpoint), died)
    found = runpy.run_path(path, run_name="recipe")
    if "KMODELS_TEST_SMALL" not in os.environ:
        sys.argv = [path, *flags]
        return found["main"]()
    return recipe.main(Path(path).stem, found["Settings"], train, flags)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
