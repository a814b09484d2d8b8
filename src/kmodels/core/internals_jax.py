"""Private names of JAX, each behind a public function."""

from typing import Any

from jax._src import distributed, xla_bridge
from jax._src.lib import cuda_versions


def backends_are_initialized() -> bool:
    """Returns True if JAX has opened its devices, after which variables of XLA are not read."""
    return xla_bridge.backends_are_initialized()


def process_id() -> int:
    """Returns this process's number in the cluster that was joined; 0 without one.

    `jax.process_index` is public, and opens the devices.
    """
    return distributed.global_state.process_id


def process_count() -> int:
    """Returns how many processes have joined; 1 without a cluster, as `process_id`."""
    return distributed.global_state.num_processes


def coordination_client() -> Any:
    """Returns the client of the cluster's key-value store, None without a cluster."""
    return distributed.global_state.client


def has_cudnn() -> bool:
    """Returns True if JAX's plugin for CUDA is here, without which its attention raises."""
    return cuda_versions is not None
