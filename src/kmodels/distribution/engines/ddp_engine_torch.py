"""The engine of a mesh with a `data` axis alone on torch: DistributedDataParallel."""

from typing import Any

import keras
import torch

from kmodels.core import keras_internals, rng_offset_torch
from kmodels.core.errors import InputError
from kmodels.distribution import processes
from kmodels.distribution.engines.ddp_torch import DataParallel
from kmodels.distribution.mesh import Mesh
from kmodels.training.step_torch import Parallel

# They are of one process's rows; `SyncBatchNorm` is none of them.
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


class DDPEngine:
    """A copy of the model in every process; see `engine.Engine`."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.shards, self.shard = mesh.data, processes.index()
        self.main = processes.is_rank_zero()

    def prepare(self, model: keras.Model) -> Any:
        """See `Engine.prepare`."""
        self.check(model)
        if self.shards > 1:
            # Around Keras' __setattr__, which refuses new state on a built model.
            object.__setattr__(model, "parallel", DataParallel())
        return model

    def check(self, model: keras.Model) -> None:
        """See `Engine.check`."""
        if self.shards == 1:
            return
        if not isinstance(model, Parallel):
            raise InputError(
                f"plan.prepare got {type(model).__name__}, whose step is Keras' own; give a task "
                "of kmodels, or kmodels.training.TrainStep(model, loss)"
            )
        check_norms(model)

    def leave(self) -> None:
        """See `Engine.leave`."""
        rng_offset_torch.draw_as(0)


def check_norms(model: keras.Model) -> None:
    """Raises `InputError` for batch norm, which would see the rows of its own process alone."""
    for layer in keras_internals.sublayers(model):
        if not layer.trainable:
            continue
        if isinstance(layer, keras.layers.BatchNormalization):
            raise InputError(
                f"{layer.path} is a BatchNormalization, which would normalize by the rows of one "
                "process only; freeze it by trainable=False, or use "
                f"keras.layers.TorchModuleWrapper(torch.nn.SyncBatchNorm({_channels(layer)}))"
            )
        module = getattr(layer, "module", None)
        for part in module.modules() if isinstance(module, torch.nn.Module) else ():
            if isinstance(part, _BATCH_NORMS):
                raise InputError(
                    f"{layer.name} holds a {type(part).__name__}, which would normalize "
                    "by the rows of one process only; use torch.nn.SyncBatchNorm, see its "
                    "convert_sync_batchnorm"
                )


def _channels(layer: keras.Layer) -> Any:
    return layer.gamma.shape[0] if getattr(layer, "gamma", None) is not None else "channels"
