"""An estimate of the memory of a training step, from shapes alone: nothing is allocated.

A model built inside `keras_internals.without_values()` has the paths, shapes and layers of the real
one and no numbers. The sizes of its weights, gradients and optimizer slots follow by arithmetic;
the arrays that the blocks keep for the backward pass follow from `Sizes`, which each family derives
from its config.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import keras

from kmodels import ops
from kmodels.core.dispatch import backend_module
from kmodels.core.runtime import host_bytes
from kmodels.layers import quantized, remat
from kmodels.layers.adapter import matrices, name_in
from kmodels.layers.layout_family import family_of
from kmodels.layers.shard_granularity import granularity_of
from kmodels.lora.enable import chosen
from kmodels.lora.targets import linear_layers
from kmodels.models.common.sizes import BlockSizes, Sizes
from kmodels.ops.linear_cross_entropy import tile_of
from kmodels.overrides.blocks import blocks
from kmodels.tools.plan.arrays import (
    ACTIVATIONS,
    FROZEN,
    GATHERED,
    GRADIENTS,
    HEAD,
    MOVING,
    OPTIMIZER,
    PARTS,
    SCRATCH,
    SLOTS,
    TRAINED,
    Facts,
    FactsBackend,
    Held,
    Setup,
    width_of,
)

# Approximate number of queries in a block of attention.
BLOCK = 128
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
        held: every array.
        overhead: additional bytes of allocator, scheduler and compiler.
    """

    held: tuple[Held, ...]
    overhead: int = 0

    def part(self, name: str) -> int:
        """Returns bytes of one part."""
        return sum(held.bytes for held in self.held if held.part == name)

    def count(self, name: str) -> int:
        """Returns elements of one part."""
        return sum(held.size for held in self.held if held.part == name)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: self.part(name) for name in PARTS}

    @property
    def blocks(self) -> dict[str, int]:
        """Bytes that each block keeps for the backward pass."""
        found: dict[str, int] = {}
        for held in self.held:
            if held.part == ACTIVATIONS:
                block = held.name.partition("/")[0]
                found[block] = found.get(block, 0) + held.bytes
        return found

    @property
    def bytes(self) -> int:
        """The peak: activations are freed before all gradients exist, so the larger one counts."""
        parts = self.parts
        forward, backward = parts[ACTIVATIONS] + parts[HEAD], parts[GRADIENTS]
        kept = parts[FROZEN] + parts[TRAINED] + parts[OPTIMIZER]
        moving = max(forward, backward) + parts[GATHERED] + parts[SCRATCH]
        return kept + moving + self.overhead


def weights(model: keras.Model, setup: Setup) -> Iterator[Held]:
    """Goes through the variables of the model with its adapters and quantized kernels.

    Args:
        model: a task, with or without values, neither quantized nor with adapters.
        setup: the step.

    Yields:
        Each variable, as it lies in memory.

    Raises:
        InputError: for LoRA targets that the model does not have.
    """
    policy = keras.dtype_policies.get(setup.precision)
    backbone = getattr(model, "backbone", model)
    if setup.quantize:
        quantized.check_layers(backbone)
    linear = linear_layers(backbone)
    kernels = {f"{path}/kernel": layer for path, layer in linear.items()}
    base = {variable.path for variable in backbone.weights} if setup.lora else set()
    for variable in model.weights:
        part = FROZEN if variable.path in base or not variable.trainable else TRAINED
        if setup.quantize and variable.path in kernels:
            yield from _quantized(kernels[variable.path], setup.quantize)
        else:
            shape, granularity = tuple(variable.shape), granularity_of(variable)
            yield Held(
                part,
                variable.path,
                shape,
                policy.variable_dtype,
                granularity=granularity,
                family=family_of(variable),
            )
    if setup.lora is not None:
        for layer in chosen(backbone, setup.lora).values():
            made = matrices(layer, setup.lora.rank)
            if setup.lora.dora:
                made["lora_magnitude"] = ((layer.units,), layer.shard_granularity[1:])
            for name, (shape, granularity) in made.items():
                yield Held(
                    TRAINED,
                    name_in(layer, name),
                    shape,
                    "float32",
                    granularity=granularity,
                    family=layer.layout_family,
                )


def _quantized(layer: keras.Layer, mode: str) -> Iterator[Held]:
    for name, (shape, dtype) in quantized.shapes(mode, layer.input_dim, layer.units).items():
        yield Held(
            FROZEN,
            f"{layer.path}/{name}",
            shape,
            dtype,
            granularity=layer.shard_granularity,
            family=layer.layout_family,
        )


def held_by(model: keras.Model, sizes: Sizes, setup: Setup) -> list[Held]:
    """Returns all arrays of a training step, whole.

    Args:
        model: a task, with or without values, neither quantized nor with adapters.
        sizes: sizes of its blocks.
        setup: the step.

    Raises:
        InputError: for LoRA targets or ranks that the model does not have.
    """
    held = list(weights(model, setup))
    trained = [h for h in held if h.part == TRAINED]
    slots = SLOTS[setup.optimizer] + (setup.accumulate > 1) + setup.ema
    held += [replace(h, part=GRADIENTS) for h in trained]
    held += [replace(h, part=OPTIMIZER, shape=(slots, *h.shape)) for h in trained if slots]
    return held + list(of_step(held, sizes, setup))


def estimate(held: Sequence[Held], setup: Setup) -> Estimate:
    """Returns the estimate of a step from the arrays that a device holds."""
    known = facts(setup.accelerator)
    slack = known.slack * sum(h.bytes for h in held if h.part in MOVING)
    return Estimate(tuple(held), round(slack) + known.compiler)


def cache_bytes(sizes: Sizes, setup: Setup, slots: int) -> int:
    """Returns the bytes of the KV cache of `generate`.

    Args:
        sizes: sizes of the blocks.
        setup: gives batch size and dtype.
        slots: tokens of each row.
    """
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    tokens = setup.batch_size * slots
    return sum(2 * tokens * b.groups * b.head_dim * width_of(dtype) for b in sizes.blocks)


def available_bytes() -> int | None:
    """Returns the free bytes of the device, on a CPU those of the host; None if unknown."""
    engine = backend_module("kmodels.tools.plan.facts", FactsBackend)
    found = engine.device_bytes()
    return host_bytes() if found == 0 else found


def facts(accelerator: bool = False) -> Facts:
    """Returns the facts of the backend, for the device of this process or an accelerator."""
    engine = backend_module("kmodels.tools.plan.facts", FactsBackend)
    return engine.ACCELERATOR if accelerator else engine.FACTS


def of_step(weights: Sequence[Held], sizes: Sizes, setup: Setup) -> Iterator[Held]:
    """Yields the arrays of one step.

    Args:
        weights: weights of the model.
        sizes: sizes of its blocks.
        setup: the step.

    Yields:
        The arrays that the blocks keep, then those of the head, then scratch arrays.
    """
    trained = {held.name.rpartition("/")[0] for held in weights if held.part == TRAINED}
    step = _Step(sizes, setup)
    mode = setup.remat if step.facts.remat else "none"
    first = 0
    if setup.lora is not None and not _trained(weights, "token_embedding/lora_a"):
        # Nothing below the first adapter needs a gradient.
        blocks = (i for i in range(sizes.layers) if step.learns(i, trained))
        first = next(blocks, sizes.layers)
    largest: list[Held] = []
    for index in range(first, sizes.layers):
        block = list(step.block(index, trained))
        again: list[Held] = []
        if mode == "block":
            again = [held for held in block if held.name != f"block_{index}/input"]
        elif mode in remat.PARTS:
            again = [held for held in block if f"/{mode}/" in held.name]
            yield step.wide(f"block_{index}/normed", sizes.width)
        yield from (held for held in block if held not in again)
        largest = max(largest, again, key=lambda arrays: sum(held.bytes for held in arrays))
    # One block at a time is computed again.
    yield from (replace(held, part=SCRATCH) for held in largest)
    yield from step.head(weights)
    yield from step.moments(weights)


def _trained(weights: Sequence[Held], name: str) -> list[Held]:
    return [held for held in weights if held.part == TRAINED and held.name == name]


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
    ) -> Held:
        """Returns an array (B, T, width); `axis` is the kind of its last dimension."""
        shape = (self.setup.batch_size, self.tokens, width)
        return Held(part, name, shape, dtype or self.dtype, ("batch", None, axis))

    def heads(self, name: str, count: int, width: int, dtype: str | None = None) -> Held:
        """Returns an array (B, T, count, width)."""
        shape = (self.setup.batch_size, self.tokens, count, width)
        return Held(ACTIVATIONS, name, shape, dtype or self.dtype, ("batch", None, "heads", None))

    def learns(self, index: int, trained: Collection[str]) -> bool:
        """Returns True if a block has a trained weight."""
        return any(f"/block_{index}/" in f"/{path}/" for path in trained)

    def block(self, index: int, trained: Collection[str]) -> Iterator[Held]:
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

    def experts(self, name: str, block: BlockSizes) -> Iterator[Held]:
        """Yields inputs and outputs of the experts of each token."""
        for norm in ("mlp_result", "input", "result"):
            yield from self.norm(f"{name}/{norm}", self.sizes.width)
        chosen = block.experts_per_token
        for role, width in (
            ("rows", self.sizes.width),
            ("gate_up", 2 * block.expert_dim),
            ("hidden", block.expert_dim),
            ("results", self.sizes.width),
            ("in_order", self.sizes.width),
        ):
            yield self.wide(f"{name}/{role}", chosen * width)

    def norm(self, name: str, width: int) -> Iterator[Held]:
        """Yields a norm's input and further arrays that the backend keeps."""
        yield self.wide(name, width)
        for number in range(self.norms):
            yield self.wide(f"{name}/norm_{number}", width, "float32")

    def attention(self, name: str, block: BlockSizes) -> Iterator[Held]:
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
            # Kernels need as many key heads as query heads.
            for role in ("keys", "values", "out"):
                yield self.heads(f"{name}/{role}", heads, width)
            return
        for role in ("keys", "values"):
            yield self.heads(f"{name}/{role}", groups, width)
        shape, axes = (batch, heads, tokens, tokens), ("batch", "heads", None, None)
        if block.attention_dropout:
            yield Held(ACTIVATIONS, f"{name}/dropout", shape, "bool", axes)
        if way == "blocks":
            cut = blocks(tokens, tokens, self.sizes.causal, block.window, BLOCK)
            pairs = sum((q.stop - q.start) * (k.stop - k.start) for q, k in cut)
            kept = (batch, heads, pairs)
            yield Held(ACTIVATIONS, f"{name}/weights", kept, self.dtype, axes[:3])
            return
        yield Held(ACTIVATIONS, f"{name}/weights", shape, "float32", axes)
        if self.dtype != "float32" or block.attention_dropout:
            yield Held(ACTIVATIONS, f"{name}/rounded_weights", shape, self.dtype, axes)
        if block.soft_cap:
            yield Held(ACTIVATIONS, f"{name}/capped", shape, "float32", axes)

    def way_of_attention(self, block: BlockSizes) -> str:
        """Returns which attention weights are kept: "plain" (all), "blocks" or "kernel" (none)."""
        causal, dropout = self.sizes.causal, block.attention_dropout
        x = keras.ops.zeros((1, self.tokens, 1, block.head_dim), self.dtype)
        drawn = {"dropout": dropout, "seed": keras.random.SeedGenerator(0)} if dropout else {}
        options = {"causal": causal, "soft_cap": block.soft_cap, **drawn}
        if ops.attention.declines(x, x, x, **options) is not None:
            return "plain"
        if self.facts.attention is not None:
            return self.facts.attention
        engine = backend_module("kmodels.tools.plan.facts", FactsBackend)
        return "blocks" if engine.by_blocks(x, causal, dropout) else "kernel"

    def head(self, weights: Sequence[Held]) -> Iterator[Held]:
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
            yield Held(HEAD, f"head/table_{copy}", shape, self.dtype)
        # The loss appends the adapter of an output layer to the table as columns.
        for rank in (held.shape[0] for held in _trained(weights, "token_embedding/reverse_lora_b")):
            shape = (sizes.vocabulary, sizes.width + rank)
            for name in ("widened_table", "gradient_of_table"):
                yield Held(HEAD, f"head/{name}", shape, self.dtype)

    def moments(self, weights: Sequence[Held]) -> Iterator[Held]:
        """Yields the temporary arrays in the backward pass of a block."""
        sizes, setup = self.sizes, self.setup
        mlp_dim = max((block.mlp_dim for block in sizes.blocks), default=0)
        axis = "mlp" if mlp_dim > sizes.width else None
        shapes = [self.wide("scratch", max(mlp_dim, sizes.width), part=SCRATCH, axis=axis)]
        plain = [block.heads for block in sizes.blocks if self.ways[block] == "plain"]
        if plain:
            shape = (setup.batch_size, max(plain), self.tokens, self.tokens)
            axes = ("batch", "heads", None, None)
            shapes.append(Held(SCRATCH, "scratch", shape, "float32", axes))
        largest = max(shapes, key=lambda held: held.bytes)
        yield from [largest] * self.facts.moments
        kernels = [held for held in weights if "/kernel_int" in held.name]
        if kernels:
            widest = max(kernels, key=lambda held: held.size)
            rows = widest.shape[0] * (2 if widest.name.endswith("int4") else 1)
            for dtype in ("float32", self.dtype):
                yield Held(SCRATCH, "widened kernel", (rows, widest.shape[1]), dtype)


def _head_declines(dtype: str) -> str | None:
    """Returns the reason for which the head holds all logits; None if it works by tiles."""
    hidden, labels = keras.ops.zeros((1, 8), dtype), keras.ops.zeros((1,), "int32")
    weights = keras.ops.zeros((1,), "float32")
    return ops.linear_cross_entropy.declines(hidden, hidden, labels, weights)
