"""Decides on torch when Keras' part of a layer's call has no effect and can be skipped."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from kmodels.core import internals_torch, keras_internals
from kmodels.layers import direct_calls

if TYPE_CHECKING:
    from kmodels.layers.base import Layer
    from kmodels.layers.direct_calls import CalledDirectly

# The names of dtypes that layers compute in.
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_WATCHED = frozenset({"call", internals_torch.COMPILED_CALL, *keras_internals.CALL_ATTRIBUTES})
# Counts changes of layers; a cached decision holds until the next change.
_changes = 0
# Types of arguments that Keras passes unchanged.
_PLAIN = frozenset({type(None), bool, int, float, str})


def declines(layer: "Layer", args: tuple, kwargs: dict[str, Any]) -> str | None:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    context = keras_internals.current_call_context()
    if context is None:
        return "no layer of Keras is calling it"
    if (reason := _of_layer(layer)) is not None:
        return reason
    compute_dtype = layer.compute_dtype
    if layer.autocast and not keras_internals.reads_variables_as(layer, compute_dtype):
        return "Keras casts its variables to another dtype than the layer around it"
    if compute_dtype not in _DTYPES:
        return "it computes in whole numbers"
    dtype = _DTYPES[compute_dtype] if layer.autocast else None
    if not args or any(not isinstance(x, torch.Tensor) and x is not None for x in args):
        return "Keras converts its arguments, or refuses them"
    for x in (*args, *_leaves(kwargs)) if kwargs else args:
        if isinstance(x, torch.Tensor):
            if (reason := _of_tensor(x)) is not None:
                return reason
            if x.dtype is not dtype and dtype is not None and x.is_floating_point():
                return "Keras casts its arguments"
        elif type(x) not in _PLAIN:
            return "Keras converts its arguments, or refuses them"
    if kwargs.get("mask") is not None:
        return "Keras hands on a mask"
    _tell_training(layer, context, kwargs)
    return None


def _leaves(kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields keyword arguments and the members of those that are named tuples."""
    for x in kwargs.values():
        if isinstance(x, tuple):
            yield from x
        else:
            yield x


def _of_layer(layer: "Layer | CalledDirectly") -> str | None:
    """Returns why Keras has to call this layer for any arguments (a clause), or None."""
    if (reason := keras_internals.needs_keras_call(layer)) is not None:
        return reason
    if layer.makes_masks:
        return "it makes masks"
    if internals_torch.is_compiled(layer):
        return "its own compile() made a function of it"
    return "it has hooks" if internals_torch.has_hooks(layer) else None


def _of_tensor(x: torch.Tensor) -> str | None:
    """Returns why a tensor of any dtype needs Keras (a clause), or None."""
    if x.is_meta:
        return "Keras infers shapes"
    return "Keras hands on a mask" if getattr(x, "_keras_mask", None) is not None else None


def declines_model(model: "CalledDirectly", args: tuple, kwargs: dict[str, Any]) -> str | None:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    if torch.compiler.is_compiling() or internals_torch.in_trace():
        return "it is traced"
    if (reason := _of_layer(model)) is not None:
        return reason
    if model.compute_dtype not in _DTYPES:
        return "it computes in whole numbers"
    if len(args) != 1 or any(type(x) not in _PLAIN for x in kwargs.values()):
        return "Keras converts its arguments, or refuses them"
    inputs, graph = args[0], model.input
    named = isinstance(inputs, Mapping)
    if named is not isinstance(graph, Mapping):
        return "its inputs have another structure than those of its graph"
    for name, x in inputs.items() if named else ((None, inputs),):
        wanted = graph.get(name) if named else graph
        if model.optional_inputs:
            if x is None:
                continue
        elif wanted is None:
            return "its inputs have another structure than those of its graph"
        if not isinstance(x, torch.Tensor):
            return "Keras converts its arguments, or refuses them"
        if (reason := _of_tensor(x)) is not None:
            return reason
        if wanted is not None and not _fits(x.shape, wanted.shape):
            return "Keras changes the rank of its inputs, or refuses them"
    return None


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Returns True if a tensor of this shape can be the input of a graph."""
    if len(shape) != len(wanted):
        return False
    return all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def run_model(model: "CalledDirectly", args: tuple, kwargs: dict[str, Any]) -> Any:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    dtype = _DTYPES[model.compute_dtype]
    args = (_cast(args[0], dtype),)
    context = keras_internals.current_call_context()
    if context is not None:
        return _run_inside(model, args, kwargs, context)
    with keras_internals.entering(model) as context:
        seal = _seal(model)
        if seal.losses is None or any(seal.losses):
            keras_internals.forget_losses(model)
        return _run_inside(model, args, kwargs, context)


def _run_inside(model: "CalledDirectly", args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
    _tell_training(model, context, kwargs)
    if keras_internals.reads_variables_as(model, model.compute_dtype):
        return direct_calls.run(model, model.call, args, kwargs)
    with keras_internals.autocast(model.dtype_policy):
        return direct_calls.run(model, model.call, args, kwargs)


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Casts inputs as Keras does for a model of this compute dtype."""
    if isinstance(inputs, Mapping):
        return {name: _cast(x, dtype) for name, x in inputs.items()}
    if inputs is None or inputs.dtype is dtype or not inputs.is_floating_point():
        return inputs
    return inputs.to(dtype)


class _Seal(NamedTuple):
    """Facts about the layers below one, as long as none of them changes.

    Attributes:
        changes: the count of changes for which it holds.
        policy: the name of the policy for which it holds.
        hooks: the hook dictionaries of all of them, read in each call since hooks change without
            notice; None if Keras has to call one of them, or there are none.
        losses: the lists of `add_loss`; None if not all layers are of kmodels.
    """

    changes: int
    policy: str
    hooks: list[dict[int, Any]] | None
    losses: list[Any] | None


def is_sealed(layer: "Layer") -> bool:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    hooks = _seal(layer).hooks
    return hooks is not None and not any(hooks)


def _seal(layer: "Layer | CalledDirectly") -> _Seal:
    seal: _Seal | None = vars(layer).get("_seal")
    policy = layer.dtype_policy.name
    if seal is None or seal.changes != _changes or seal.policy != policy:
        parts = [
            part
            for part in keras_internals.sublayers(layer)
            if part is not layer and not isinstance(part, keras.layers.InputLayer)
        ]
        # A user's class may call layers that are not its sublayers.
        own = all(
            type(part).__module__.startswith("kmodels.") and hasattr(part, "takes_training")
            for part in parts
        )
        losses = [keras_internals.losses_of(part) for part in (layer, *parts)] if own else None
        hooks = None
        # torch.compile may have replaced its `call`.
        if own and "call" not in vars(layer) and all(_is_plain(part, policy) for part in parts):
            hooks = [each for part in parts for each in internals_torch.hooks_of(part)] or None
        seal = _Seal(_changes, policy, hooks, losses)
        # Keras would convert it on assignment.
        object.__setattr__(layer, "_seal", seal)
    return seal


def _is_plain(part: "Layer | CalledDirectly", policy: str) -> bool:
    """Returns True if Keras adds nothing to a call of this layer inside one of this policy."""
    return (
        "call" not in vars(part)
        and keras_internals.needs_keras_call(part) is None
        and not part.makes_masks
        and not internals_torch.is_compiled(part)
        and part.dtype_policy.name == policy
    )


def depends_on(name: str) -> bool:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    return name in _WATCHED


def is_eager() -> bool:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    return not torch.compiler.is_compiling() and get_proxy_mode() is None


def changed() -> None:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    global _changes
    _changes += 1


def _tell_training(layer: "Layer | CalledDirectly", context: Any, kwargs: dict[str, Any]) -> None:
    """Resolves `training` as Keras does: an explicit value also holds for later layers."""
    if not layer.takes_training:
        kwargs.pop("training", None)
        return
    if kwargs.get("training") is not None:
        context.training = kwargs["training"]
        return
    kwargs.pop("training", None)
    training = context.get_value("training")
    context.training = layer.training_default if training is None else training
    if context.training is not None:
        kwargs["training"] = context.training
