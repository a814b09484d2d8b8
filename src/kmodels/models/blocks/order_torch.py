"""Moving the places of each row on torch, by operations that export to ONNX.

Keras' own `argsort` and `take_along_axis` become `sort.stable` and `take_along_dim` here, which
torch's TorchScript exporter, the one that Keras uses for inputs of any length, does not know.
"""

import torch


def tokens_first(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the source and the destination of each position of a row, (B, T) int32 each."""
    is_token = mask.bool()
    before = is_token.int().cumsum(1)
    masked = torch.logical_not(is_token).int().cumsum(1) + before[:, -1:]
    back = (torch.where(is_token, before, masked) - 1).int()
    return inverse(back).int(), back


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Returns the inverse of each row of (B, T), a permutation of its places."""
    order = order.long()
    places = torch.cumsum(torch.ones_like(order), 1) - 1
    return torch.zeros_like(order).scatter(1, order, places)


def moved(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Moves x (B, T) or (B, T, D): the places of each row, in the order (B, T)."""
    order = order.long()
    if x.ndim == 3:
        order = order.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return torch.gather(x, 1, order)
