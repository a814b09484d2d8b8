"""The memory of a training step, estimated from shapes alone: nothing is allocated.

A model built inside `keras_internals.without_values()` has the paths, shapes and layers of the real
one but no numbers. The sizes of its weights, gradients and optimizer slots follow by arithmetic;
the arrays that the blocks save for the backward pass follow from `Sizes`, which each family derives
from its config.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import keras

from kmodels import ops
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError, check_choice, check_whole
from kmodels.core.runtime import check_policy, width_of
from kmodels.distribution.mesh import Mesh
from kmodels.layers import quantized, remat
from kmodels.layers.adapter import matrices, name_in
from kmodels.layers.placement import Granularity, family_of, granularity_of
from kmodels.lora import LoraSettings
from kmodels.lora.enable import chosen
from kmodels.lora.modules import expert_layers, linear_layers
from kmodels.models.blocks.sizes import BlockSizes, Sizes
from kmodels.ops.linear_cross_entropy import tile_of

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
# Ends of the paths of packed kernels, and of those with one number in a byte.
_PACKED = tuple(f"/kernel_{mode}" for mode in quantized.MODES)
_IN_EIGHT_BITS = ("int8", "fp8", "q8_0")
_BLOCK = re.compile(r"(?:.*/)?block_\d+(?=/)")


@dataclass(frozen=True)
class Setup:
    """The settings of a step that the user chooses.

    Args:
        batch_size: rows of a step, over all devices.
        sequence_length: tokens of a row of text.
        precision: name of the dtype policy.
        lora: adapters on a frozen backbone, or None to train all weights.
        quantize: mode of the frozen kernels, see `quantize` of a model; None for floats.
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
        check_choice("optimizer", self.optimizer, SLOTS)
        check_choice("remat", self.remat, remat.MODES)
        if self.quantize is not None:
            quantized.Quantization.of(self.quantize)
            if self.lora is None:
                raise InputError(
                    f"quantize is {self.quantize!r} but all weights are trained; add LoRA"
                )


@dataclass(frozen=True)
class StepArray:
    """One array of a step: its part, one of `PARTS`, and its name, a path or block and role.

    Args:
        shape: shape of the whole, over all devices.
        axes: kinds of its dimensions, as in `distribution.layout`, and "batch" for rows; () if each
            device holds all of it. Weights, gradients and slots are sharded like the variable of
            that path.
        granularity: granularity of a variable, see `layers.shard_granularity`.
        family: family of a variable, see `layers.placement`.
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


@dataclass(frozen=True)
class Facts:
    """Measured facts about a backend (docs/measured/memory.md).

    Args:
        norm: float32 arrays that the generic RMS norm saves in addition to its input.
        gelu: arrays that the generic GELU saves in addition to its input, its result included.
        moments: arrays of the size of a block's largest that live at the same time.
        table: copies of the embedding table in the compute dtype that the head makes.
        slack: share that allocator and scheduler add to the memory that is freed within a step.
        remat: True if gradient checkpointing lowers the peak.
        compiler: bytes for compiling and running the first step.
        program: bytes of the compiled step for each block.
        quantized: the same for each quantized kernel.
        returns: False if the allocator keeps the floats of kernels that `quantize` replaces.
        gathers_again: sharded weights are freed after the forward pass of a layer and gathered
            again for its backward pass, even without gradient checkpointing.
        attention: attention weights saved if the override does not decline: "plain" for all,
            "kernel" for none.
    """

    norm: int
    gelu: int
    moments: int
    table: int
    slack: float
    remat: bool
    compiler: int
    program: int = 0
    quantized: int = 0
    returns: bool = True
    gathers_again: bool = False
    attention: str = "kernel"


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

    def supposed(self, mesh: Mesh) -> AbstractContextManager[None]:
        """Makes ops choose inside the block as on this mesh, whose devices need not exist."""
        ...


# The linear layers that share an input.
READERS = {
    "attention_input": ("attention/query", "attention/key", "attention/value"),
    "attention_output": ("attention/output",),
    "mlp_input": ("mlp/gate", "mlp/up"),
    "mlp_hidden": ("mlp/down",),
}


@dataclass(frozen=True)
class Estimate:
    """The memory of a step.

    Attributes:
        arrays: every array.
        overhead: additional bytes of allocator, scheduler and compiler.
    """

    arrays: tuple[StepArray, ...]
    overhead: int = 0

    def part(self, name: str) -> int:
        """Returns bytes of one part."""
        return sum(array.bytes for array in self.arrays if array.part == name)

    def count(self, name: str) -> int:
        """Returns elements of one part."""
        return sum(array.size for array in self.arrays if array.part == name)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: self.part(name) for name in PARTS}

    @property
    def blocks(self) -> dict[str, int]:
        """Bytes that each block keeps for the backward pass."""
        sizes: dict[str, int] = {}
        for array in self.arrays:
            if array.part == ACTIVATIONS:
                block = array.name.partition("/")[0]
                sizes[block] = sizes.get(block, 0) + array.bytes
        return sizes

    @property
    def bytes(self) -> int:
        """The peak: activations are freed before all gradients exist, so the larger one counts."""
        parts = self.parts
        forward, backward = parts[ACTIVATIONS] + parts[HEAD], parts[GRADIENTS]
        constant = parts[FROZEN] + parts[TRAINED] + parts[OPTIMIZER]
        moving = max(forward, backward) + parts[GATHERED] + parts[SCRATCH]
        return constant + moving + self.overhead


def weights(model: keras.Model, setup: Setup) -> Iterator[StepArray]:
    """Yields the variables of the model, its adapters and its quantized kernels, as in memory."""
    policy = keras.dtype_policies.get(setup.precision)
    backbone = getattr(model, "backbone", model)
    linear = linear_layers(backbone) | expert_layers(backbone)
    kernels = {f"{path}/kernel": layer for path, layer in linear.items()}
    base = {variable.path for variable in backbone.weights} if setup.lora else set()
    for variable in model.weights:
        part = FROZEN if variable.path in base or not variable.trainable else TRAINED
        if setup.quantize and variable.path in kernels:
            yield from _quantized(kernels[variable.path], setup.quantize)
        else:
            shape, granularity = tuple(variable.shape), granularity_of(variable)
            # Of a model that is quantized in its file, whose scales keep their dtypes too.
            packed = "/kernel_" in variable.path
            yield StepArray(
                part,
                variable.path,
                shape,
                str(variable.dtype) if packed else policy.variable_dtype,
                granularity=granularity,
                family=family_of(variable),
            )
    if setup.lora is not None:
        for layer in chosen(backbone, setup.lora).values():
            shapes = matrices(layer, setup.lora.rank)
            if setup.lora.dora:
                shapes["lora_magnitude"] = ((layer.units,), layer.shard_granularity[1:])
            for name, (shape, granularity) in shapes.items():
                yield StepArray(
                    TRAINED,
                    name_in(layer, name),
                    shape,
                    "float32",
                    granularity=granularity,
                    family=layer.layout_family,
                )


def _quantized(layer: keras.Layer, mode: str) -> Iterator[StepArray]:
    settings = quantized.Quantization.of(mode)
    shapes = settings.shapes(layer.input_dim, layer.units, layer.groups)
    for name, (shape, dtype) in shapes.items():
        yield StepArray(
            FROZEN,
            f"{layer.path}/{name}",
            shape,
            dtype,
            granularity=layer.shard_granularity,
            family=layer.layout_family,
        )


def held_by(model: keras.Model, sizes: Sizes, setup: Setup) -> list[StepArray]:
    """Returns all arrays of a training step, whole.

    Raises:
        InputError: for LoRA targets or ranks that the model does not have.
    """
    arrays = list(weights(model, setup))
    trained = [array for array in arrays if array.part == TRAINED]
    slots = SLOTS[setup.optimizer] + (setup.accumulate > 1) + setup.ema
    arrays += [replace(array, part=GRADIENTS) for array in trained]
    arrays += [
        replace(array, part=OPTIMIZER, shape=(slots, *array.shape)) for array in trained if slots
    ]
    return arrays + list(of_step(arrays, sizes, setup))


def estimate(arrays: Sequence[StepArray], setup: Setup) -> Estimate:
    """Returns the estimate of a step from the arrays that a device holds."""
    known = facts(setup.accelerator)
    slack = known.slack * sum(array.bytes for array in arrays if array.part in MOVING)
    blocks = {match[0] for array in arrays if (match := _BLOCK.match(array.name))}
    kernels = [array for array in arrays if array.name.endswith(_PACKED)]
    program = known.compiler + known.program * len(blocks) + known.quantized * len(kernels)
    if setup.quantize is not None and not known.returns:
        width = width_of(keras.dtype_policies.get(setup.precision).variable_dtype)
        program += sum(math.prod(_wide(array)) * width - array.bytes for array in kernels)
    return Estimate(tuple(arrays), round(slack) + program)


def _wide(packed: StepArray) -> tuple[int, ...]:
    """Returns the shape of the kernel that packed numbers stand for, with two in a byte at last."""
    return (*packed.shape, 1 if packed.name.endswith(_IN_EIGHT_BITS) else 2)


def cache_bytes(sizes: Sizes, setup: Setup, slots: int, parts: int = 1) -> int:
    """Returns the bytes of the KV cache of `generate` for so many tokens of each row.

    A block with a window keeps no more tokens than that. Heads are split over `parts` devices if
    these divide them.
    """
    width = width_of(keras.dtype_policies.get(setup.precision).compute_dtype)
    total = 0
    for block in sizes.blocks:
        heads = block.groups if block.groups % parts else block.groups // parts
        total += 2 * min(slots, block.window or slots) * heads * block.head_dim
    return setup.batch_size * total * width


def facts(accelerator: bool = False) -> Facts:
    """Returns the facts of the backend, for the device of this process or an accelerator."""
    engine = backend_module("kmodels.tools.plan.facts", FactsBackend)
    return engine.ACCELERATOR if accelerator else engine.FACTS


def of_step(weights: Sequence[StepArray], sizes: Sizes, setup: Setup) -> Iterator[StepArray]:
    """Yields the arrays that the blocks keep, then those of the head, then scratch arrays."""
    trained = {array.name.rpartition("/")[0] for array in weights if array.part == TRAINED}
    step = _Step(sizes, setup)
    mode = setup.remat if step.facts.remat else "none"
    first = 0
    if setup.lora is not None and not _trained(weights, "token_embedding/lora_a"):
        # Nothing below the first adapter needs a gradient.
        blocks = (i for i in range(sizes.layers) if step.learns(i, trained))
        first = next(blocks, sizes.layers)
    largest: list[StepArray] = []
    for index in range(first, sizes.layers):
        block = list(step.block(index, trained))
        again: list[StepArray] = []
        if mode == "block":
            again = [array for array in block if array.name != f"block_{index}/input"]
        elif mode in remat.PARTS:
            again = [array for array in block if f"/{mode}/" in array.name]
            yield step.wide(f"block_{index}/normed", sizes.width)
        yield from (array for array in block if array not in again)
        largest = max(largest, again, key=lambda arrays: sum(array.bytes for array in arrays))
    # One block at a time is computed again.
    yield from (replace(array, part=SCRATCH) for array in largest)
    yield from step.head(weights)
    yield from step.moments(weights)


def _trained(weights: Sequence[StepArray], name: str) -> list[StepArray]:
    return [array for array in weights if array.part == TRAINED and array.name == name]


class _Step:
    """Shapes and dtypes of one step."""

    def __init__(self, sizes: Sizes, setup: Setup):
        self.sizes, self.setup, self.facts = sizes, setup, facts(setup.accelerator)
        self.dtype = keras.dtype_policies.get(setup.precision).compute_dtype
        self.tokens = sizes.tokens or setup.sequence_length
        self.ways = {block: self.way_of_attention(block) for block in set(sizes.blocks)}
        x = keras.ops.zeros((1, 8), self.dtype)
        norm = ops.rms_norm if sizes.gated else ops.layer_norm
        self.norms = self.facts.norm if norm.declines(x, x[0]) else 0
        plain = ops.gated_gelu.declines(x, x) if sizes.gated else ops.gelu.declines(x)
        self.gelu = self.facts.gelu if plain else 0
        # Adapters may stand between the two layers of an MLP.
        together = not sizes.gated and setup.lora is None
        square = keras.ops.zeros((8, 8), self.dtype)
        self.again = together and ops.mlp.declines(x, square, None, square, None) is None

    def wide(
        self,
        name: str,
        width: int,
        dtype: str | None = None,
        part: str = ACTIVATIONS,
        axis: str | None = None,
    ) -> StepArray:
        """Returns an array (B, T, width); `axis` is the kind of its last dimension."""
        shape = (self.setup.batch_size, self.tokens, width)
        return StepArray(part, name, shape, dtype or self.dtype, ("batch", None, axis))

    def heads(self, name: str, count: int, width: int, dtype: str | None = None) -> StepArray:
        """Returns an array (B, T, count, width)."""
        shape = (self.setup.batch_size, self.tokens, count, width)
        return StepArray(
            ACTIVATIONS, name, shape, dtype or self.dtype, ("batch", None, "heads", None)
        )

    def learns(self, index: int, trained: Collection[str]) -> bool:
        """Returns True if a block has a trained weight."""
        return any(f"/block_{index}/" in f"/{path}/" for path in trained)

    def block(self, index: int, trained: Collection[str]) -> Iterator[StepArray]:
        """Yields the arrays that one block keeps for the backward pass."""
        sizes, own, prefix = self.sizes, self.sizes.blocks[index], f"block_{index}"
        width = sizes.width
        reads = {
            array
            for array, layers in READERS.items()
            if any(path.endswith(f"{prefix}/{layer}") for path in trained for layer in layers)
        }
        yield from self.norm(f"{prefix}/input", width)
        if "attention_input" in reads:
            yield self.wide(f"{prefix}/attention/input", width)
        yield from self.attention(f"{prefix}/attention", own)
        if "attention_output" in reads:
            yield self.heads(f"{prefix}/attention/mixed", own.heads, own.head_dim)
        yield from self.norm(f"{prefix}/middle", width)
        if own.post_norms:
            yield from self.norm(f"{prefix}/attention_result", width)
            yield from self.norm(f"{prefix}/mlp_result", width)
        if "mlp_input" in reads:
            yield self.wide(f"{prefix}/mlp/input", width)
        for array in ("gate", "up") if sizes.gated else ("up",):
            yield self.wide(f"{prefix}/mlp/{array}", own.mlp_dim, axis="mlp")
        hidden = 0 if self.again else max(self.gelu, "mlp_hidden" in reads)
        for number in range(hidden):
            yield self.wide(f"{prefix}/mlp/hidden_{number}", own.mlp_dim, axis="mlp")
        if own.per_layer:
            for array in ("part", "gate", "hidden"):
                yield self.wide(f"{prefix}/per_layer/{array}", own.per_layer)
            yield self.wide(f"{prefix}/per_layer/input", width)
            yield from self.norm(f"{prefix}/per_layer/result", width)
        if own.experts:
            yield from self.experts(f"{prefix}/experts", own)
        if own.dropout:
            yield self.wide(f"{prefix}/dropout", 2 * width, "bool")
            if not sizes.gated:
                yield self.wide(f"{prefix}/mlp/dropout", own.mlp_dim, "bool", axis="mlp")

    def experts(self, name: str, block: BlockSizes) -> Iterator[StepArray]:
        """Yields inputs and outputs of the experts of each token."""
        for norm in ("mlp_result", "input", "result"):
            yield from self.norm(f"{name}/{norm}", self.sizes.width)
        experts = block.experts_per_token
        for role, width in (
            ("rows", self.sizes.width),
            ("gate_up", 2 * block.expert_dim),
            ("hidden", block.expert_dim),
            ("results", self.sizes.width),
            ("in_order", self.sizes.width),
        ):
            yield self.wide(f"{name}/{role}", experts * width)

    def norm(self, name: str, width: int) -> Iterator[StepArray]:
        """Yields a norm's input and further arrays that the backend keeps."""
        yield self.wide(name, width)
        for number in range(self.norms):
            yield self.wide(f"{name}/norm_{number}", width, "float32")

    def attention(self, name: str, block: BlockSizes) -> Iterator[StepArray]:
        """Yields queries, keys, values, and attention weights unless a kernel recomputes them."""
        batch, tokens, way = self.setup.batch_size, self.tokens, self.ways[block]
        heads, groups, width = block.heads, block.groups, block.head_dim
        if block.head_norms:
            for role, count in (("query", heads), ("key", groups)):
                yield self.heads(f"{name}/{role}", count, width)
                for number in range(self.norms):
                    yield self.heads(f"{name}/{role}/norm_{number}", count, width, "float32")
        if self.setup.packed:
            yield self.wide(f"{name}/mask", tokens, "bool")
        yield self.heads(f"{name}/turned_query", heads, width)
        if way == "kernel":
            # Kernels repeat key heads to the number of query heads.
            for role in ("keys", "values", "out"):
                yield self.heads(f"{name}/{role}", heads, width)
            return
        for role in ("keys", "values"):
            yield self.heads(f"{name}/{role}", groups, width)
        shape, axes = (batch, heads, tokens, tokens), ("batch", "heads", None, None)
        if block.attention_dropout:
            yield StepArray(ACTIVATIONS, f"{name}/dropout", shape, "bool", axes)
        yield StepArray(ACTIVATIONS, f"{name}/weights", shape, "float32", axes)
        if self.dtype != "float32" or block.attention_dropout:
            yield StepArray(ACTIVATIONS, f"{name}/rounded_weights", shape, self.dtype, axes)
        if block.soft_cap:
            yield StepArray(ACTIVATIONS, f"{name}/capped", shape, "float32", axes)

    def way_of_attention(self, block: BlockSizes) -> str:
        """Returns which attention weights are kept: "plain" (all) or "kernel" (none)."""
        causal, dropout = self.sizes.causal, block.attention_dropout
        x = keras.ops.zeros((1, self.tokens, 1, block.head_dim), self.dtype)
        drawn = {"dropout": dropout, "seed": keras.random.SeedGenerator(0)} if dropout else {}
        options = {"causal": causal, "soft_cap": block.soft_cap, **drawn}
        if ops.attention.declines(x, x, x, **options) is not None:
            return "plain"
        return self.facts.attention

    def head(self, weights: Sequence[StepArray]) -> Iterator[StepArray]:
        """Yields a tile of logits and the gradient of the hidden states, or all logits."""
        sizes = self.sizes
        yield from self.norm("head/hidden", sizes.width)
        if sizes.vocabulary is None:
            return
        if _head_declines(self.dtype):
            for name in ("logits", "gradient"):
                yield self.wide(f"head/{name}", sizes.vocabulary, "float32", HEAD, "vocab")
            return
        for name in ("normed", "product"):
            yield self.wide(f"head/{name}", sizes.width, "float32", HEAD)
        positions = self.setup.batch_size * self.tokens
        tile = tile_of(sizes.vocabulary, positions, self.setup.accelerator)
        # With a sharded vocabulary each device computes the scores of its part.
        yield self.wide("head/scores", tile, "float32", HEAD, "vocab")
        yield self.wide("head/tile", tile, self.dtype, HEAD, "vocab")
        for copy in range(self.facts.table):
            shape = (sizes.vocabulary, sizes.width)
            yield StepArray(HEAD, f"head/table_{copy}", shape, self.dtype)
        # The loss appends the adapter of an output layer to the table as columns.
        for rank in (
            array.shape[0] for array in _trained(weights, "token_embedding/reverse_lora_b")
        ):
            shape = (sizes.vocabulary, sizes.width + rank)
            for name in ("widened_table", "gradient_of_table"):
                yield StepArray(HEAD, f"head/{name}", shape, self.dtype)

    def moments(self, weights: Sequence[StepArray]) -> Iterator[StepArray]:
        """Yields the temporary arrays in the backward pass of a block."""
        sizes, setup = self.sizes, self.setup
        mlp_dim = max((block.mlp_dim for block in sizes.blocks), default=0)
        axis = "mlp" if mlp_dim > sizes.width else None
        shapes = [self.wide("scratch", max(mlp_dim, sizes.width), part=SCRATCH, axis=axis)]
        plain = [block.heads for block in sizes.blocks if self.ways[block] == "plain"]
        if plain:
            shape = (setup.batch_size, max(plain), self.tokens, self.tokens)
            axes = ("batch", "heads", None, None)
            shapes.append(StepArray(SCRATCH, "scratch", shape, "float32", axes))
        largest = max(shapes, key=lambda array: array.bytes)
        yield from [largest] * self.facts.moments
        kernels = [_wide(array) for array in weights if array.name.endswith(_PACKED)]
        if kernels:
            widest = max(kernels, key=math.prod)
            for dtype in ("float32", self.dtype):
                yield StepArray(SCRATCH, "widened kernel", widest, dtype)


def _head_declines(dtype: str) -> str | None:
    """Returns the reason for which the head holds all logits; None if it works by tiles."""
    hidden, labels = keras.ops.zeros((1, 8), dtype), keras.ops.zeros((1,), "int32")
    weights = keras.ops.zeros((1,), "float32")
    return ops.linear_cross_entropy.declines(hidden, hidden, labels, weights)
