"""The Ray cluster that a run is on: the one at RAY_ADDRESS, or one of this machine for the run."""

import fcntl
import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from kmodels.core.environment import environ_with
from kmodels.core.errors import InputError, one_line

_FOLDER = "kmodels-ray-"
# Bytes of Ray's object store, through which no data goes.
_OBJECT_STORE = 200_000_000
# Ray's default is two seconds, and it reads one report of each worker at a time.
SECONDS_BETWEEN_LOOKS = 0.5
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(SECONDS_BETWEEN_LOOKS),
    # Output of a run is shown unchanged, without a line of Ray for each checkpoint.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    # By default Ray lowers the priority of workers.
    "RAY_worker_niceness": "0",
}
# For a cluster of this machine. By default Ray writes its token to the home folder.
_PRIVATE = {
    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
    # Its processes then listen only on the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def check_installed() -> None:
    """Raises `InputError` if Ray is not installed; call it before Ray is imported."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a folder of this name is not the package
        raise InputError("a run on Ray needs the package ray: pip install 'kmodels[ray]'")
    # Ray reads these only when it is imported.
    if "ray" not in sys.modules and "RAY_ADDRESS" not in os.environ:
        for name, value in _PRIVATE.items():
            os.environ.setdefault(name, value)


@contextmanager
def connected(needed: Mapping[str, float]) -> Iterator[Any]:
    """Connects to a cluster with the needed resources in the block; yields the module `ray`.

    If the process has called `ray.init`, its cluster is used, otherwise the one at RAY_ADDRESS. If
    that is not set, a cluster of this machine is started for the block, with its files in a
    temporary folder and as many CPUs as needed.

    Raises:
        InputError: if Ray is not installed, no cluster answers, or this machine has too few
            resources.
    """
    check_installed()
    import ray

    with environ_with({k: v for k, v in _SETTINGS.items() if k not in os.environ}):
        if ray.is_initialized():
            _say_where_short(ray, needed)
            yield ray
            return
        if "RAY_ADDRESS" in os.environ:
            _connect(ray)
            try:
                _say_where_short(ray, needed)
                yield ray
            finally:
                ray.shutdown()
            return
        with _folder() as folder:
            try:
                _start(ray, needed, folder)
                if short := _short(ray, needed):
                    raise InputError(
                        f"this machine has {short}; give other resources or fewer workers, or set "
                        "RAY_ADDRESS to a cluster"
                    )
                yield ray
            finally:
                ray.shutdown()


@contextmanager
def _folder() -> Iterator[str]:
    """Yields a folder for the files of a cluster, locked until this process ends.

    Folders of killed processes are removed first. Ray's sockets need a short name.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):
            # One without files may belong to a process that has not locked it yet.
            if any(left.iterdir()):
                with _locked(left):
                    shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Locks a folder; raises OSError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _short(ray: ModuleType, needed: Mapping[str, float]) -> str:
    """Returns the resources that are too few, for a message; empty if there are enough."""
    there = ray.cluster_resources()
    return " and ".join(
        f"{there.get(name, 0):g} {name} of {amount:g}"
        for name, amount in needed.items()
        if there.get(name, 0) < amount
    )


def _say_where_short(ray: ModuleType, needed: Mapping[str, float]) -> None:
    """Prints the resources that a cluster lacks; it may grow while the run waits."""
    if short := _short(ray, needed):
        print(f"the Ray cluster has {short} now; the run waits for the others", flush=True)


def _quiet(ray: ModuleType) -> dict[str, Any]:
    return {"logging_level": "ERROR", "logging_config": ray.LoggingConfig(log_level="ERROR")}


def _connect(ray: ModuleType) -> None:
    """Connects to the cluster at RAY_ADDRESS."""
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], **_quiet(ray))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"no Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: "
            f"{one_line(error)[:200]}; start one, or unset it"
        ) from error


def _start(ray: ModuleType, needed: Mapping[str, float], folder: str) -> None:
    """Starts a cluster of this machine, which ends with this process."""
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, int(needed.get("CPU", 0))),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE,
        # Ray makes its own folder readable for everybody; the one around it is private.
        _temp_dir=os.path.join(folder, "r"),
        **_quiet(ray),
    )
