"""Decides on torch when Keras' part of a layer's call can be left out: it would change nothing."""

from typing import TYPE_CHECKING, Any

import torch

from kmodels.core import keras_internals
from kmodels.core.framework_internals import internals_torch

if TYPE_CHECKING:
    from kmodels.layers.base import Layer

# The names of dtypes that layers compute in.
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
# Counts the changes of layers; what is known of one holds until the next.
_changes = 0
# What Keras hands on as it is.
_PLAIN = frozenset({type(None), bool, int, float, str})


def declines(layer: "Layer", args: tuple, kwargs: dict[str, Any]) -> str | None:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    context = keras_internals.current_call_context()
    if context is None:
        return "no layer of Keras is calling it"
    if (reason := keras_internals.needs_keras_call(layer)) is not None:
        return reason
    if layer.makes_masks:
        return "it makes masks"
    if internals_torch.has_hooks(layer):
        return "it has hooks"
    compute_dtype = layer.compute_dtype
    if layer.autocast and not keras_internals.reads_variables_as(layer, compute_dtype):
        return "Keras casts its variables to another dtype than the layer around it"
    if compute_dtype not in _DTYPES:
        return "it computes in whole numbers"
    dtype = _DTYPES[compute_dtype] if layer.autocast else None
    if not args or any(not isinstance(x, torch.Tensor) and x is not None for x in args):
        return "Keras converts its arguments, or refuses them"
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, torch.Tensor):
            if x.is_meta:
                return "Keras infers shapes"
            if x.dtype is not dtype and dtype is not None and x.is_floating_point():
                return "Keras casts its arguments"
            if getattr(x, "_keras_mask", None) is not None:
                return "Keras hands on a mask"
        elif type(x) not in _PLAIN:
            return "Keras converts its arguments, or refuses them"
    if kwargs.get("mask") is not None:
        return "Keras hands on a mask"
    _tell_training(layer, context, kwargs)
    return None


def is_sealed(layer: "Layer") -> bool:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    found = vars(layer).get("_seal")
    if found is None or found[0] != _changes:
        found = _changes, _hooks_of_parts(layer)
        # Keras would make its own tuple and dictionaries of it.
        object.__setattr__(layer, "_seal", found)
    hooks = found[1]
    return hooks is not None and not any(hooks)


def changed() -> None:
    """See `kmodels.layers.direct_calls.DirectCalls`."""
    global _changes
    _changes += 1


def _hooks_of_parts(layer: "Layer") -> list[dict[int, Any]] | None:
    """Returns the hooks of all layers below, None where Keras has to call one or there are none.

    Whether a hook is there changes unseen, so the dictionaries are looked at in each call. A
    user's class may call what is no part of it.
    """
    parts = [part for part in keras_internals.sublayers(layer) if part is not layer]
    policy = layer.dtype_policy
    for part in parts:
        if (
            not type(part).__module__.startswith("kmodels.")
            or not hasattr(part, "takes_training")
            or "call" in vars(part)
            or keras_internals.needs_keras_call(part) is not None
            or part.makes_masks
            or not part.autocast
            or part.dtype_policy.name != policy.name
        ):
            return None
    return [hooks for part in parts for hooks in internals_torch.hooks_of(part)] or None


def _tell_training(layer: "Layer", context: Any, kwargs: dict[str, Any]) -> None:
    """Does what Keras does with `training`: what a layer is told holds for those after it too."""
    if not layer.takes_training:
        kwargs.pop("training", None)
        return
    if "training" in kwargs:
        context.training = kwargs["training"]
        return
    training = context.get_value("training")
    context.training = layer.training_default if training is None else training
    if context.training is not None:
        kwargs["training"] = context.training
