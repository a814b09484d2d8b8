"""A backend of Ray Train that tells JAX workers the variables by which they find each other."""

import socket
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from kmodels.core.processes_jax import tell


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
