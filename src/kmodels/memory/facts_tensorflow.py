"""Memory on TensorFlow: what its graph keeps, and what there is."""

from dataclasses import replace

import tensorflow as tf

from kmodels.core.types import Tensor
from kmodels.memory.sizes import Facts

# A step on a CPU that computes again takes as much as one that keeps (docs/measured.md).
FACTS = Facts(
    norm=1,
    gelu=4,
    moments=2,
    table=0,
    slack=0.2,
    remat=False,
    compiler=300 * 2**20,
)
ACCELERATOR = replace(FACTS, remat=True, attention="plain")


def device_bytes() -> int | None:
    """Returns None with an accelerator, whose memory TensorFlow does not tell; 0 without one."""
    return None if tf.config.list_physical_devices("GPU") else 0


def by_blocks(x: Tensor, causal: bool, dropout: float) -> bool:
    """Returns whether attention keeps its weights, though by blocks: the override does."""
    return True
