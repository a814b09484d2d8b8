"""The part of torch in `kmodels doctor` and `kmodels parity --op`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kmodels import ops
from kmodels.core.dispatch import Op
from kmodels.overrides._attention_cuda_torch import choose, facts
from kmodels.overrides._tensors_torch import widens
from kmodels.overrides.dense_torch import by_onednn


def devices() -> list[str]:
    """Returns GPUs if there are any, and the CPU with its threads."""
    count = torch.cuda.device_count()
    gpus = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count)]
    return [*gpus, f"cpu ({torch.get_num_threads()} threads)"]


def way(op: Op[Any, Any], *arguments: Any, **keywords: Any) -> str | None:
    """Returns the body that an override uses here; None if it has only one."""
    if op in (ops.attention, ops.dense) and widens(arguments[0]):
        return "products in float32, since this CPU has none of half precision"
    if op is ops.attention:
        return "SDPA"
    if op is ops.dense:
        return "oneDNN" if by_onednn(arguments[0], arguments[1]) else "torch's linear"
    return None


def platforms(
    op: Op[Any, Any], *arguments: object, **keywords: object
) -> dict[str, tuple[str, str | None]]:
    """Returns the kernel on CUDA and the reason against a faster one; see `doctor`."""
    if op is not ops.attention:
        return {}
    bind: Any = ops.attention.bind
    choice = choose(facts(bind(*arguments, **keywords)))
    return {"cuda": (choice.kernel, choice.reason)}


def gradients(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[torch.Tensor]
) -> tuple[Any, Sequence[Any]]:
    """Returns (rest, gradients) of a function that returns (scalar, rest); see `doctor`."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    value, rest = function(*leaves)
    return rest.detach(), torch.autograd.grad(value, leaves, allow_unused=True)
