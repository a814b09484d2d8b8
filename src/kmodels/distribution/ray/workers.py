"""Protocol of `workers_<backend>.py`, by which Ray Train joins workers to one run."""

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

from kmodels.core.dispatch import backend_module
from kmodels.core.environment import BACKENDS
from kmodels.core.errors import InputError


class WorkersBackend(Protocol):
    """Workers of Ray on one backend."""

    @property
    def ONE(self) -> str | None:
        """The reason why there can be only one worker, or None."""
        ...

    def config(self, resources: Mapping[str, float], seconds: float) -> Any:
        """Returns the `ray.train.backend.BackendConfig` that joins workers with these resources.

        A worker that waits for others longer than these seconds raises.
        """
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Returns True if an error in a worker was caused by the loss of another one."""
        ...

    def leave(self) -> None:
        """Leaves the group of workers after the work, in the order that the backend needs."""
        ...


def workers_backend(backend: str) -> WorkersBackend:
    """Returns the module of an installed backend, which may differ from that of this process."""
    if backend not in BACKENDS or importlib.util.find_spec(backend) is None:
        raise InputError(
            f"the backend of the workers is {backend!r}, which is unknown or not installed here; "
            "set KERAS_BACKEND, or give backend=, to one that is"
        )
    return backend_module("kmodels.distribution.ray.workers", WorkersBackend, of=backend)
