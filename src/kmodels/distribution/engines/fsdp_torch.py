"""Weights, gradients and slots sharded over the ranks of torchrun: torch's FSDP2.

`plan.prepare` shards a model; after that, all ranks must read its weights together.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from kmodels.core import internals_torch, keras_internals, processes, runtime_torch
from kmodels.core.errors import InputError
from kmodels.distribution.engines.ddp_torch import DDPEngine, DDPTrainer
from kmodels.distribution.mesh import Mesh
from kmodels.weights import deferred
from kmodels.weights.host_torch import to_numpy


class Placed(keras_internals.OwnAssign):
    """A variable whose value is a `DTensor`; it shards whole values that are assigned to it.

    All ranks must assign the same value. `gathered`, and any read of the variable on the host, is a
    collective: all ranks must call it together.
    """

    @property
    def placed(self) -> DTensor:
        """The shard of this rank, in the dtype of the variable."""
        return self.held

    @property
    def index(self) -> tuple[slice, ...]:
        """Slices of the whole value that are on this rank."""
        return region(self.placed)

    def gathered(self) -> torch.Tensor:
        """Returns the whole value."""
        return self.placed.full_tensor().detach()

    def take(self, value: torch.Tensor) -> None:
        """Copies the shard of this rank from a whole value, or from a `DTensor` of equal layout."""
        self.take_part(value.to_local() if isinstance(value, DTensor) else value[self.index])

    @torch.no_grad()
    def take_part(self, value: torch.Tensor) -> None:
        """Copies a value into the shard of this rank."""
        self.placed.to_local().copy_(value)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        value = to_numpy(self.gathered().cpu())
        return value if dtype is None else value.astype(dtype)


class ShardedVariable(keras_internals.ValueElsewhere, Placed):
    """A weight that is whole while its group runs, and otherwise a shard.

    FSDP2 replaces the parameter of the group's module, so the variable reads it there. A variable
    that was built without a value has none until one is assigned.
    """

    group: torch.nn.Module
    place: str
    waiting: bool

    def found(self) -> Any:
        """Returns the parameter of the group's module, None before a value is assigned."""
        return None if self.waiting else getattr(self.group, self.place)

    @property
    def placed(self) -> DTensor:
        """The shard of this rank; only while the group does not run."""
        return getattr(self.group, self.place)

    def take_part(self, value: torch.Tensor) -> None:
        """See `Placed`; after this the variable has a value."""
        super().take_part(value)
        self.waiting = False
        self.has_taken()


def put_in(variable: keras.Variable, group: torch.nn.Module, place: str) -> None:
    """Makes a variable read its value from a group's module, and releases its own."""
    keras_internals.let_value_go(variable)
    keras_internals.change_class(variable, ShardedVariable)
    variable.group, variable.place, variable.waiting = group, place, True


def place_like(slot: keras.Variable, weight: ShardedVariable) -> None:
    """Gives a slot its first value, sharded like a weight of the same shape.

    Its initializer must be a constant, as for slots of optimizers.
    """
    like = weight.placed
    local = like.to_local()
    first = keras_internals.first_value(slot, local.shape)
    value = DTensor.from_local(
        first.to(local.device), like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
    keras_internals.change_class(slot, Placed)
    keras_internals.give_value(slot, torch.nn.Parameter(value, requires_grad=False))


def region(placed: DTensor) -> tuple[slice, ...]:
    """Returns the slices of the whole tensor that are on this rank."""
    ranges = [(0, size) for size in placed.shape]
    mesh = placed.device_mesh
    for axis, placement in enumerate(placed.placements):
        if placement.is_shard():
            dimension = placement.dim  # type: ignore[attr-defined]
            start, stop = ranges[dimension]
            # Like torch: the last shards are shorter, or empty.
            step = -(-(stop - start) // mesh.size(axis))
            begin = min(start + step * mesh.get_local_rank(axis), stop)
            ranges[dimension] = begin, min(begin + step, stop)
    return tuple(slice(*bounds) for bounds in ranges)


class Group(torch.nn.Module):
    """Weights that are gathered while a function runs."""

    def __init__(self, variables: Sequence[Any]):
        super().__init__()
        for index, variable in enumerate(variables):
            kind = getattr(torch, keras.backend.standardize_dtype(variable.dtype))
            # Without values: torch shards it, and each rank allocates its own shard.
            value = torch.empty(variable.shape, dtype=kind, device="meta")
            trainable = variable.trainable and kind.is_floating_point
            self.register_parameter(f"p{index}", torch.nn.Parameter(value, trainable))

    def forward(self, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """`function(*args, **kwargs)`."""
        result = function(*args, **kwargs)
        # Torch warns of views: an operation in place would lose the hook that gathers in backward.
        if isinstance(result, torch.Tensor) and result.requires_grad:
            return result.clone() if internals_torch.is_view(result) else result
        return result


class Root(torch.nn.Module):
    """All groups of a model, around its call."""

    def __init__(self, groups: Sequence[Group]):
        super().__init__()
        self.groups = torch.nn.ModuleList(groups)

    def forward(self, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """`function(*args, **kwargs)`."""
        return function(*args, **kwargs)


def shard(model: keras.Model, mesh: DeviceMesh) -> Any:
    """Shards all weights of a built model over the last axis of a mesh; returns their root.

    A mesh of two axes has copies along the first (HSDP). Weights without values get them later.

    Raises:
        InputError: for weights that belong to several layers, or that cannot be sharded or reduced.
    """
    layers = _layers(model)
    owned = [id(variable) for layer in layers for variable in layer.weights]
    if lost := [v.path for v in model.weights if owned.count(id(v)) != 1]:
        raise InputError(
            f"fsdp found weights that belong to no layer of their own, or to several: "
            f"{', '.join(lost[:8])}; keep each in one layer"
        )
    for layer in keras_internals.sublayers(model):
        # Keras has the whole tensors here too; it creates the dictionary again when needed.
        keras_internals.forget_parameters(layer)
    groups = [_cut(layer, mesh) for layer in layers]
    _prefetch(layers, groups)
    root: Any = Root(groups)
    fully_shard(root, mesh=mesh)
    # torch treats the first module that is called as the root.
    root(lambda: None)
    _enter(model, "call", root)
    return root


def _layers(model: keras.Model) -> list[Any]:
    """Returns the layers with weights of a model and of models in it, each once."""
    layers: dict[int, Any] = {}
    for layer in model.layers:
        inside = _layers(layer) if isinstance(layer, keras.Model) else [layer]
        layers.update({id(one): one for one in inside if one.weights})
    return list(layers.values())


def _cut(layer: keras.Layer, mesh: DeviceMesh) -> Group:
    variables = layer.weights
    kinds = {v.dtype for v in variables if v.trainable}
    if len(kinds) > 1:
        raise InputError(
            f"fsdp found trainable weights of {' and '.join(sorted(kinds))} in {layer.path}, whose "
            "gradients cannot be reduced together; train those of one dtype, or give one policy"
        )
    values = [v.value.detach() if keras_internals.has_value(v) else None for v in variables]
    group = Group(variables)
    try:
        fully_shard(
            group,
            mesh=mesh,
            reshard_after_forward=True,
            shard_placement_fn=functools.partial(_dimension, parts=mesh.size(-1)),
            mp_policy=_precision(layer),
        )
    except RuntimeError as error:
        if all(parameter.is_floating_point() for parameter in group.parameters()):
            raise
        raise InputError(
            f"torch {torch.__version__} cannot shard the integer weights of {layer.path} by fsdp; "
            "install torch 2.12 or newer, or give --mesh data=-1"
        ) from error
    group.to_empty(device=mesh.device_type)
    for index, variable in enumerate(variables):
        put_in(variable, group, f"p{index}")
        value, values[index] = values[index], None
        if value is not None:
            variable.take(value)
    for name in getattr(layer, "entries", ("call",)):
        _enter(layer, name, group)
    return group


def _dimension(parameter: torch.nn.Parameter, parts: int) -> Shard:
    """Shards the first dimension that divides: dimension 0 is gathered without a copy.

    If none does, torch pads the first one.
    """
    even = [axis for axis, size in enumerate(parameter.shape) if size % parts == 0]
    return Shard(even[0] if even else 0)


def _precision(layer: keras.Layer) -> MixedPrecisionPolicy:
    """Gathers weights in the dtype that layers read, and reduces gradients in float32.

    A mixed policy transfers half the bytes, and no cast copy of a weight is kept for backward.
    """
    readers = [one for one in keras_internals.sublayers(layer) if one.weights]
    kinds = {one.compute_dtype for one in readers}
    casts = all(one.autocast for one in readers) and all(
        map(keras_internals.autocasts, layer.weights)
    )
    kind = getattr(torch, kinds.pop()) if casts and len(kinds) == 1 else None
    return MixedPrecisionPolicy(kind, torch.float32, cast_forward_inputs=False)


def _enter(layer: keras.Layer, name: str, module: torch.nn.Module) -> None:
    """Makes a method of a layer run inside a module, with torch's hooks around it."""
    method = getattr(layer, name)

    @functools.wraps(method)
    def entered(*args: object, **kwargs: object) -> Any:
        # Keras infers shapes with tensors on the meta device.
        if any(getattr(x, "is_meta", False) for x in keras.tree.flatten((args, kwargs))):
            return method(*args, **kwargs)
        return module(method, *args, **kwargs)

    vars(layer)[name] = entered


def _prefetch(layers: Sequence[Any], groups: Sequence[Any]) -> None:
    """Makes each block prefetch the weights of the next one before it computes.

    In the backward pass torch does so itself, in reverse order.
    """
    both = zip(layers, groups, strict=True)
    blocks = [group for layer, group in both if layer.name.startswith("block_")]
    for block, after in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])


def place(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer shard the slots of sharded weights when it is built.

    Its slots must have the shapes of the weights.
    """
    if not optimizer.built and "build" not in vars(optimizer):
        vars(optimizer)["build"] = functools.partial(_build, optimizer, optimizer.build)


def _build(optimizer: keras.Optimizer, build: Callable[..., Any], variables: Sequence[Any]) -> None:
    """`build(variables)`, for slots of the shapes of the weights."""
    if optimizer.built:
        return
    if getattr(optimizer, "whole_matrices", False):
        raise InputError(
            f"{type(optimizer).__name__} needs whole matrices, which fsdp shards; use AdamW or SGD"
        )
    refusal = InputError(
        f"{type(optimizer).__name__} keeps more than arrays of the weights' shapes, which fsdp "
        "cannot cut as the weights are; use AdamW or SGD"
    )
    try:
        with keras_internals.without_values() as created:
            build(variables)
    except InputError:
        raise
    except ValueError as error:
        raise refusal from error  # it assigns values to slots itself
    new = {id(variable): variable for variable in created}
    for slot, weight in _pairs(optimizer, variables):
        if new.pop(id(slot), None) is None or not isinstance(weight, ShardedVariable):
            continue
        if tuple(slot.shape) != tuple(weight.shape):
            raise refusal
        place_like(slot, weight)
    keras_internals.draw_values(new.values())


def _pairs(optimizer: keras.Optimizer, weights: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields each slot with its weight: optimizers have lists in the order of the weights."""
    for _, slots in keras_internals.slot_lists(optimizer):
        yield from zip(slots, weights, strict=True)


class FSDPEngine(DDPEngine):
    """FSDP, with `data` HSDP. Models of `from_preset` get their weights after sharding."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.shards, self.shard = mesh.replicas, processes.index()
        sides = {"data": mesh.data, "fsdp": mesh.fsdp} if mesh.data > 1 else {"fsdp": mesh.fsdp}
        self.device_mesh = init_device_mesh(
            torch.device(keras.ops.zeros(()).device).type,
            tuple(sides.values()),
            mesh_dim_names=tuple(sides),
        )
        deferred.switch(True)

    def trainer(self, model: keras.Model) -> DDPTrainer:
        """Shards the weights, and fills those without values."""
        if model.parallel is not None:
            return model.parallel
        root = shard(model, self.device_mesh)
        deferred.fill(model)
        return FSDPTrainer(root, model)

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
            # A magnitude without a value is read from a file.
            if magnitude is None or not keras_internals.has_value(magnitude):
                continue
            if not keras_internals.has_value(layer.kernel):
                raise InputError(
                    f"DoRA at {layer.path} begins with the lengths of weights that are only loaded "
                    "by plan.prepare; leave dora out, or load a model that was saved with it"
                )

    def leave(self) -> None:
        """See `Engine.leave`; models that are loaded after this are not sharded."""
        super().leave()
        deferred.switch(False)


class FSDPTrainer(DDPTrainer):
    """Training of a sharded model, whose groups have one root, see `shard`."""

    def __init__(self, root: Any, model: keras.Model):
        self.root = root
        self._trained = {id(variable) for variable in model.trainable_variables}
        self._several = False
        self._few: bool | None = None
        self._waiting: tuple[Sequence[Any], Any] | None = None

    def compiled(self, model: keras.Model) -> None:
        """Makes the optimizer shard its slots."""
        self.settle()
        optimizers = getattr(model.optimizer, "by_player", {"": model.optimizer}).values()
        self._several, self._few = len(optimizers) > 1, None
        for optimizer in optimizers:
            if optimizer is not None:
                place(optimizer)

    def begin(self, model: keras.Model) -> None:
        """See `DDPTrainer.begin`; weights that changed after sharding are refused too."""
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

        If gradients are accumulated and few weights are trained, torch sums whole gradients, and
        only the last of the steps reduces them.
        """
        if self._waits(variables, optimizer):
            steps = optimizer.gradient_accumulation_steps
            inner = (runtime_torch.count(keras_internals.batches_seen(optimizer)) + 1) % steps != 0
            self._reduces(not inner)
            self._waiting = (variables, optimizer) if inner else None
            for variable in variables:
                # The optimizer counts the step, and accumulates zeros.
                variable.value.grad = torch.zeros_like(variable.value) if inner else None
        return loss

    def settle(self) -> None:
        """Reduces pending gradients into those that the optimizer accumulates, for checkpoints."""
        if self._waiting is None:
            return
        (variables, optimizer), self._waiting = self._waiting, None
        self._reduces(True)
        for variable in variables:
            variable.value.grad = None
        # Torch reduces pending gradients at the end of any backward pass.
        device = variables[0].value.device
        self.root(lambda x: x * 1, torch.zeros((), device=device, requires_grad=True)).backward()
        for variable in variables:
            if (gradient := variable.value.grad) is not None:
                accumulated = keras_internals.accumulated_gradient(optimizer, variable)
                accumulated.assign(accumulated.value + gradient)

    def _reduces(self, now: bool) -> None:
        self.root.set_requires_gradient_sync(now)
        self.root.set_is_last_backward(now)

    def _waits(self, variables: Sequence[Any], optimizer: keras.Optimizer) -> bool:
        """Returns True if whole gradients are smaller than the shard of all weights on a rank."""
        # A skipped step would not count, and several optimizers share the groups.
        if self._several or getattr(optimizer, "skip_non_finite", False):
            return False
        if not getattr(optimizer, "gradient_accumulation_steps", None):
            return False
        if self._few is None:
            gradients = sum(4 * variable.value.numel() for variable in variables)
            # Sizes of an even split, since all ranks must decide alike.
            shards = sum(p.nbytes / p.device_mesh.size(-1) for p in self.root.parameters())
            self._few = gradients <= shards
        return self._few
