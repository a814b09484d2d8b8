"""Weights, gradients and slots in parts over the ranks of torchrun: torch's FSDP2.

`plan.prepare` cuts a model; what reads its weights after that has to be done by all ranks together.
"""

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import init_device_mesh

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.distribution import processes
from kmodels.distribution.engines import fsdp_slots_torch
from kmodels.distribution.engines.ddp_engine_torch import DDPEngine
from kmodels.distribution.engines.ddp_torch import DDPTrainer
from kmodels.distribution.engines.fsdp_groups_torch import shard
from kmodels.distribution.engines.sharded_variable_torch import ShardedVariable
from kmodels.distribution.mesh import Mesh
from kmodels.weights import deferred


def use(mesh: Mesh) -> "FSDPEngine":
    """Returns the engine of a mesh with an `fsdp` axis; with `data` too it is HSDP."""
    return FSDPEngine(mesh)


class FSDPEngine(DDPEngine):
    """See `engine.Engine`. Models of `from_preset` wait for their weights until they are cut."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.shards, self.shard = mesh.replicas, processes.index()
        self.main = processes.is_rank_zero()
        sides = {"data": mesh.data, "fsdp": mesh.fsdp} if mesh.data > 1 else {"fsdp": mesh.fsdp}
        self.device_mesh = init_device_mesh(
            torch.device(keras.ops.zeros(()).device).type,
            tuple(sides.values()),
            mesh_dim_names=tuple(sides),
        )
        deferred.switch(True)

    def prepare(self, model: keras.Model) -> Any:
        """Cuts the weights, and fills those that wait for their values."""
        self.check(model)
        if model.parallel is None:
            root = shard(model, self.device_mesh)
            deferred.fill(model)
            # Around Keras' __setattr__, which refuses new state on a built model.
            object.__setattr__(model, "parallel", FSDPTrainer(root, model))
        return model

    def check(self, model: keras.Model) -> None:
        """See `Engine.check`."""
        super().check(model)
        for layer in keras_internals.sublayers(model):
            if layer.compute_dtype == "float16":
                raise InputError(
                    f'{layer.path} has the policy "{layer.dtype_policy.name}", whose losses each '
                    'rank would scale by itself; use "mixed_bfloat16" with fsdp'
                )
            adapter = getattr(layer, "adapter", None)
            magnitude = getattr(adapter, "magnitude", None)
            # A magnitude that waits too is one of a file.
            if magnitude is None or not keras_internals.has_value(magnitude):
                continue
            if not keras_internals.has_value(layer.kernel):
                raise InputError(
                    f"DoRA at {layer.path} begins with the lengths of weights that are only loaded "
                    "by plan.prepare; leave dora out, or load a model that was saved with it"
                )

    def leave(self) -> None:
        """See `Engine.leave`; models that are loaded from now on are whole."""
        super().leave()
        deferred.switch(False)


class FSDPTrainer(DDPTrainer):
    """A model of which each rank holds a part, and trains all on its rows.

    Args:
        root: root of the groups, see `groups_torch.shard`.
        model: that was cut.
    """

    def __init__(self, root: Any, model: keras.Model):
        self.root = root
        self._trained = {id(variable) for variable in model.trainable_variables}
        self._several = False
        self._few: bool | None = None
        self._waiting: tuple[Sequence[Any], Any] | None = None

    def compiled(self, model: keras.Model) -> None:
        """Has the optimizer make its slots in parts."""
        self.settle()
        optimizers = getattr(model.optimizer, "by_player", {"": model.optimizer}).values()
        self._several, self._few = len(optimizers) > 1, None
        for optimizer in optimizers:
            if optimizer is not None:
                fsdp_slots_torch.place(optimizer)

    def begin(self, model: keras.Model) -> None:
        """See `DDPTrainer.begin`.

        Raises:
            InputError: also for what was changed since the model was cut.
        """
        if new := [v.path for v in model.weights if not isinstance(v, ShardedVariable)]:
            raise InputError(
                f"{len(new)} weights were made after plan.prepare: {', '.join(new[:4])}; call "
                "enable_lora and the like before it"
            )
        thawed = [v.path for v in model.trainable_variables if id(v) not in self._trained]
        if thawed:
            raise InputError(
                f"{len(thawed)} weights became trainable after plan.prepare: "
                f"{', '.join(thawed[:4])}; set trainable before it"
            )
        super().begin(model)

    def joined(
        self, loss: torch.Tensor, variables: Sequence[Any], optimizer: keras.Optimizer
    ) -> Any:
        """See `DDPTrainer.joined`.

        If gradients are accumulated and few weights are trained, torch adds up their whole
        gradients, and only the last of the steps reduces them.
        """
        if self._waits(variables, optimizer):
            steps = optimizer.gradient_accumulation_steps
            inner = (int(keras_internals.batches_seen(optimizer).value) + 1) % steps != 0
            self._reduces(not inner)
            self._waiting = (variables, optimizer) if inner else None
            for variable in variables:
                # The optimizer counts the step, and adds nothing to what it accumulates.
                variable.value.grad = torch.zeros_like(variable.value) if inner else None
        return loss

    def settle(self) -> None:
        """Reduces what waits into what the optimizer accumulates, where a checkpoint finds it."""
        if self._waiting is None:
            return
        (variables, optimizer), self._waiting = self._waiting, None
        self._reduces(True)
        for variable in variables:
            variable.value.grad = None
        # Torch reduces what waits at the end of any backward pass.
        device = variables[0].value.device
        self.root(lambda x: x * 1, torch.zeros((), device=device, requires_grad=True)).backward()
        for variable in variables:
            if (gradient := variable.value.grad) is not None:
                held = keras_internals.accumulated_gradient(optimizer, variable)
                held.assign(held.value + gradient)

    def _reduces(self, now: bool) -> None:
        self.root.set_requires_gradient_sync(now)
        self.root.set_is_last_backward(now)

    def _waits(self, variables: Sequence[Any], optimizer: keras.Optimizer) -> bool:
        """Returns whether whole gradients are smaller than what a rank holds of all weights."""
        # A step that is left out would not count; and several optimizers share the groups.
        if self._several or getattr(optimizer, "skip_non_finite", False):
            return False
        if not getattr(optimizer, "gradient_accumulation_steps", None):
            return False
        if self._few is None:
            gradients = sum(4 * variable.value.numel() for variable in variables)
            # The sizes are of an even cut, since all ranks have to decide alike.
            held = sum(p.nbytes / p.device_mesh.size(-1) for p in self.root.parameters())
            self._few = gradients <= held
        return self._few
