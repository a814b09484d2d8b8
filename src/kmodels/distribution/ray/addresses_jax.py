"""A backend of Ray Train that sets the variables by which JAX workers find each other."""

import socket
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from kmodels.core.processes_jax import tell


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
