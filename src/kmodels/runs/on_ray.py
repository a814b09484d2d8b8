"""A recipe on a Ray cluster: its workers are the processes that train together."""

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
    """Runs a recipe on Ray, as its settings say, and waits for its end.

    Args:
        recipe: its name.
        settings: a `Common` with `on`.
        train: the recipe's function.
        work: what each worker calls with its settings.

    Raises:
        InputError: where Ray is missing, the directory cannot be used, or the run ends with an
            error.
    """
    if getattr(settings, "evaluate", False):
        raise InputError("--evaluate needs one process; leave --on out")
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
    """Returns what each worker calls, which carries the recipe's file with it.

    Args:
        settings: a `Common`.
        train: the recipe's function.
        work: what is called with the settings of a worker.
        out: `directory` of the run.

    Raises:
        InputError: where Ray is missing.
    """
    from kmodels.distribution.ray.cluster import check_installed

    check_installed()
    from ray import cloudpickle

    # The file of a recipe is no module that workers could import.
    module = sys.modules[train.__module__]
    if module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
    mesh = settings.mesh or "data=-1"
    inside = dataclasses.replace(settings, out=out, mesh=mesh, on=None, workers=0)

    def call() -> None:
        # Workers that are started again find checkpoints, which are their own.
        work(dataclasses.replace(inside, resume=has_checkpoints(Path(out))))

    return call


def directory(recipe: str, settings: Any) -> str:
    """Returns the directory of a run, which Ray and all workers have to find.

    Args:
        recipe: its name.
        settings: a `Common`.

    Raises:
        InputError: for an address, or where it holds a run that is not to be resumed.
    """
    if settings.out is not None and is_remote(settings.out):
        raise InputError(
            f"{settings.out} is an address, and a recipe writes its files to a disk; give a "
            "directory that all nodes see"
        )
    out = path_of(recipe, settings.out).resolve()
    check_new(out, settings.resume)
    return str(out)


def _resources(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            found[name.strip()] = -1.0
    if not found or min(found.values()) < 0:
        raise InputError(f"--resources is {text!r}; write it as in GPU=1,CPU=4")
    return found
