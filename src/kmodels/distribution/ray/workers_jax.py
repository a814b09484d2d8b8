"""Workers that join as JAX processes, by the variables that kmodels reads.

Ray's own `JaxConfig` does not join workers on CPUs. On GPUs it gives every worker the devices from
0 on, which two workers of one machine would share, and it waits for lost workers for JAX's timeout.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ray
from ray.train.backend import Backend, BackendConfig

from kmodels.core.processes_jax import tell

ONE: str | None = None
# Words in the errors of JAX and Gloo about a lost process.
_LOST = ("gloo", "unavailable", "deadline_exceeded", "coordination service", "connection reset")


@dataclass
class AddressConfig(BackendConfig):
    """Sends each worker the address of the first one, their number and its own index."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Class whose hooks Ray calls."""
        return _Addresses


class _Addresses(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray after all workers have started, before their work."""
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


def config(resources: Mapping[str, float], seconds: float) -> Any:
    """See `WorkersBackend`."""
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
