"""Memory on JAX: what XLA keeps, and what there is."""

import os
from dataclasses import replace

import jax

from kmodels.core.types import Tensor
from kmodels.memory.sizes import Facts

# XLA starts what it can as early as it can on a CPU, unless this flag is given: more is alive at a
# time, and what is to be computed again is computed first.
_EAGER = (
    jax.default_backend() == "cpu"
    and "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    not in os.environ.get("XLA_FLAGS", "")
)
FACTS = Facts(
    norm=0,
    gelu=0,
    moments=2,
    table=0,
    slack=1.3 if _EAGER else 0.2,
    remat=not _EAGER,
    compiler=150 * 2**20,
)
ACCELERATOR = replace(FACTS, slack=0.2, remat=True, attention="plain")


def device_bytes() -> int | None:
    """Returns bytes that the accelerator has left, None where it does not tell; 0 without one."""
    if jax.default_backend() == "cpu":
        return 0
    held = jax.local_devices()[0].memory_stats() or {}
    return held["bytes_limit"] - held["bytes_in_use"] if "bytes_limit" in held else None


def by_blocks(x: Tensor, causal: bool, dropout: float) -> bool:
    """Returns whether attention keeps its weights, though by blocks: the override does."""
    return True
