"""A plain training loop of torch: fused optimizer, autocast in bfloat16."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.nn import functional

from vit_peers.common import BETAS, WEIGHT_DECAY, Pace, Settings, batches


def make_optimizer(parameters: list[torch.Tensor], settings: Settings) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, settings.learning_rate, fused=True)
    return torch.optim.AdamW(
        parameters, settings.learning_rate, BETAS, 1e-8, WEIGHT_DECAY, fused=True
    )


def train(
    forward: Callable[[torch.Tensor], torch.Tensor],
    parameters: list[torch.Tensor],
    settings: Settings,
    pace: Pace,
    facts: dict[str, Any],
    *,
    autocast: bool = True,
    channels_first: bool = True,
) -> None:
    """Trains `parameters` by the loss of `forward`."""
    torch.set_num_threads(1)
    dtype = parameters[0].dtype
    data = []
    for images, labels in batches(settings):
        tensor = torch.from_numpy(images).to(dtype)
        tensor = tensor.permute(0, 3, 1, 2).contiguous() if channels_first else tensor
        data.append((tensor, torch.from_numpy(labels).long()))
    optimizer = make_optimizer(parameters, settings)
    autocast = autocast and settings.precision == "bfloat16" and dtype == torch.float32
    pace.ready(facts)
    for i in count():
        images, labels = data[i % len(data)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = forward(images)
        loss = functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pace(loss.detach())


def fill(model: torch.nn.Module, tensors: dict[str, Any]) -> None:
    """Loads NumPy arrays by name; all names must fit."""
    model.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})


def patches(kernel: Any, settings: Settings) -> Any:
    """(patch * patch * 3, D) -> (D, 3, patch, patch)."""
    side = settings.patch
    return kernel.reshape(side, side, 3, -1).transpose(3, 2, 0, 1).copy()


def counted(model: torch.nn.Module, settings: Settings) -> dict[str, Any]:
    """The facts that any torch module tells in the same way."""
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "variables": " ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "compute": settings.precision,
    }
