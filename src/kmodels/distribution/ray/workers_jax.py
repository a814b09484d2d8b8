"""Workers that join as JAX processes, which find each other by the variables that kmodels reads.

Ray's own `JaxConfig` joins nothing on CPUs. On GPUs it gives every worker the devices from 0 on,
so that two workers of one machine would share them, and it waits for the lost for JAX's own time.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ray
from ray.train.backend import Backend, BackendConfig

from kmodels.distribution.processes_jax import tell


@dataclass
class AddressConfig(BackendConfig):
    """Tells each worker the address of the first one, how many there are and which it is."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class whose hooks Ray calls."""
        return _Addresses


class _Addresses(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray once all workers are there, before they begin."""
        address = worker_group.execute_single(0, _free_address)
        for index in range(len(worker_group)):
            worker_group.execute_single(index, tell, address, len(worker_group), index)


def _free_address() -> str:
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


ONE: str | None = None
# How JAX and Gloo begin what they say of a process that has gone.
_LOST = ("gloo", "unavailable", "deadline_exceeded", "coordination service", "connection reset")


def config(resources: Mapping[str, float], seconds: float) -> Any:
    """See `WorkersBackend`."""
    from kmodels.distribution.ray.workers_jax import AddressConfig

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
