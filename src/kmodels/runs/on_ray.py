"""A recipe on a Ray cluster: its workers are the processes that train together."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.core.files import local_path


def run(recipe: str, settings: Any, train: Callable[..., None], command: str) -> None:
    """Runs a recipe on Ray, as its settings say, and waits for its end.

    Args:
        recipe: its name.
        settings: a `Common` with `on`.
        train: the recipe's function.
        command: the command line that started it.

    Raises:
        InputError: where Ray is missing, the directory cannot be used, or the run ends with an
            error.
    """
    if getattr(settings, "evaluate", False):
        raise InputError("--evaluate needs one process; leave --on out")
    check_whole("--workers", settings.workers, 0)
    out = _out(recipe, settings)
    resources = _resources(settings.resources)
    inside = _inside(settings, out)
    from kmodels.distribution import ray

    ray.run(
        _bound(recipe, inside, train, command),
        workers=max(settings.workers, 1),
        resources=resources,
        storage=out,
        max_failures=settings.max_failures,
        keep=settings.keep,
    )


def start(recipe: str, arguments: Sequence[Any], out: str | Path) -> Callable[[], None]:
    """Returns what each worker calls to run a recipe by its name.

    Args:
        recipe: name on the command line, such as "vit".
        arguments: its flags, without those of the cluster.
        out: directory of the run.

    Raises:
        InputError: for an unknown recipe or flag.
    """
    from kmodels.runs import shipped
    from kmodels.runs.flags import parse

    if recipe not in shipped.RECIPES:
        raise InputError(
            f"there is no recipe {recipe!r}; give a function, or one of "
            f"{', '.join(shipped.RECIPES)}"
        )
    name = shipped.RECIPES[recipe]
    module = shipped.load(name)
    words = [str(word) for word in arguments]
    program = f"kmodels {recipe}"
    settings = parse(module.Settings, words, module.__doc__ or "", name, program)
    if settings.on is not None:
        raise InputError("run starts the recipe on Ray already; leave --on out")
    settings = _inside(settings, _out(name, dataclasses.replace(settings, out=os.fspath(out))))
    return _bound(name, settings, module.train, " ".join([program, *words]))


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


def _inside(settings: Any, out: str) -> Any:
    """Returns the settings of each worker."""
    mesh = settings.mesh or "data=-1"
    return dataclasses.replace(settings, out=out, mesh=mesh, on=None, workers=0)


def _bound(
    recipe: str, settings: Any, train: Callable[..., None], command: str
) -> Callable[[], None]:
    # The file of a recipe is no module that workers could import, so it travels with them.
    from kmodels.distribution.ray.cluster import check_installed

    check_installed()
    from ray import cloudpickle

    module = sys.modules[train.__module__]
    if module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)

    def work() -> None:
        from kmodels.runs import recipe as recipes

        # Workers that are started again find checkpoints, which are their own.
        begun = any(Path(settings.out, "checkpoints").glob("step_*"))
        recipes.work(recipe, dataclasses.replace(settings, resume=begun), train, command)

    return work


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
