"""Choose the file by which a backend joins the workers of Ray Train into one run."""

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
        """Is a clause that says why there is one worker at most, or None if there are more."""
        ...

    def config(self, resources: Mapping[str, float], seconds: float) -> Any:
        """Returns the `ray.train.backend.BackendConfig` that joins the workers.

        Args:
            resources: of each worker, such as {"GPU": 1}.
            seconds: after which one that waits for others ends with an error.
        """
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Returns whether an error in one worker says that another one has gone."""
        ...

    def leave(self) -> None:
        """Takes leave of the others after the work, in the order that the backend needs."""
        ...


def workers_backend(backend: str) -> WorkersBackend:
    """Returns the file of a backend, which need not be that of this process.

    Raises:
        InputError: for an unknown backend, or one that is not installed.
    """
    if backend not in BACKENDS or importlib.util.find_spec(backend) is None:
        raise InputError(
            f"the backend of the workers is {backend!r}, which is unknown or not installed here; "
            "set KERAS_BACKEND, or give backend=, to one that is"
        )
    return backend_module("kmodels.distribution.ray.workers", WorkersBackend, of=backend)
