"""Autocast, transforms and traces that torch may run around the call of an op."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import torch

from kmodels.core import internals_torch

# `torch.autocast` casts the arguments of ops that multiply matrices, and nothing else.
NARROW = {
    "attention": ("query", "key", "value"),
    "dense": ("x", "kernel", "bias"),
    "linear_cross_entropy": ("hidden",),
    "mlp": ("x", "up", "up_bias", "down", "down_bias"),
    "patch_embedding": ("images", "kernel", "bias"),
    "quantized_dense": ("x", "bias"),
}


def is_special() -> bool:
    """Returns True if `transformed` or `autocasts` may have a say, or torch.compile is at work."""
    return (
        torch.compiler.is_compiling()
        or internals_torch.in_autocast()
        or internals_torch.in_transform()
        or internals_torch.in_trace()
    )


def transformed() -> str | None:
    """Returns why no body may be opaque to autograd or a tracer (a clause), or `None`."""
    if internals_torch.in_transform():
        return "inside a transform of torch.func"
    if internals_torch.in_trace():
        return "inside torch.jit.trace"
    return None


def autocasts(args: tuple) -> bool:
    """Returns True if `torch.autocast` is on for the device of an op's first argument."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and torch.is_autocast_enabled(first.device.type)


def without_autocast(
    op: Callable[..., Any], generic: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    """Returns the op's result without autocast, for arguments in the dtypes of autocast.

    Autocast would cast again inside an op, and change its documented dtypes.
    """
    device = args[0].device.type
    dtype = torch.get_autocast_dtype(device)
    bound = inspect.signature(generic).bind(*args, **kwargs)
    for name in NARROW.get(op.name, ()):
        value: Any = bound.arguments.get(name)
        if isinstance(value, keras.Variable):
            value = value.value
        if isinstance(value, torch.Tensor) and value.dtype != torch.float64:
            bound.arguments[name] = value.to(dtype)
    with torch.autocast(device, enabled=False):
        return op(*bound.args, **bound.kwargs)
