"""Memory on torch: what it keeps, and what there is."""

import os
from dataclasses import replace

import torch

from kmodels.memory.sizes import Facts
from kmodels.overrides.attention_torch import by_products

# glibc gives blocks below 32 MiB back late; with MALLOC_MMAP_THRESHOLD_=1048576 there is no slack.
FACTS = Facts(
    norm=0,
    gelu=0,
    moments=2,
    table=0,
    slack=0.1 if torch.cuda.is_available() or "MALLOC_MMAP_THRESHOLD_" in os.environ else 0.6,
    remat=True,
    compiler=30 * 2**20,
    gathers_again=True,
)
ACCELERATOR = replace(FACTS, slack=0.1, attention="kernel")


def device_bytes() -> int | None:
    """Returns bytes that the accelerator has left; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def by_blocks(x: torch.Tensor, causal: bool, dropout: float) -> bool:
    """Returns whether attention on (B, T, N, H) keeps its weights, though by blocks."""
    return by_products(x, x, causal, dropout)
