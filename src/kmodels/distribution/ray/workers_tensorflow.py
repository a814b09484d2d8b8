"""A single worker: TensorFlow's engine has its replicas in one process."""

from collections.abc import Mapping
from typing import Any

ONE: str | None = "its replicas are in one process, which drives the devices of one machine"


def config(resources: Mapping[str, float], seconds: float) -> Any:
    """See `WorkersBackend`."""
    from ray.train.backend import BackendConfig

    return BackendConfig()


def is_lost(error: BaseException) -> bool:
    """See `WorkersBackend`; there are no others."""
    return False


def leave() -> None:
    """See `WorkersBackend`; there are no others."""
