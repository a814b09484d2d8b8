"""Tensor parallelism over torch processes: Keras' own `ModelParallel`, from Keras 3.16 on."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.distributed.tensor import DTensor

from kmodels.core import dispatch, keras_internals, processes
from kmodels.core.errors import InputError
from kmodels.distribution.engines.ddp_torch import DDPEngine, DDPTrainer
from kmodels.distribution.layout import axes_of
from kmodels.distribution.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SINCE = (3, 16)


class _Layers(keras.distribution.ModelParallel):
    """Variables are sharded by `layout.axes`, rows over `data`."""

    def __init__(self, mesh: Mesh, grid: "DeviceMesh"):
        self._mesh = mesh
        super().__init__(
            layout_map=keras.distribution.LayoutMap(grid),
            batch_dim_name="data",
            auto_shard_dataset=False,
        )

    def get_variable_layout(self, variable: keras.Variable) -> Any:
        """Follows the rules; a slot has the layout of its weight, which Keras passes on."""
        if keras_internals.layout_of(variable) is not None:
            return super().get_variable_layout(variable)
        return keras.distribution.TensorLayout(axes_of(variable, self._mesh), self.device_mesh)


class _Whole(DDPTrainer):
    """Steps whose loss and metrics are those of the global batch in every process."""

    def begin(self, model: keras.Model) -> None:
        """Does nothing: shards of weights differ between processes."""

    def joined(
        self, loss: torch.Tensor, variables: Sequence[Any], optimizer: keras.Optimizer
    ) -> Any:
        """Returns the loss as it is."""
        return loss

    def over_devices(self, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns the scalar itself, which is that of the global batch."""
        return weight, 1

    def results(self, metrics: Iterable[Any]) -> dict[str, Any]:
        """Returns the results as they are, which are those of the global batch."""
        return keras_internals.results_of(metrics)


class Split(DDPEngine):
    """Layers split over the `model` axis.

    Raises:
        InputError: before Keras 3.16, and for `fsdp` together with `model`.
    """

    def __init__(self, mesh: Mesh):
        version = keras.__version__
        if tuple(int(part) for part in version.split(".")[:2]) < _SINCE:
            raise InputError(
                f"the mesh {mesh} splits layers over `model`, which torch has from Keras 3.16 on "
                f"and this is {version}; use data and fsdp, or KERAS_BACKEND=jax"
            )
        if mesh.fsdp > 1:
            raise InputError(
                f"the mesh {mesh} has fsdp beside model, which torch cannot; leave one of them "
                "out, or set KERAS_BACKEND=jax"
            )
        self.mesh = mesh
        # Processes along `model` compute the same rows together.
        self.shards, self.shard = mesh.data, processes.index() // mesh.model
        every = keras.distribution.list_devices()
        grid = keras.distribution.DeviceMesh((mesh.data, mesh.model), ("data", "model"), every)
        self._distribution = _Layers(mesh, grid)
        keras.distribution.set_distribution(self._distribution)
        # Overrides do not support DTensor.
        dispatch.decline_all("layers are split over processes")

    def trainer(self, model: keras.Model) -> DDPTrainer:
        """Returns the way to train a model whose loss is that of the global batch."""
        del model
        return _Whole()

    def check(self, model: keras.Model) -> None:
        """See `Engine.check`."""
        in_force = keras.distribution.distribution() is self._distribution

        def lies(variable: keras.Variable) -> bool:
            cut = "model" in axes_of(variable, self.mesh)
            return not cut or isinstance(variable.value, DTensor)

        self.check_place(in_force, model, lies)

    def leave(self) -> None:
        """See `Engine.leave`."""
        super().leave()
        dispatch.decline_all(None)
        if keras.distribution.distribution() is self._distribution:
            keras.distribution.set_distribution(None)
