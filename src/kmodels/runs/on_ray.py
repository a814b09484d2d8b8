"""Recipes on a Ray cluster, whose workers are the processes that train together."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.core.files import is_remote
from kmodels.runs.run_folder import check_new, has_checkpoints, path_of

Work = Callable[[Any], None]


def run(recipe: str, settings: Any, train: Callable[..., None], work: Work) -> None:
    """Runs a recipe on Ray and waits for its end.

    Args:
        recipe: name of the recipe.
        settings: a `Common` with `on`.
        train: the recipe's function.
        work: function of each worker, called with its settings.

    Raises:
        InputError: if Ray is missing, the directory cannot be used, or the run ends with an error.
    """
    if getattr(settings, "evaluate", False):
        raise InputError("--evaluate runs in one process; leave --on out")
    check_whole("--workers", settings.workers, 0)
    out = directory(recipe, settings)
    resources = _resources(settings.resources)
    function = of_workers(settings, train, work, out)
    from kmodels.distribution import ray

    ray.run(
        function,
        workers=max(settings.workers, 1),
        resources=resources,
        storage=out,
        max_failures=settings.max_failures,
        keep=settings.keep,
        best=True,
    )


def of_workers(
    settings: Any, train: Callable[..., None], work: Work, out: str
) -> Callable[[], None]:
    """Returns the function of each worker, which is pickled with the recipe's code.

    Args:
        settings: a `Common`.
        train: the recipe's function.
        work: function that is called with the settings of a worker.
        out: `directory` of the run.

    Raises:
        InputError: if Ray is missing.
    """
    from kmodels.distribution.ray.cluster import check_installed

    check_installed()
    from ray import cloudpickle

    # Workers cannot import the file of a recipe.
    module = sys.modules[train.__module__]
    if module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
    mesh = settings.mesh or "data=-1"
    inside = dataclasses.replace(settings, out=out, mesh=mesh, on=None, workers=0)

    def call() -> None:
        # Restarted workers resume from their own checkpoints.
        work(dataclasses.replace(inside, resume=has_checkpoints(Path(out))))

    return call


def directory(recipe: str, settings: Any) -> str:
    """Returns the directory of a run, which must be visible to Ray and all workers.

    Args:
        recipe: name of the recipe.
        settings: a `Common`.

    Raises:
        InputError: for an address, or a directory with a run that --resume does not continue.
    """
    if settings.out is not None and is_remote(settings.out):
        raise InputError(
            f"--out is the address {settings.out}; give a directory that all nodes share"
        )
    out = path_of(recipe, settings.out).resolve()
    check_new(out, settings.resume)
    return str(out)


def _resources(text: str) -> dict[str, float]:
    resources: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, amount = part.partition("=")
        try:
            resources[name.strip()] = float(amount)
        except ValueError:
            resources[name.strip()] = -1.0
    if not resources or min(resources.values()) < 0:
        raise InputError(f"--resources is {text!r}; write it as in GPU=1,CPU=4")
    return resources
