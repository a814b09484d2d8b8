"""FSDP2 under Keras' layers: what is gathered together, and when (Zhao et al. 2023).

`torch.distributed.fsdp.fully_shard` gathers the parameters of a module while its `forward` runs,
and has the gradients reduced to the parts. A Keras layer is such a module in name only: its
`__call__` goes round torch's hooks, and its variables keep the tensors that they were given. The
variables of a layer are therefore put into a module of our own, a `Group`, whose forward is
whatever reads them; and each variable looks there for its value.

There is a group for each block and for each other layer that a model is made of, with all their
weights, frozen or not: LoRA's base and its adapters are gathered at once. `Root` holds them, so
that they share torch's streams.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.framework_internals import internals_torch
from kmodels.distribution.engines.sharded_variable_torch import put_in


class Group(torch.nn.Module):
    """Weights that are gathered while a function runs that reads them."""

    def __init__(self, variables: Sequence[Any]):
        super().__init__()
        for index, variable in enumerate(variables):
            kind = getattr(torch, keras.backend.standardize_dtype(variable.dtype))
            # It has no numbers yet: torch cuts it, and each rank makes its own part.
            value = torch.empty(variable.shape, dtype=kind, device="meta")
            trainable = variable.trainable and kind.is_floating_point
            self.register_parameter(f"p{index}", torch.nn.Parameter(value, trainable))

    def forward(self, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """`function(*args, **kwargs)`."""
        found = function(*args, **kwargs)
        # Torch warns of views, since an operation in place would lose the hook that gathers again.
        if isinstance(found, torch.Tensor) and found.requires_grad:
            return found.clone() if internals_torch.is_view(found) else found
        return found


class Root(torch.nn.Module):
    """Holds all groups of a model, around its call."""

    def __init__(self, groups: Sequence[Group]):
        super().__init__()
        self.groups = torch.nn.ModuleList(groups)

    def forward(self, function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """`function(*args, **kwargs)`."""
        return function(*args, **kwargs)


def shard(model: keras.Model, mesh: DeviceMesh) -> Any:
    """Cuts all weights of a model over the last axis of a mesh.

    Weights that have values keep them, each rank its part; the others wait for theirs.

    Args:
        model: a built `keras.Model`.
        mesh: mesh of one axis, or of two, of which the first has copies (HSDP).

    Returns:
        The root of the groups, an `FSDPModule`.

    Raises:
        InputError: for weights that no layer reads alone, or that cannot be reduced together.
    """
    layers = _layers(model)
    owned = [id(variable) for layer in layers for variable in layer.weights]
    if lost := [v.path for v in model.weights if owned.count(id(v)) != 1]:
        raise InputError(
            f"fsdp found weights that belong to no layer of their own, or to several: "
            f"{', '.join(lost[:8])}; keep each in one layer"
        )
    for layer in keras_internals.sublayers(model):
        # Keras holds the whole tensors here too; it makes the dictionary again when it is asked.
        keras_internals.forget_parameters(layer)
    groups = [_cut(layer, mesh) for layer in layers]
    _prefetch(layers, groups)
    root: Any = Root(groups)
    fully_shard(root, mesh=mesh)
    # The first call settles for torch what is the root.
    root(lambda: None)
    _enter(model, "call", root)
    return root


def _layers(model: keras.Model) -> list[Any]:
    """Returns the layers with weights that a model, or a model in it, is made of; each once."""
    found: dict[int, Any] = {}
    for layer in model.layers:
        inside = _layers(layer) if isinstance(layer, keras.Model) else [layer]
        found.update({id(one): one for one in inside if one.weights})
    return list(found.values())


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
    fully_shard(
        group,
        mesh=mesh,
        reshard_after_forward=True,
        shard_placement_fn=functools.partial(_dimension, parts=mesh.size(-1)),
        mp_policy=_precision(layer),
    )
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
    """Returns the first dimension that divides: dimension 0 is gathered without a copy.

    Where none does, torch pads the first one.
    """
    even = [axis for axis, size in enumerate(parameter.shape) if size % parts == 0]
    return Shard(even[0] if even else 0)


def _precision(layer: keras.Layer) -> MixedPrecisionPolicy:
    """Gathers weights in the dtype that layers read, and reduces gradients in float32.

    Half the bytes travel under a mixed policy, and no cast copy of a weight waits for backward.
    """
    readers = [one for one in keras_internals.sublayers(layer) if one.weights]
    kinds = {one.compute_dtype for one in readers}
    casts = all(one.autocast for one in readers) and all(
        map(keras_internals.autocasts, layer.weights)
    )
    kind = getattr(torch, kinds.pop()) if casts and len(kinds) == 1 else None
    return MixedPrecisionPolicy(kind, torch.float32, cast_forward_inputs=False)


def _enter(layer: keras.Layer, name: str, module: torch.nn.Module) -> None:
    """Has a method of a layer run inside a module, with torch's hooks around it."""
    method = getattr(layer, name)

    @functools.wraps(method)
    def entered(*args: object, **kwargs: object) -> Any:
        # Keras infers shapes with tensors that have no numbers.
        if any(getattr(x, "is_meta", False) for x in keras.tree.flatten((args, kwargs))):
            return method(*args, **kwargs)
        return module(method, *args, **kwargs)

    vars(layer)[name] = entered


def _prefetch(layers: Sequence[Any], groups: Sequence[Any]) -> None:
    """Each block asks for the next one's weights before it computes.

    Torch does so itself on the way back, in the order in which the groups ran.
    """
    both = zip(layers, groups, strict=True)
    blocks = [group for layer, group in both if layer.name.startswith("block_")]
    for block, after in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
