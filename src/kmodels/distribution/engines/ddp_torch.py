"""Training steps of several torch processes: `DistributedDataParallel` inside our train steps.

DDP reduces gradients during the backward pass. It needs only the loss and the variables of a model,
so it works for tasks, a `TrainStep` of several objectives, adapters and compiled blocks.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from kmodels.core import keras_internals, processes, runtime_torch, seeds_torch
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.distribution.engines.engine import Engine
from kmodels.distribution.mesh import Mesh

# The average of these over the processes is that over all rows.
_MEANS = ("sum_over_batch_size", "mean")


class DDPTrainer:
    """The base of the ways to train one model in several processes."""

    def begin(self, model: keras.Model) -> None:
        """Checks a compiled model before its first step.

        Its loss must be a mean over rows, and the model the same in all processes.
        """
        for loss in _losses(model):
            if getattr(loss, "reduction", None) not in (*_MEANS, None):
                raise InputError(
                    f"the loss {loss.name} has the reduction {loss.reduction!r}, which parts "
                    f"of a batch cannot compute; give it {_MEANS[0]!r}"
                )
        _check_same(self.facts(model))

    def facts(self, model: keras.Model) -> dict[str, Any]:
        """Returns facts that must be equal in all processes, by variable path."""
        slots = getattr(model.optimizer, "variables", ())
        # Each process accumulates its own.
        variables = [v for v in (*model.variables, *slots) if "gradient_accumulator" not in v.path]
        # So are the shards of a sharded weight.
        zero = torch.zeros((), dtype=torch.int64)
        cut = [hasattr(variable, "gathered") for variable in variables]
        both = zip(variables, cut, strict=True)
        sums = torch.stack([zero if c else _bits(v.value).sum().cpu() for v, c in both]).tolist()
        trained = {id(variable) for variable in model.trainable_variables}
        return {
            f"{i} {v.path}": [list(v.shape), v.dtype, id(v) in trained, total]
            for i, (v, total) in enumerate(zip(variables, sums, strict=True))
        }

    def compiled(self, model: keras.Model) -> None:
        """Called by `compile`, before the optimizer creates its slots."""

    def settle(self) -> None:
        """Called before the state is read: moves pending gradient sums to the optimizer."""

    def joined(
        self, loss: torch.Tensor, variables: Sequence[Any], optimizer: keras.Optimizer
    ) -> Any:
        """Returns the loss; its backward pass computes gradients of the mean loss of all processes.

        The scalar is the mean over the rows of this process.
        """
        raise NotImplementedError

    def gradients(
        self, loss: torch.Tensor, variables: Sequence[Any], optimizer: keras.Optimizer
    ) -> list[Any]:
        """Returns the gradients of the mean loss of all processes, None for unused variables."""
        _clear(variables)
        self.joined(loss, variables, optimizer).backward()
        gradients = [variable.value.grad for variable in variables]
        _clear(variables)
        return gradients

    def over_devices(self, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns the sum of a scalar over the processes, and the number of processes."""
        total = weight.clone()  # all_reduce writes into its argument
        torch.distributed.all_reduce(total)
        return total, processes.count()

    def results(self, metrics: Iterable[Any]) -> dict[str, Any]:
        """Returns the results of metrics over the rows of all processes, by name.

        The variables of the metrics keep counting the rows of this process.
        """
        metrics = list(metrics)
        variables = [variable for metric in metrics for variable in metric.variables]
        with keras.StatelessScope(state_mapping=_summed(variables)):
            return keras_internals.results_of(metrics)


class DataParallel(DDPTrainer):
    """A copy of the model in each process, trained on its rows."""

    def __init__(self) -> None:
        self._reducers: dict[tuple[int, ...], _Reducer] = {}

    def begin(self, model: keras.Model) -> None:
        """See `DDPTrainer.begin`; the trained variables may have changed."""
        self._reducers.clear()
        super().begin(model)

    def joined(
        self, loss: torch.Tensor, variables: Sequence[Any], optimizer: keras.Optimizer
    ) -> Any:
        """See `DDPTrainer.joined`."""
        if not variables or not loss.requires_grad:
            return loss
        key = tuple(map(id, variables))
        if key not in self._reducers:
            self._reducers[key] = _Reducer(loss, variables, optimizer)
        return self._reducers[key].joined(loss)


class _Reducer:
    """DDP over the variables of one optimizer.

    If gradients are accumulated, only the last of the steps reduces: the sum of the optimizer is
    moved to the gradients of torch, to which the backward pass adds.
    """

    def __init__(self, loss: torch.Tensor, variables: Sequence[Any], optimizer: keras.Optimizer):
        reached = _leaves(loss)
        lacks = any(id(variable.value) not in reached for variable in variables)
        # To find them, torch traverses the whole graph in every step, so only if there are any.
        lacks = any(processes.all_gather_object("variables without a gradient", lacks))
        self._optimizer, self._variables = optimizer, variables
        steps = getattr(optimizer, "gradient_accumulation_steps", None) or 1
        # A step that is not reduced could be skipped in one process only, which does not count it.
        skips = getattr(optimizer, "skip_non_finite", False)
        self._steps = 1 if skips or lacks else steps
        self._reduce = DistributedDataParallel(
            _Variables(variable.value for variable in variables),
            init_sync=False,
            find_unused_parameters=lacks,
            gradient_as_bucket_view=True,
        )

    def joined(self, loss: torch.Tensor) -> Any:
        inner = False
        if self._steps > 1:
            count = runtime_torch.count(keras_internals.batches_seen(self._optimizer)) + 1
            inner = count % self._steps != 0
            if not inner:
                self._take_accumulated()
        with self._reduce.no_sync() if inner else nullcontext():
            return self._reduce(loss)

    @torch.no_grad()
    def _take_accumulated(self) -> None:
        for variable in self._variables:
            total = keras_internals.accumulated_gradient(self._optimizer, variable).value
            variable.value.grad = total.clone()
            total.zero_()


class _Variables(torch.nn.Module):
    """A module with the variables for DDP, whose input is a loss that was computed outside."""

    def __init__(self, values: Iterable[Any]):
        super().__init__()
        for i, value in enumerate(values):
            self.register_parameter(str(i), value)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def _leaves(loss: torch.Tensor) -> set[int]:
    """Returns the ids of the tensors that get gradients in the backward pass."""
    leaves, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        waiting += [after for after, _ in node.next_functions]
    return leaves


@torch.no_grad()
def _summed(variables: Sequence[Any]) -> list[tuple[Any, torch.Tensor]]:
    """Returns variables of metrics with their values over all processes, one collective per dtype.

    Values are summed or averaged by Keras' `aggregation`; others are not returned.
    """
    share = 1.0 / processes.count()
    groups: dict[torch.dtype, list[tuple[Any, torch.Tensor]]] = {}
    for variable in variables:
        value = variable.value.detach()
        if variable.aggregation in ("sum", "mean"):
            part = value * share if variable.aggregation == "mean" else value
            groups.setdefault(part.dtype, []).append((variable, part))
    sums = []
    for group in groups.values():
        flat = torch.cat([part.reshape(-1) for _, part in group])
        torch.distributed.all_reduce(flat)
        parts = flat.split([part.numel() for _, part in group])
        sums += [
            (variable, part.reshape(variable.value.shape))
            for (variable, _), part in zip(group, parts, strict=True)
        ]
    return sums


def _losses(model: keras.Model) -> list[Any]:
    """Returns the losses given to `compile`."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    return [loss for loss in losses if isinstance(loss, keras.losses.Loss)]


def _check_same(facts: dict[str, Any]) -> None:
    first, *others = processes.all_gather_object("the model", facts)
    for rank, other in enumerate(others, 1):
        if other == first:
            continue
        wrong = [name for name in {**first, **other} if other.get(name) != first.get(name)]
        path = wrong[0].partition(" ")[2]
        raise InputError(
            f"the model differs between the processes: {len(wrong)} variables, the first of them "
            f"{path}, are not on process {rank} what they are on process 0; build and load the "
            "same in all"
        )


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Returns the bits as integers, so that a sum changes with any bit."""
    value = value.detach()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.contiguous().reshape(-1).view(kinds[value.element_size()]).to(torch.int64)


def _clear(variables: Sequence[Any]) -> None:
    for variable in variables:
        variable.value.grad = None


# Their statistics are of the rows of one process, unlike `SyncBatchNorm`.
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


class DDPEngine(Engine):
    """A copy of the model in every process; the base of torch's engines."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.shards, self.shard = mesh.data, processes.index()

    def prepare(self, model: keras.Model) -> Any:
        """See `Engine.prepare`."""
        self.check(model)
        if (trainer := self.trainer(model)) is not None:
            # Around Keras' __setattr__, which refuses new state on a built model.
            object.__setattr__(model, "parallel", trainer)
        return model

    def trainer(self, model: keras.Model) -> DDPTrainer | None:
        """Returns the way to train a checked model, or None for that of one process."""
        del model
        return DataParallel() if self.shards > 1 else None

    def check(self, model: keras.Model) -> None:
        """See `Engine.check`."""
        if self.shards == 1:
            return
        if not getattr(model, "follows_changes", False):  # no loop of kmodels
            raise InputError(
                f"plan.prepare got {type(model).__name__}, whose step is Keras' own; give a task "
                "of kmodels, or kmodels.training.TrainStep(model, loss)"
            )
        check_norms(model)

    def all_predictions(self, outputs: Tree, rows: int) -> Any:
        """See `Engine.all_predictions`."""
        if self.shards == 1:
            return outputs
        gathered: list[Any] = [None] * processes.count()
        torch.distributed.all_gather_object(gathered, outputs)
        # Processes that feed the same rows are next to each other.
        gathered = gathered[:: len(gathered) // self.shards]

        def interleaved(*leaves: np.ndarray) -> np.ndarray:
            cut = [leaf.reshape(-1, rows, *leaf.shape[1:]) for leaf in leaves]
            return np.stack(cut, axis=1).reshape(-1, *leaves[0].shape[1:])

        return keras.tree.map_structure(interleaved, *gathered)

    def leave(self) -> None:
        """See `Engine.leave`."""
        seeds_torch.draw_as(0)


def check_norms(model: keras.Model) -> None:
    """Raises `InputError` for batch norm, whose statistics would be of the rows of one process."""
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
