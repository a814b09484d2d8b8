"""Workers that join as JAX processes, which find each other by the variables that kmodels reads.

Ray's own `JaxConfig` joins nothing on CPUs. On GPUs it gives every worker the devices from 0 on,
so that two workers of one machine would share them, and it waits for the lost for JAX's own time.
"""

from collections.abc import Mapping
from typing import Any

import jax

ONE: str | None = None
# How JAX and Gloo begin what they say of a process that has gone.
_LOST = ("gloo", "unavailable", "deadline_exceeded", "coordination service", "connection reset")


def config(resources: Mapping[str, float], seconds: float) -> Any:
    """See `WorkersBackend`."""
    from kmodels.distribution.ray.addresses_jax import AddressConfig

    return AddressConfig()


def is_lost(error: BaseException) -> bool:
    """See `WorkersBackend`."""
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        word in str(error).lower() for word in _LOST
    )


def leave() -> None:
    """See `WorkersBackend`: JAX ends all processes where the first one goes before the others."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
