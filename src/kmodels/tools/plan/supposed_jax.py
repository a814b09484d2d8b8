"""A mesh in force for as long as ops are asked what they would do on it; it has no devices."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from kmodels.distribution.engines.engine_jax import Replicated, ShardedLayouts
from kmodels.distribution.mesh import Mesh


@contextmanager
def supposed(mesh: Mesh) -> Iterator[None]:
    """Gives Keras the distribution that `distribute` would set, inside the block.

    Nothing may be placed there: the devices are names alone.
    """
    names = [f"cpu:{number}" for number in range(mesh.size)]
    if mesh.size == mesh.data:
        grid = keras.distribution.DeviceMesh((mesh.size,), ("data",), names)
        made = Replicated(grid, auto_shard_dataset=False)
    else:
        grid = keras.distribution.DeviceMesh(tuple(mesh.grid.values()), tuple(mesh.grid), names)
        made = ShardedLayouts(mesh, grid)
    with made.scope():
        yield
