"""Workers that join as JAX processes, by the variables that kmodels reads.

Ray's own `JaxConfig` does not join workers on CPUs. On GPUs it gives every worker the devices from
0 on, which two workers of one machine would share, and it waits for lost workers for JAX's timeout.
"""

from collections.abc import Mapping
from typing import Any

import jax

ONE: str | None = None
# Words in the errors of JAX and Gloo about a lost process.
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
    """See `WorkersBackend`: JAX ends all processes if the first one ends before the others."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
