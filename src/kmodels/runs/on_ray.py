"""A recipe on a Ray cluster: its workers are the processes that train together."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.core.files import local_path

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
    out = _out(recipe, settings)
    resources = _resources(settings.resources)
    function = of_workers(recipe, settings, train, work, out)
    from kmodels.distribution import ray

    ray.run(
        function,
        workers=max(settings.workers, 1),
        resources=resources,
        storage=out,
        max_failures=settings.max_failures,
        keep=settings.keep,
    )


def of_workers(
    recipe: str, settings: Any, train: Callable[..., None], work: Work, out: str | Path
) -> Callable[[], None]:
    """Returns what each worker calls, which carries the recipe's file with it.

    Args:
        recipe: its name.
        settings: a `Common`.
        train: the recipe's function.
        work: what is called with the settings of a worker.
        out: directory of the run.

    Raises:
        InputError: where Ray is missing, or the directory holds a run that is not to be resumed.
    """
    from kmodels.distribution.ray.cluster import check_installed

    check_installed()
    from ray import cloudpickle

    # The file of a recipe is no module that workers could import.
    module = sys.modules[train.__module__]
    if module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
    given = dataclasses.replace(settings, out=os.fspath(out))
    mesh = settings.mesh or "data=-1"
    inside = dataclasses.replace(given, out=_out(recipe, given), mesh=mesh, on=None, workers=0)

    def call() -> None:
        # Workers that are started again find checkpoints, which are their own.
        begun = any(Path(inside.out, "checkpoints").glob("step_*"))
        work(dataclasses.replace(inside, resume=begun))

    return call


def _out(recipe: str, settings: Any) -> str:
    """Returns the directory of the run, which Ray and all workers have to find."""
    name = settings.out or f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = local_path(name).resolve()
    if not settings.resume and any((out / "checkpoints").glob("step_*")):
        raise InputError(
            f"--out {out} holds checkpoints of a run; add --resume to continue it, or give another "
            "directory"
        )
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
