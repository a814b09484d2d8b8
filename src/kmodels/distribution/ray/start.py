"""Starts a run on a Ray cluster, and raises its error in one line."""

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kmodels.checkpoint.preemption import Interrupted
from kmodels.core import processes
from kmodels.core.dispatch import backend as running_backend
from kmodels.core.errors import (
    InputError,
    check_choice,
    check_names,
    check_number,
    check_whole,
    one_line,
    pluralize,
)
from kmodels.core.files import is_remote, local_path
from kmodels.core.remote import open_address
from kmodels.distribution.ray.cluster import SECONDS_BETWEEN_LOOKS, check_installed, connected
from kmodels.distribution.ray.inside import SCORE, Work
from kmodels.distribution.ray.stopping import Stopped, new_key, wait
from kmodels.distribution.ray.workers import workers_backend

# In this time Ray has checked its workers, even on a busy machine.
_PATIENCE = 6 * SECONDS_BETWEEN_LOOKS
# Attribute of Ray's error for a worker that did not answer.
_MISSED = "health_check_failure"


def run(
    recipe_or_function: str | Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    workers: int | tuple[int, int] = 2,
    resources: Mapping[str, float] | None = None,
    storage: str | Path,
    max_failures: int = 3,
    keep: int | None = 2,
    best: str | bool | None = None,
    mode: Literal["min", "max"] = "min",
    backend: str | None = None,
    environment: Mapping[str, str] | None = None,
    scaling: Mapping[str, Any] | None = None,
) -> Any:
    """Runs a recipe, or a function with a `fit`, in the workers of a Ray cluster.

        result = kmodels.distribution.ray.run("vit", ["--epochs", "3"], storage="runs/vit")

    The workers are the processes of one run: `distribute("data=-1")` in the function distributes it
    over all of them. The cluster is that of `ray.init`, or the one at RAY_ADDRESS. Without either,
    a cluster of this machine is started for the run.

    If a worker or a node dies, all workers restart and continue from the newest checkpoint; with
    the same number of workers, the weights are those of an undisturbed run. An error of the
    function itself ends the run.

    Args:
        recipe_or_function: name of a recipe, such as "vit", or a function, which each worker calls.
            It makes its `Checkpoint` in `kmodels.distribution.ray.directory()`.
        arguments: arguments of the function, or the recipe's flags.
        workers: number of workers; (1, 4) uses as many as the cluster has room for.
        resources: resources of each worker; default: {"CPU": 1}. {"GPU": 1} for a GPU.
        storage: directory of the run that all nodes share, or an address such as "s3://bucket/run";
            a run in it is continued.
        max_failures: how often lost workers are replaced; -1 for any number.
        keep: number of newest checkpoints to keep; None for all.
        best: a log of an epoch, such as "val_loss", to keep the checkpoints with the best values
            and the newest one. True uses the log of the function's `Checkpoint`, like recipes.
        mode: "min" or "max", which value is the best.
        backend: Keras backend of the workers; default: that of this process.
        environment: further environment variables of the workers.
        scaling: further arguments of `ray.train.ScalingConfig`, such as `placement_strategy`.

    Returns:
        Ray's `Result`: the newest checkpoint, its metrics, and the return value of the function in
        the first worker.

    Raises:
        InputError: for wrong settings, if Ray or a backend is not installed, after an error of the
            work, or if workers were lost too often; one line each.
        Interrupted: after Ctrl-C or SIGTERM, once the workers have saved and stopped.
    """
    check_installed()
    resources = {"CPU": 1} if resources is None else resources
    _check_mappings(resources, environment or {}, scaling or {})
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise InputError(f"arguments is {arguments!r}; give a list, such as ['--epochs', '3']")
    if not isinstance(best, str | bool | None):
        raise InputError(f"best is {best!r}; give the name of a log, True or None")
    if isinstance(recipe_or_function, str):
        # By name: the package of recipes is above this one, and starts runs by it.
        recipes = importlib.import_module("kmodels.runs.recipe")
        function, arguments = recipes.on_ray_of(recipe_or_function, arguments, storage), ()
        best = True if best is None else best
    elif callable(recipe_or_function):
        function = recipe_or_function
    else:
        raise InputError(f"{recipe_or_function!r} is neither a function nor the name of a recipe")
    if best is True:
        mode = "max"  # Scores of logs whose minimum is best are negated.
    backend = backend or running_backend()
    most = _check(workers, max_failures, keep, mode, resources)
    module = workers_backend(backend)
    if most > 1 and module.ONE is not None:
        raise InputError(
            f"{most} workers on {backend} would each train alone: {module.ONE}; give workers=1, "
            "or take jax or torch"
        )
    place, options = _storage(storage)
    key = new_key()
    work = Work(
        function,
        tuple(arguments),
        backend=backend,
        storage=place,
        folder=os.getcwd(),
        patience=_PATIENCE,
        best=best,
        mode=mode,
        key=key,
    )
    least = min(workers) if isinstance(workers, tuple) else workers
    with connected({name: least * amount for name, amount in resources.items()}):
        from ray import train
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        trainer = DataParallelTrainer(
            lambda: work(),
            backend_config=module.config(resources, processes.limit()),
            scaling_config=train.ScalingConfig(
                num_workers=workers,
                use_gpu=bool(resources.get("GPU")),
                resources_per_worker=dict(resources),
                **(scaling or {}),
            ),
            run_config=train.RunConfig(
                **options,
                failure_config=train.FailureConfig(max_failures=max_failures),
                checkpoint_config=train.CheckpointConfig(
                    num_to_keep=keep,
                    checkpoint_score_attribute=SCORE if best else None,
                    checkpoint_score_order=mode,
                ),
                callbacks=[_end_at_errors()],
                worker_runtime_env={
                    "env_vars": {"KERAS_BACKEND": backend, **dict(environment or {})}
                },
                logging_config=train.LoggingConfig(log_level="CRITICAL"),
            ),
        )
        try:
            result = wait(trainer.fit, key)
        except Exception as error:
            raise _explain(error, place, pluralize(max_failures, "failure")) from error
    if isinstance(stopped := result.return_value, Stopped):
        raise Interrupted(stopped.signum, stopped.message)
    return result


def _check_mappings(
    resources: Mapping[str, float], environment: Mapping[str, str], scaling: Mapping[str, Any]
) -> None:
    """Raises `InputError` for values that Ray refuses once a cluster runs."""
    from ray.train import ScalingConfig

    named = {"resources": resources, "environment": environment, "scaling": scaling}
    for name, value in named.items():
        if not isinstance(value, Mapping):
            raise InputError(f"{name} is {value!r}; give a dictionary")
    for name, amount in resources.items():
        check_number(f"{name} of resources", amount, least=0, most=1e15)
    if not any(resources.values()):
        raise InputError(f"resources is {resources}; give some of a resource, such as {{'CPU': 1}}")
    for name, text in environment.items():
        if not isinstance(text, str):
            raise InputError(f"{name} of environment is {text!r}; give a text")
    fields = [field.name for field in dataclasses.fields(ScalingConfig)]
    own = ("num_workers", "use_gpu", "resources_per_worker")  # Other arguments of `run` set these.
    check_names("scaling", scaling, [name for name in fields if name not in own])


def _check(
    workers: int | tuple[int, ...],
    max_failures: int,
    keep: int | None,
    mode: str,
    resources: Mapping[str, float],
) -> int:
    """Returns the largest number of workers."""
    several = workers if isinstance(workers, tuple) else (workers, workers)
    if len(several) != 2:
        raise InputError(f"workers is {workers!r}; give a number, or two as in (1, 4)")
    for number in several:
        check_whole("workers", number)
    if several[0] > several[1]:
        raise InputError(f"workers is {workers}; give the smaller number first")
    check_whole("max_failures", max_failures, -1)
    if keep is not None:
        check_whole("keep", keep)
    check_choice("mode", mode, ("min", "max"))
    if resources.get("TPU"):
        raise InputError(
            "resources has TPU, whose slices Ray places by a topology that run does not know; "
            "start the recipe on each host of the slice, where JAX finds the others by itself"
        )
    return several[1]


def _storage(storage: str | Path) -> tuple[str, dict[str, Any]]:
    """Returns the directory of the run, and the arguments of `RunConfig` for it."""
    if not is_remote(storage):
        path = local_path(storage).resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot write to {path}: {error.strerror}; give another directory"
            ) from error
        return str(path), {"storage_path": str(path.parent), "name": path.name}
    remote = open_address(storage)
    if "memory" in remote.system.protocol:
        raise InputError(
            f"{remote.address} is in the memory of this process, which no worker sees; give a "
            "directory, or a bucket"
        )
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    parent, _, name = remote.path.rpartition("/")
    system = PyFileSystem(FSSpecHandler(remote.system))
    return remote.address, {"storage_path": parent, "storage_filesystem": system, "name": name}


def _end_at_errors() -> Any:
    """Returns a callback that ends the run after errors that workers would raise again.

    Ray restarts all workers after any error, which makes sense only if a worker was lost.
    """
    from ray.train import UserCallback

    class EndAtErrors(UserCallback):
        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            errors = [worker_exceptions[rank] for rank in sorted(worker_exceptions)]
            if all(isinstance(error, InputError) for error in errors):
                raise errors[0]

    return EndAtErrors()


def _explain(error: Exception, storage: str, failures: str) -> InputError:
    """Returns an error of `fit` of a trainer as one line."""
    failure = getattr(error, "controller_failure", None) or error
    if isinstance(failure, InputError):
        explained = InputError(one_line(failure))
        if stack := getattr(failure, "stack", ""):
            explained.add_note(stack)
        return explained
    lost = getattr(error, "worker_failures", {})
    if lost:
        # Workers that did not answer come before those that lost contact with them.
        order = {rank: (not hasattr(error, _MISSED), rank) for rank, error in lost.items()}
        rank = min(lost, key=lambda rank: order[rank])
        cause = getattr(lost[rank], _MISSED, lost[rank])
        reason = one_line(cause).partition(". ")[0][:300]
        return InputError(
            f"worker {rank} was lost and {failures} had been allowed: {reason}; run it again to "
            f"continue from the newest checkpoint in {storage}"
        )
    return InputError(f"Ray ended the run in {storage}: {one_line(failure)[:300]}")
