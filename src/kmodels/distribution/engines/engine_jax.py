"""Many devices on JAX: `keras.distribution`'s DataParallel, or its ModelParallel by layout rules.

A process drives all its devices. In a run of one process each batch is the global batch; each of
several processes feeds its own rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import linear_call
from jax.sharding import NamedSharding, PartitionSpec

from kmodels.core import keras_internals, processes
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.distribution import layout
from kmodels.distribution.engines.engine import Engine
from kmodels.distribution.layout import axes_of
from kmodels.distribution.mesh import Mesh
from kmodels.layers.placement import in_use

constrain: Any = jax.lax.with_sharding_constraint


class Gathered(keras.Variable):
    """A `keras.Variable` with a layout; `value` is gathered while a traced layer reads it.

    It has been cast to its compute dtype by then, so that bfloat16 is transferred.
    """

    @property
    def value(self) -> Any:
        """The value, gathered if a layer is traced."""
        value = super().value
        used = in_use() or keras_internals.current_call_context() is not None
        if not used or not isinstance(value, Tracer):
            return value
        parts = keras_internals.layout_of(self).backend_layout
        inner = (None if axis == "fsdp" else axis for axis in parts.spec)
        whole = NamedSharding(parts.mesh, PartitionSpec(*inner))
        return linear_call(
            lambda _, x: constrain(x, whole), lambda _, g: constrain(g, parts), (), value
        )


MORE = "on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={}"
NO_SEQUENCE = None


def devices() -> int:
    """Returns the number of devices of all processes."""
    return len(keras.distribution.list_devices())


class BatchLayout(keras.distribution.TensorLayout):
    """A layout of rows over several mesh axes at once, which Keras' layouts do not support.

    The first axis is the outermost. `tokens` shards the second dimension, if it is not None; a
    scalar is replicated.
    """

    def __init__(
        self,
        rank: int,
        axes: tuple[str, ...],
        device_mesh: jax.sharding.Mesh,
        tokens: str | None = None,
    ):
        super().__init__((None,) * rank, device_mesh)
        self._split = (axes, tokens)[:rank]

    @property
    def axes(self) -> tuple[Any, ...]:
        """Mesh axes of each dimension."""
        return (*self._split, *super().axes[len(self._split) :])

    @property
    def backend_layout(self) -> NamedSharding:
        """The layout as a JAX sharding."""
        return NamedSharding(self.device_mesh.backend_mesh, PartitionSpec(*self.axes))


def _rows(
    distribution: keras.distribution.ModelParallel,
    axes: tuple[str, ...],
    shape: Sequence[int],
    tokens: str | None = None,
) -> BatchLayout:
    """Returns the layout of a batch of this process, whose first dimension is rows."""
    feeding = min(distribution.num_model_replicas, distribution.num_processes)
    parts = distribution.num_model_replicas // feeding
    if shape and shape[0] % parts:
        raise InputError(
            f"a batch of {shape[0]} rows does not split over the {parts} devices that share it; "
            f"give a batch size that {parts} divides, and plan.shard(data) for a short last batch"
        )
    return BatchLayout(len(shape), axes, distribution.device_mesh, tokens)


def _placed(
    distribution: keras.distribution.ModelParallel, variable: keras.Variable, values: np.ndarray
) -> jax.Array:
    """Returns a host array with the layout of the variable; all processes have the same values.

    Each device gets only its part. With `jax.device_put` all processes would compare their values.
    """
    where = distribution.get_variable_layout(variable).backend_layout
    return jax.make_array_from_callback(values.shape, where, lambda part: values[part])


class Replicated(keras.distribution.DataParallel):
    """Each device has the model and takes its rows of a batch."""

    place = _placed

    def get_data_layout(self, data_shape: Sequence[int]) -> BatchLayout:
        """Returns rows over `data`; raises `InputError` if they do not divide."""
        return _rows(self, ("data",), data_shape)


class ShardedLayouts(keras.distribution.ModelParallel):
    """Variables are sharded by `layout.axes`, rows over `data` and `fsdp` together.

    Tokens of arrays (rows, tokens) are sharded over `sequence`. Keras' ModelParallel supports one
    axis for rows. With rows over `data` alone, all devices of an `fsdp` axis would compute the
    same.
    """

    place = _placed

    def __init__(self, mesh: Mesh, device_mesh: jax.sharding.Mesh):
        self._mesh = mesh
        # Read by overrides: only `model` splits the arithmetic of a layer.
        self.cuts_layers = mesh.model > 1
        super().__init__(
            layout_map=keras.distribution.LayoutMap(device_mesh),
            batch_dim_name="data",
            auto_shard_dataset=False,
        )

    @property
    def num_model_replicas(self) -> int:
        """Number of parts of a batch."""
        return self._mesh.replicas

    def get_data_layout(self, data_shape: Sequence[int]) -> BatchLayout:
        """Returns rows over `data` and `fsdp`; raises `InputError` if they do not divide."""
        tokens = layout.tokens_axis(data_shape, self._mesh)
        return _rows(self, ("data", "fsdp"), data_shape, tokens)

    def get_variable_layout(self, variable: keras.Variable) -> Any:
        """Follows the rules; a slot has the layout of its weight, which Keras passes on."""
        if keras_internals.layout_of(variable) is not None:
            return super().get_variable_layout(variable)
        axes = axes_of(variable, self._mesh)
        if "fsdp" in axes and type(variable) is keras.Variable:
            keras_internals.change_class(variable, Gathered)
        return keras.distribution.TensorLayout(axes, self.device_mesh)


class JaxEngine(Engine):
    """The distribution of a mesh, in force for the process."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        every = keras.distribution.list_devices()
        if jax.process_count() > 1 and mesh.size != len(every):
            raise InputError(
                f"the mesh {mesh} takes {mesh.size} of {len(every)} devices; a run of several "
                "processes takes all, as data=-1 does"
            )
        if jax.process_count() > 1 and mesh.sequence > 1:
            raise InputError(
                f"the mesh {mesh} cuts rows by tokens, which a run of several processes does not "
                "support; give sequence to one process with all its devices, or leave it out"
            )
        if mesh.size == mesh.data:
            grid = keras.distribution.DeviceMesh((mesh.size,), ("data",), every[: mesh.size])
            self._distribution: Any = Replicated(grid, auto_shard_dataset=False)
        else:
            names, lengths = zip(*mesh.grid.items(), strict=True)
            grid = keras.distribution.DeviceMesh(lengths, names, every[: mesh.size])
            self._distribution = ShardedLayouts(mesh, grid)
        self.shards = min(mesh.replicas, jax.process_count())
        self.shard = self._distribution.data_shard_id if self.shards > 1 else 0
        self._devices = set(grid.backend_mesh.devices.flat)
        keras.distribution.set_distribution(self._distribution)

    def check(self, model: keras.Model) -> None:
        """See `Engine.check`."""
        layout.check_tokens(model, self.mesh)
        in_force = keras.distribution.distribution() is self._distribution

        def lies(variable: keras.Variable) -> bool:
            return (
                not keras_internals.has_value(variable)
                or variable.value.sharding.device_set == self._devices
            )

        self.check_place(in_force, model, lies)

    def begin_predict(self, model: keras.Model) -> None:
        """Makes the compiled step of `predict` return its outputs whole on each device.

        Otherwise a process holds only the rows of its own devices, and they cannot be joined.
        """
        if processes.count() == 1 or "predict_step" in vars(model):
            return
        step = model.predict_step

        def predict_step(state: tuple, data: Tree) -> Any:
            outputs, rest = step(state, data)
            mesh: Any = keras.distribution.distribution()
            everywhere = NamedSharding(mesh.device_mesh.backend_mesh, PartitionSpec())
            return constrain(outputs, everywhere), rest

        # Around Keras' __setattr__, which refuses new state on a built model.
        object.__setattr__(model, "predict_step", predict_step)
        model.predict_function = None

    def leave(self) -> None:
        """See `Engine.leave`."""
        if keras.distribution.distribution() is self._distribution:
            keras.distribution.set_distribution(None)


use = JaxEngine
