"""Memory on JAX: facts about XLA, and the free memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import keras

from kmodels.core import keras_internals
from kmodels.distribution.engines.engine_jax import Replicated, ShardedLayouts
from kmodels.distribution.mesh import Mesh
from kmodels.tools.plan.estimate import Facts

# Without this flag, XLA on a CPU starts operations as early as possible: more arrays are alive at a
# time, and arrays that remat should recompute late are computed first.
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
    quantized=3 * 2**20,
)
ACCELERATOR = replace(FACTS, slack=0.2, remat=True, attention="plain", quantized=0)


@contextmanager
def supposed(mesh: Mesh) -> Iterator[None]:
    """Gives Keras the distribution that `distribute` would set inside the block.

    Nothing can be placed on it: the devices are only names.
    """
    if mesh.size == 1:
        yield
        return
    names = [f"cpu:{number}" for number in range(mesh.size)]
    if mesh.size == mesh.data:
        grid = keras.distribution.DeviceMesh((mesh.size,), ("data",), names)
        distribution = Replicated(grid, auto_shard_dataset=False)
    else:
        grid = keras.distribution.DeviceMesh(tuple(mesh.grid.values()), tuple(mesh.grid), names)
        distribution = ShardedLayouts(mesh, grid)
    with distribution.scope(), keras_internals.without_values():
        yield
