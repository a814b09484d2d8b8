"""torch's part of `kmodels.tools.doctor`."""

from typing import Any

import torch

from kmodels import ops
from kmodels.core.dispatch import Op
from kmodels.overrides import attention_torch
from kmodels.overrides._attention_cuda_torch import choose
from kmodels.overrides._tensors_torch import widens
from kmodels.overrides.attention_torch import by_products
from kmodels.overrides.dense_torch import by_onednn


def devices() -> list[str]:
    """Returns GPUs if there are any, and the CPU with its threads."""
    count = torch.cuda.device_count()
    gpus = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count)]
    return [*gpus, f"cpu ({torch.get_num_threads()} threads)"]


def way(op: Op[Any, Any], *given: Any, **more: Any) -> str | None:
    """Returns which of its bodies an override takes here; None if it has only one."""
    if op in (ops.attention, ops.dense) and widens(given[0]):
        return "products in float32, since this CPU has none of half precision"
    if op is ops.attention:
        rate = more.get("dropout", 0.0)
        products = by_products(given[0], given[1], more.get("causal", False), rate)
        capped = more.get("soft_cap") is not None
        return "matrix products" if products or capped else "SDPA"
    if op is ops.dense:
        return "oneDNN" if by_onednn(given[0], given[1]) else "torch's linear"
    return None


def platforms(
    op: Op[Any, Any], *given: object, **more: object
) -> dict[str, tuple[str, str | None]]:
    """Returns which kernel serves on CUDA and why none better does; see `doctor`."""
    if op is not ops.attention:
        return {}
    bind: Any = ops.attention.bind
    choice = choose(attention_torch.known(bind(*given, **more)))
    return {"cuda": (choice.kernel, choice.reason)}
