"""Memory of a training step besides weights: activations, the head, and scratch."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import keras

from kmodels import ops
from kmodels.core.dispatch import backend_module
from kmodels.layers import remat
from kmodels.memory.sizes import (
    ACTIVATIONS,
    HEAD,
    SCRATCH,
    TRAINED,
    BlockSizes,
    Facts,
    FactsBackend,
    Held,
    Setup,
    Sizes,
)
from kmodels.ops.linear_cross_entropy import tile_of
from kmodels.overrides.blocks import blocks

# Queries that attention by blocks takes at a time, about.
BLOCK = 128
# The linear layers that read the same array.
READERS = {
    "attention_input": ("attention/query", "attention/key", "attention/value"),
    "attention_output": ("attention/output",),
    "mlp_input": ("mlp/gate", "mlp/up"),
    "mlp_hidden": ("mlp/down",),
}


def facts(accelerator: bool = False) -> Facts:
    """Returns those of the backend in use, on what this process has or on an accelerator."""
    engine = backend_module("kmodels.memory.facts", FactsBackend)
    return engine.ACCELERATOR if accelerator else engine.FACTS


def of_step(weights: Sequence[Held], sizes: Sizes, setup: Setup) -> Iterator[Held]:
    """Yields the arrays of one step.

    Args:
        weights: weights of the model.
        sizes: sizes of its blocks.
        setup: the step.

    Yields:
        The arrays that the blocks keep, then those of the head, then those that come and go.
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
        """Returns a number per token and channel; `axis` says what the channels are."""
        shape = (self.setup.batch_size, self.tokens, width)
        return Held(part, name, shape, dtype or self.dtype, ("batch", None, axis))

    def heads(self, name: str, count: int, width: int, dtype: str | None = None) -> Held:
        """Returns a vector of this width per token and head."""
        shape = (self.setup.batch_size, self.tokens, count, width)
        return Held(ACTIVATIONS, name, shape, dtype or self.dtype, ("batch", None, "heads", None))

    def learns(self, index: int, trained: Collection[str]) -> bool:
        """Returns whether a block holds a trained weight."""
        return any(f"/block_{index}/" in f"/{path}/" for path in trained)

    def block(self, index: int, trained: Collection[str]) -> Iterator[Held]:
        """Yields what one block keeps for the backward pass."""
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
        """Yields what goes to the experts of each token and comes from them."""
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
        """Yields a norm's input, and what the backend keeps beside."""
        yield self.wide(name, width)
        for number in range(self.norms):
            yield self.wide(f"{name}/norm_{number}", width, "float32")

    def attention(self, name: str, block: BlockSizes) -> Iterator[Held]:
        """Yields queries, keys, values, and the weights where the kernel does not do without."""
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
            # Kernels want as many keys as queries.
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
        """Tells whether all attention weights are kept ("plain"), those within blocks, or none."""
        causal, dropout = self.sizes.causal, block.attention_dropout
        x = keras.ops.zeros((1, self.tokens, 1, block.head_dim), self.dtype)
        drawn = {"dropout": dropout, "seed": keras.random.SeedGenerator(0)} if dropout else {}
        options = {"causal": causal, "soft_cap": block.soft_cap, **drawn}
        if ops.attention.declines(x, x, x, **options) is not None:
            return "plain"
        if self.facts.attention is not None:
            return self.facts.attention
        engine = backend_module("kmodels.memory.facts", FactsBackend)
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
        # A device scores its own words, where they are cut.
        yield self.wide("head/scores", tile, "float32", HEAD, "vocab")
        yield self.wide("head/tile", tile, self.dtype, HEAD, "vocab")
        for copy in range(self.facts.table):
            shape = (sizes.vocabulary, sizes.width)
            yield Held(HEAD, f"head/table_{copy}", shape, self.dtype)
        # The loss takes the adapter of an output layer as more columns of the table.
        for rank in (held.shape[0] for held in _trained(weights, "token_embedding/reverse_lora_b")):
            shape = (sizes.vocabulary, sizes.width + rank)
            for name in ("widened_table", "gradient_of_table"):
                yield Held(HEAD, f"head/{name}", shape, self.dtype)

    def moments(self, weights: Sequence[Held]) -> Iterator[Held]:
        """Yields what lives for a moment in the backward pass of a block."""
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
    """Returns why the head holds all logits; None where it goes by tiles."""
    hidden, labels = keras.ops.zeros((1, 8), dtype), keras.ops.zeros((1,), "int32")
    weights = keras.ops.zeros((1,), "float32")
    return ops.linear_cross_entropy.declines(hidden, hidden, labels, weights)
