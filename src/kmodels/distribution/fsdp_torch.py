"""Weights, gradients and slots in parts over the ranks of torchrun: torch's FSDP2."""

from collections.abc import Mapping
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import init_device_mesh

from kmodels import compat
from kmodels.distribution.engine import Engine
from kmodels.distribution.groups_torch import is_sharded, shard
from kmodels.distribution.mesh import Mesh
from kmodels.errors import InputError
from kmodels.lora.targets import linear_layers
from kmodels.weights import deferred


def use(mesh: Mesh) -> Engine:
    """The engine of a mesh with an `fsdp` axis; with `data` too the parts have copies (HSDP)."""
    return FullyShard(mesh)


class FullyShard:
    """See `Engine`. All ranks have to do all that reads weights together."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.shards = mesh.replicas
        self.shard = torch.distributed.get_rank()
        self.main = self.shard == 0
        sides = {"data": mesh.data, "fsdp": mesh.fsdp} if mesh.data > 1 else {"fsdp": mesh.fsdp}
        kind = torch.device(keras.ops.zeros(()).device).type
        self.device_mesh = init_device_mesh(
            kind, tuple(sides.values()), mesh_dim_names=tuple(sides)
        )
        deferred.switch(True)

    def prepare(self, model: Any) -> Any:
        """Cuts the weights, and fills those that wait for their values."""
        _refuse(model)
        shard(model, self.device_mesh)
        deferred.fill(model)
        return model

    def check(self, model: Any) -> None:
        """Raises `InputError` for a model that was not prepared, or was changed since."""
        if not is_sharded(model):
            raise InputError("")

    def leave(self) -> None:
        """Models that are loaded from now on are whole."""
        deferred.switch(False)


def _refuse(model: Any) -> None:
    """Raises `InputError` for what cannot be cut."""
    layers = compat.sublayers(model)
    if any(layer.compute_dtype == "float16" for layer in layers):
        raise InputError(
            'fsdp got "mixed_float16", whose losses would be scaled apart on each rank; take '
            '"mixed_bfloat16"'
        )
    for path, layer in linear_layers(model).items():
        magnitude = None if layer.adapter is None else layer.adapter.magnitude
        if magnitude is None or not compat.has_value(magnitude):
            continue
        if not compat.has_value(layer.kernel):
            raise InputError(
                f"DoRA at {path} begins at the lengths of weights that are not loaded before "
                "plan.prepare; enable LoRA without dora, or load a model saved with its adapters"
            )


def tensors(variables: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The values of variables as they lie: `DTensor`s of those in parts, whole ones of the others.

    It is what `torch.distributed.checkpoint` saves and loads in place. Between steps only.

    Args:
        variables: by name, such as one part of `kmodels.training.state.parts(model, False)`.
    """
    return {name: variable.value.detach() for name, variable in variables.items()}
