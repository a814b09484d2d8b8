"""Several JAX processes, joined by JAX's own coordination service."""

import atexit
import os
import sys
import time
from importlib.util import find_spec
from typing import Any

import jax

from kmodels.core import internals_jax
from kmodels.core.errors import InputError, one_line

_PREFIX = "KERAS_DISTRIBUTION_"
# Variables of clusters that JAX detects by itself.
_CLUSTERS = (
    "JAX_COORDINATOR_ADDRESS",
    "OMPI_MCA_orte_hnp_uri",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "MEGASCALE_COORDINATOR_ADDRESS",
)
_HEARTBEAT = 60
# JAX ends all processes soon after the first; this leaves them time to print their errors.
_LAST_WORDS = 2.0


def tell(address: str, count: int, index: int) -> None:
    """Sets the variables from which `join` reads the address, the count and the index."""
    os.environ[f"{_PREFIX}JOB_ADDRESSES"] = address
    os.environ[f"{_PREFIX}NUM_PROCESSES"] = str(count)
    os.environ[f"{_PREFIX}PROCESS_ID"] = str(index)


def join(seconds: float) -> None:
    """See `processes`."""
    if jax.distributed.is_initialized():
        return
    settings = {
        "coordinator_address": os.environ.get(f"{_PREFIX}JOB_ADDRESSES", "").split(",")[0] or None,
        "num_processes": _number("NUM_PROCESSES"),
        "process_id": _number("PROCESS_ID"),
    }
    is_set = any(value is not None for value in settings.values())
    if settings["num_processes"] == 1 or not (is_set or _in_cluster()):
        return
    # CPUs are connected by Gloo only if it is set; JAX's preemption service would handle SIGTERM
    # in place of ours.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **settings,
            initialization_timeout=max(int(seconds), 1),
            heartbeat_timeout_seconds=max(min(int(seconds), _HEARTBEAT), 1),
        )
    except (ValueError, RuntimeError) as error:
        reason = one_line(error)[:300]
        raise InputError(
            f"this process could not join the others: {reason}; set {_PREFIX}JOB_ADDRESSES, "
            f"{_PREFIX}NUM_PROCESSES and {_PREFIX}PROCESS_ID, and start all of them at once"
        ) from error
    atexit.register(_end)


def index() -> int:
    """See `processes`."""
    return internals_jax.process_id() if jax.distributed.is_initialized() else 0


def count() -> int:
    """See `processes`."""
    return internals_jax.process_count() if jax.distributed.is_initialized() else 1


def exchange(key: str, text: str, seconds: float) -> list[str]:
    """See `processes`; uses the key-value store, so that no device has to answer."""
    client: Any = internals_jax.coordination_client()
    client.key_value_set(f"kmodels/{key}/{index()}", text)
    end = time.monotonic() + seconds
    texts = []
    for process in range(count()):
        left = max(int(1000 * (end - time.monotonic())), 1)
        try:
            texts.append(client.blocking_key_value_get(f"kmodels/{key}/{process}", left))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(f"process {process} did not answer") from error
    return texts


def give_up(code: int) -> None:
    """See `processes`: without it, JAX waits at exit until all processes are there."""
    if index() == 0:
        time.sleep(_LAST_WORDS)
    os._exit(code)


def _end() -> None:
    # Python sets it if an exception ends a script.
    if getattr(sys, "last_value", None) is not None:
        sys.stderr.flush()
        give_up(1)


def _number(name: str) -> int | None:
    text = os.environ.get(_PREFIX + name)
    if text is not None and not text.isdecimal():
        raise InputError(f"{_PREFIX}{name} is {text!r}; give a whole number from 0")
    return None if text is None else int(text)


def _in_cluster() -> bool:
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_NODELIST" in os.environ:
        return True
    if any(name in os.environ for name in _CLUSTERS):
        return True
    if "JOB_COMPLETION_INDEX" in os.environ and find_spec("kubernetes") is not None:
        return True
    return find_spec("libtpu") is not None and os.environ.get("JAX_PLATFORMS") != "cpu"
