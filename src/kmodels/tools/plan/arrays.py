"""The arrays of a training step, the settings that decide them, and facts about the backends."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.core.runtime import check_policy
from kmodels.distribution.mesh import Mesh
from kmodels.layers import quantized, remat
from kmodels.layers.shard_granularity import Granularity
from kmodels.lora import LoraSettings

# Number of optimizer slots of a weight.
SLOTS = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0}
# The parts of the memory of a step, in the order of the table.
FROZEN, TRAINED = "frozen weights", "trained weights"
GRADIENTS, OPTIMIZER = "gradients", "optimizer"
ACTIVATIONS, HEAD, SCRATCH = "activations", "head", "scratch"
# Whole weights and gradients that a device with sharded ones holds for a moment.
GATHERED = "gathered"
PARTS = (FROZEN, TRAINED, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, GATHERED, SCRATCH)
# The parts that are allocated and freed within a step; allocators add to them.
MOVING = (ACTIVATIONS, HEAD, GATHERED, SCRATCH)


@dataclass(frozen=True)
class Setup:
    """The settings of a step that the user chooses.

    Args:
        batch_size: rows of a step, over all devices.
        sequence_length: tokens of a row of text.
        precision: name of the dtype policy.
        lora: adapters on a frozen backbone, or None to train all weights.
        quantize: "int8" or "int4" for the frozen kernels, or None.
        remat: see `layers.remat`.
        optimizer: a key of `SLOTS`.
        accumulate: batches per update.
        ema: keeps a moving average of the trained weights.
        packed: several texts in a row, separated by a mask.
        accelerator: estimates for a GPU or TPU, even if this process has none.

    Raises:
        InputError: for values out of range.
    """

    batch_size: int
    sequence_length: int = 0
    precision: str = "float32"
    lora: LoraSettings | None = None
    quantize: str | None = None
    remat: str = "none"
    optimizer: str = "adamw"
    accumulate: int = 1
    ema: bool = False
    packed: bool = False
    accelerator: bool = False

    def __post_init__(self) -> None:
        check_whole("batch size", self.batch_size)
        check_whole("accumulate", self.accumulate)
        check_policy(self.precision)
        if self.optimizer not in SLOTS:
            raise InputError(f"optimizer is {self.optimizer!r}; choose {', '.join(SLOTS)}")
        if self.remat not in remat.MODES:
            raise InputError(f"remat is {self.remat!r}; choose {', '.join(remat.MODES)}")
        if self.quantize is not None:
            quantized.check_mode(self.quantize)
            if self.lora is None:
                raise InputError(
                    f"quantize is {self.quantize!r} but all weights are trained; add LoRA"
                )


@dataclass(frozen=True)
class Held:
    """One array that a step holds.

    Args:
        part: one of `PARTS`.
        name: path of the variable, or block and role of an activation.
        shape: shape of the whole, over all devices.
        dtype: dtype of the elements.
        axes: kinds of its dimensions, as in `distribution.layout`, and "batch" for rows; () if each
            device holds all of it. Weights, gradients and slots are sharded like the variable of
            that path.
        granularity: granularity of a variable, see `layers.shard_granularity`.
        family: family of a variable, see `layers.layout_family`.
    """

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...] = ()
    granularity: Granularity | None = None
    family: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * width_of(self.dtype)


def width_of(dtype: str) -> int:
    """Returns the bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Facts:
    """Measured facts about a backend that arithmetic does not tell (docs/measured.md).

    Args:
        norm: float32 arrays that the plain RMS norm keeps besides its input.
        gelu: arrays that the plain GELU keeps besides its input, its result included.
        moments: arrays of the size of a block's largest that live at the same time.
        table: copies of the embedding table in the compute dtype that the head makes.
        slack: share that allocator and scheduler add to the memory that is freed within a step.
        remat: True if gradient checkpointing lowers the peak.
        compiler: bytes for compiling and running the first step.
        gathers_again: sharded weights are freed after the forward pass of a layer and gathered
            again for its backward pass, even without gradient checkpointing.
        attention: attention weights kept on an accelerator if the override does not decline:
            "plain" for all, "kernel" for none; None to ask the ops of this process.
    """

    norm: int
    gelu: int
    moments: int
    table: int
    slack: float
    remat: bool
    compiler: int
    gathers_again: bool = False
    attention: str | None = None


class FactsBackend(Protocol):
    """Facts of one backend about memory."""

    @property
    def FACTS(self) -> Facts:
        """The facts for the device of this process."""
        ...

    @property
    def ACCELERATOR(self) -> Facts:
        """The facts for an accelerator."""
        ...

    def device_bytes(self) -> int | None:
        """Returns the free bytes of the accelerator; None if unknown, 0 without one."""
        ...

    def by_blocks(self, x: Any, causal: bool, dropout: float) -> bool:
        """Returns True if attention on x (B, T, N, H) is by blocks and keeps their weights."""
        ...

    def supposed(self, mesh: Mesh) -> AbstractContextManager[None]:
        """Lets ops choose inside the block as on this mesh, whose devices need not exist."""
        ...
