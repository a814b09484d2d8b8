"""The words in which the memory of a training step is told: sizes, setup, and what is held."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.core.precision import check_policy
from kmodels.layers import quantized, remat
from kmodels.layers.shard_granularity import Granularity
from kmodels.lora import LoraSettings

# Arrays of a weight's size that an optimizer keeps for it.
SLOTS = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0}
# The parts of what a step holds, in the order in which they are shown.
FROZEN, TRAINED = "frozen weights", "trained weights"
GRADIENTS, OPTIMIZER = "gradients", "optimizer"
ACTIVATIONS, HEAD, SCRATCH = "activations", "head", "scratch"
# Whole weights and gradients that a device holds for a moment where its own are parts of them.
GATHERED = "gathered"
PARTS = (FROZEN, TRAINED, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, GATHERED, SCRATCH)
# The parts that come and go within a step; allocators add to them.
MOVING = (ACTIVATIONS, HEAD, GATHERED, SCRATCH)


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of one block of a transformer.

    Args:
        heads: heads of the queries.
        groups: heads of keys and values; 0 for a block that uses those of another.
        head_dim: width of a head.
        mlp_dim: width between the dense layers of the MLP.
        post_norms: norms behind attention and MLP too.
        head_norms: norms on queries and keys.
        window: keys that a query sees, None for all.
        soft_cap: attention scores are squashed.
        dropout: rate within the block.
        attention_dropout: rate on the attention weights.
        per_layer: width of what the embedding of each token adds to the block; 0 for nothing.
        experts: experts beside the MLP; 0 for none.
        experts_per_token: experts that each token goes to.
        expert_dim: `mlp_dim` of each expert.
    """

    heads: int
    groups: int
    head_dim: int
    mlp_dim: int
    post_norms: bool = False
    head_norms: bool = False
    window: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    per_layer: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide the memory of a transformer's step.

    Args:
        blocks: sizes of each.
        width: width of the hidden states.
        tokens: tokens of a row, where an image decides them; None where the text does.
        vocabulary: rows of the embedding table; None for a model without.
        gated: the MLP multiplies two branches (Gemma).
        causal: attention looks back only.
    """

    blocks: tuple[BlockSizes, ...]
    width: int
    tokens: int | None = None
    vocabulary: int | None = None
    gated: bool = False
    causal: bool = False

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def idle_parameters(self) -> int:
        """Parameters of experts that a token does not go to."""
        idle = sum((b.experts - b.experts_per_token) * b.expert_dim for b in self.blocks)
        return 3 * self.width * idle


@dataclass(frozen=True)
class Setup:
    """The settings of a step that the user chooses.

    Args:
        batch_size: rows of a step, over all devices.
        sequence_length: tokens of a row of text.
        precision: name of the dtype policy.
        lora: adapters on a frozen backbone, or None to train all.
        quantize: "int8" or "int4" for the frozen kernels, or None.
        remat: see `layers.remat`.
        optimizer: a key of `SLOTS`.
        accumulate: batches whose gradients make one update.
        ema: keeps a moving average of the trained weights.
        packed: several texts in a row, told apart by a mask.
        accelerator: as the backend holds it on a GPU or TPU, whatever this process has.

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
        axes: what its dimensions are, in the words of `distribution.layout`, and "batch" for rows;
            () for what each device holds as a whole. Weights, gradients and slots lie on a mesh as
            the variable of that path does.
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
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes on one device that holds all of it."""
        return self.size * width_of(self.dtype)


def width_of(dtype: str) -> int:
    """Returns bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Facts:
    """Measured facts about a backend that arithmetic does not tell (docs/measured.md).

    Args:
        norm: float32 arrays that the plain RMS norm keeps besides its input.
        gelu: arrays that the plain GELU keeps besides its input, its result included.
        moments: arrays of the size of a block's largest that live at the same time.
        table: copies of the embedding table in the compute dtype that the head makes.
        slack: share that allocator and scheduler add to what comes and goes within a step.
        remat: whether computing again in place of keeping lowers the peak.
        compiler: bytes for compiling and running the first step.
        gathers_again: weights that lie in parts are let go behind the forward pass of a layer, and
            gathered again for its backward pass, though nothing is rematerialised.
        attention: what attention keeps on an accelerator, where its override does not decline:
            "plain" for all weights, "kernel" for none; None to ask the ops of this process.
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
    """The seam of one backend's facts about memory."""

    @property
    def FACTS(self) -> Facts:
        """Is what holds on this process's device."""
        ...

    @property
    def ACCELERATOR(self) -> Facts:
        """Is what holds on an accelerator."""
        ...

    def device_bytes(self) -> int | None:
        """Returns the bytes that the accelerator has left; None if nobody tells, 0 without one."""
        ...

    def by_blocks(self, x: Any, causal: bool, dropout: float) -> bool:
        """Returns whether attention on x (B, T, N, H) keeps its weights, though by blocks."""
        ...
