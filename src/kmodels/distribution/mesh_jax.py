"""The mesh on JAX: `DataParallel`, or `ModelParallel` by a family's layout."""

import logging
import math
from typing import Any

import keras

from kmodels.distribution.mesh import Layout
from kmodels.errors import InputError

logger = logging.getLogger(__name__)


class GuardedModelParallel(keras.distribution.ModelParallel):
    """Model parallelism that leaves a dimension whole where the axis does not divide it.

    Keras raises `IndivisibleError` there, and a family's layout serves all its sizes.
    """

    def get_variable_layout(self, variable: Any) -> Any:
        """The layout of the family's table, less the axes that do not divide."""
        layout = super().get_variable_layout(variable)
        lengths = dict(zip(self.device_mesh.axis_names, self.device_mesh.shape, strict=True))
        fits = tuple(
            axis if axis is None or size % lengths[axis] == 0 else None
            for axis, size in zip(layout.axes, variable.shape, strict=True)
        )
        if fits == tuple(layout.axes):
            return layout
        logger.info("%s of shape %s stays whole: %s", variable.path, variable.shape, lengths)
        return keras.distribution.TensorLayout(fits, self.device_mesh)


def use(mesh: dict[str, int], layout: Layout) -> Any:
    """Sets the distribution of this mesh for the process."""
    devices = keras.distribution.list_devices()
    needed = math.prod(mesh.values())
    if needed > len(devices):
        raise InputError(
            f"the mesh {mesh} needs {needed} devices and there are {len(devices)}; give a smaller "
            f"mesh, or on a CPU XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    devices = devices[:needed]
    if mesh.get("model", 1) == 1:
        distribution = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
    else:
        shape = (mesh.get("data", 1), mesh["model"])
        device_mesh = keras.distribution.DeviceMesh(shape, ("data", "model"), devices)
        layout_map = keras.distribution.LayoutMap(device_mesh)
        for pattern, axes in layout.items():
            layout_map[pattern] = axes
        distribution = GuardedModelParallel(
            layout_map=layout_map, batch_dim_name="data", auto_shard_dataset=False
        )
    keras.distribution.set_distribution(distribution)
    return distribution
