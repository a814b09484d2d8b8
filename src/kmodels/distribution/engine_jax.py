"""Many devices on JAX: `keras.distribution`'s DataParallel, or its ModelParallel by layout rules.

One process drives all its devices, and arrays given to `fit` just work: each batch is the global
one. In a run of several processes each feeds its own rows of it.
"""

import keras

from kmodels.distribution.engine import Engine
from kmodels.distribution.mesh import Mesh

MORE = "on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={}"


def devices() -> int:
    """How many there are, in all processes."""
    return len(keras.distribution.list_devices())


def use(mesh: Mesh) -> Engine:
    """Sets the distribution of this mesh for the process."""
    raise NotImplementedError
