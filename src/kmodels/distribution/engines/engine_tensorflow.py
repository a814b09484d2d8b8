"""Many devices of one host on TensorFlow: `tf.distribute.MirroredStrategy`.

Each device has the model and computes its rows of a batch; gradients are summed. Sharded weights
are not supported, and Keras' `fit` fails under MultiWorkerMirroredStrategy before the first step
(keras-team/keras#20585).
"""

import functools
import json
import os
from typing import Any

import keras
import tensorflow as tf

from kmodels.core import keras_internals, replicas_tensorflow
from kmodels.core.errors import InputError
from kmodels.distribution.engines.engine import Engine
from kmodels.distribution.mesh import Mesh

MORE = (
    "on a CPU call tf.config.set_logical_device_configuration with {} "
    "tf.config.LogicalDeviceConfiguration() before all else"
)
NO_SEQUENCE = "TensorFlow has no attention over several devices"


def devices() -> int:
    """Returns the number of GPUs, or of logical CPUs if there are none."""
    return len(_every())


class TensorFlowEngine(Engine):
    """`MirroredStrategy` over the devices of a mesh, of one process."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._strategy = _mirrored(tuple(_every()[: mesh.data]))
        # Not a scope, which could not stay open, and in which `fit` fails.
        tf.distribute.experimental_set_strategy(self._strategy)
        replicas_tensorflow.draw_apart(mesh.data > 1)

    def check(self, model: keras.Model) -> None:
        """See `Engine.check`."""
        in_force = tf.distribute.get_strategy() is self._strategy
        created_here = self._strategy.extended.variable_created_in_scope

        def lies(variable: keras.Variable) -> bool:
            return not keras_internals.has_value(variable) or created_here(variable.value)

        self.check_place(in_force, model, lies)
        if model.distribute_strategy is not self._strategy:
            raise InputError(
                f"{model.name} is not on the mesh {self.mesh}: it was made before distribute; call "
                "it first, then build or load the model, then enable_lora"
            )
        for layer in keras_internals.sublayers(model):
            batch_norm = isinstance(layer, keras.layers.BatchNormalization)
            if batch_norm and not layer.synchronized and self.mesh.data > 1:
                raise InputError(
                    f"{layer.name} would normalize by the rows of each device only; make it with "
                    "synchronized=True"
                )

    def leave(self) -> None:
        """See `Engine.leave`."""
        replicas_tensorflow.draw_apart(False)
        if tf.distribute.get_strategy() is self._strategy:
            tf.distribute.experimental_set_strategy(None)


def use(mesh: Mesh) -> TensorFlowEngine:
    """Sets the strategy of this mesh, of replicas on one host, for the process."""
    if mesh.size > mesh.data:
        raise InputError(
            f"the mesh {mesh} splits weights, which Keras' fit cannot on TensorFlow; give data "
            "alone, or set KERAS_BACKEND=jax for fsdp and model, or torch for fsdp"
        )
    hosts = _hosts()
    if hosts > 1:
        raise InputError(
            f"TF_CONFIG names {hosts} hosts, on which Keras' fit fails (keras-team/keras#20585); "
            "unset it for one host with many devices, or set KERAS_BACKEND=jax or torch"
        )
    if tf.distribute.has_strategy():
        raise InputError(
            "a strategy of tf.distribute is in force already; leave its scope before distribute"
        )
    return TensorFlowEngine(mesh)


@functools.cache
def _mirrored(names: tuple[str, ...]) -> Any:
    """Returns the strategy of these devices, created once; on CPUs without collectives.

    Strategies of one process use the same numbers for exchanges, and would mix them.
    """
    on_cpu = all("CPU" in name for name in names)
    ways = tf.distribute.ReductionToOneDevice() if on_cpu else None
    return tf.distribute.MirroredStrategy(names, cross_device_ops=ways)


def _every() -> list[str]:
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def _hosts() -> int:
    text = os.environ.get("TF_CONFIG", "")
    try:
        named = json.loads(text or "{}").get("cluster", {})
        return sum(len(addresses) for addresses in named.values())
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"TF_CONFIG is {text!r}, which names no cluster; unset it") from error
