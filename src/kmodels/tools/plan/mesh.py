"""The part of a step that each device of a mesh holds, and the traffic between the devices.

A ring moves an array of S bytes over n devices with (n-1)/n S bytes sent by each for an all-gather
or a reduce-scatter, and twice that for an all-reduce (Patarasuk & Yuan 2009). Which arrays move:

- `data` has each device reduce its gradients: one all-reduce of them.
- `fsdp` (Rajbhandari et al. 2020, section 7.2.2) gathers weights for the forward pass and again for
  the backward pass, and reduces gradients to the parts that each device keeps. Weights that are not
  cut are reduced as on `data`. XLA keeps what it gathered instead of gathering again, but for
  blocks that are rematerialised.
- `model` (Shoeybi et al. 2019, section 3) sums what heads and MLPs on different devices found, in
  each block twice forward and twice backward; words that lie apart cost one sum in front of the
  blocks, one behind them, and four numbers a token for the loss.

Small messages, such as metrics and norms of gradients, are not counted.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from kmodels.distribution import layout
from kmodels.distribution.mesh import Mesh
from kmodels.models.common.sizes import Sizes
from kmodels.tools.plan.arrays import (
    FROZEN,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    TRAINED,
    Held,
    Setup,
    width_of,
)
from kmodels.tools.plan.estimate import facts

RING = "Patarasuk & Yuan 2009"
ZERO = "Rajbhandari et al. 2020, 7.2.2"
MEGATRON = "Shoeybi et al. 2019, 3"
FORMULAS = {
    "all-reduce": "2 (n-1)/n S",
    "all-gather": "(n-1)/n S",
    "reduce-scatter": "(n-1)/n S",
}
WEIGHTS = (FROZEN, TRAINED)
_BLOCK = re.compile(r"(?:^|/)block_(\d+)/")


def share(held: Held, mesh: Mesh) -> Held:
    """Returns the part of an array on one device.

    Variables, gradients and slots are sharded by `distribution.layout`; rows over `data` and
    `fsdp`; heads, MLPs and vocabulary of activations over `model`, like their weights.
    """
    if held.part == OPTIMIZER:
        slots, *shape = held.shape
        one = share(replace(held, part=TRAINED, shape=tuple(shape)), mesh)
        return replace(held, shape=(slots, *one.shape))
    if held.part in (*WEIGHTS, GRADIENTS):
        axes = layout.axes(held.name, held.shape, mesh, held.granularity, held.family)
        lengths = [mesh.lengths[axis] if axis else 1 for axis in axes]
    else:
        words = held.axes or (None,) * len(held.shape)
        lengths = [_length(word, mesh) for word in words]
    # An indivisible dimension is not sharded; `layout.axes` ensures that for variables.
    shape = tuple(
        size // length if size % length == 0 else size
        for size, length in zip(held.shape, lengths, strict=True)
    )
    return replace(held, shape=shape)


def _length(word: str | None, mesh: Mesh) -> int:
    if word == "batch":
        return mesh.replicas
    return mesh.lengths[layout.MESH_AXES[word]] if word else 1


def gathered(held: Iterable[Held], mesh: Mesh, setup: Setup) -> list[Held]:
    """Returns the arrays that `fsdp` gathers on each device.

    The weights of a block are whole while it is computed, in the compute dtype, and those of the
    next are prefetched; its gradients are whole until they are reduced and scattered. Weights that
    are not freed in between stay from the forward to the backward pass.
    """
    if mesh.fsdp == 1:
        return []
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    whole = replace(mesh, fsdp=1)
    kept = 0
    weights: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for one in (h for h in held if h.part in WEIGHTS and on_axis(h, mesh, "fsdp")):
        group, there = group_of(one.name), share(one, whole)
        size = replace(there, dtype=dtype).bytes
        if gathers_again(one.name, setup):
            weights[group] = weights.get(group, 0) + size
        else:
            kept += size
        if one.part == TRAINED:
            gradients[group] = gradients.get(group, 0) + there.bytes
    in_turn = [weights[group] for group in sorted(weights)]
    together = [here + following for here, following in itertools.pairwise(in_turn)]
    found = {
        "weights kept": kept,
        "weights of two blocks": max(together or in_turn, default=0),
        "gradients of a block": max(gradients.values(), default=0),
    }
    return [Held(GATHERED, name, (size,), "int8") for name, size in found.items() if size]


def gathers_again(path: str, setup: Setup) -> bool:
    """Returns True if a weight is gathered for the forward and again for the backward pass."""
    if facts(setup.accelerator).gathers_again:
        return True
    inside = "" if setup.remat == "block" else f"/{setup.remat}/"
    return setup.remat != "none" and group_of(path) >= 0 and inside in path


def group_of(path: str) -> int:
    """Returns the block that a variable belongs to, -1 for those outside of all blocks."""
    found = _BLOCK.search(path)
    return int(found[1]) if found else -1


def on_axis(held: Held, mesh: Mesh, axis: str) -> bool:
    """Returns True if a variable is sharded along an axis of the mesh."""
    return axis in layout.axes(held.name, held.shape, mesh, held.granularity, held.family)


def on_device(held: Sequence[Held], mesh: Mesh, setup: Setup) -> list[Held]:
    """Returns the arrays of a step on one device: its shards and gathered arrays."""
    return [share(h, mesh) for h in held] + gathered(held, mesh, setup)


@dataclass(frozen=True)
class Exchange:
    """One kind of message over one axis.

    Args:
        axis: axis of the mesh, or several joined by "+".
        kind: a key of `FORMULAS`.
        what: name of the sent arrays.
        size: S, bytes of all arrays, each whole along the axis.
        devices: n, along the axis.
        source: publication that explains why these arrays have to be sent.
    """

    axis: str
    kind: str
    what: str
    size: int
    devices: int
    source: str

    @property
    def bytes(self) -> int:
        """The bytes that each device sends, and receives, in a step."""
        times = 2 if self.kind == "all-reduce" else 1
        return times * self.size * (self.devices - 1) // self.devices

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        names = ("axis", "kind", "what", "devices", "size", "bytes", "source")
        return {name: getattr(self, name) for name in names} | {"formula": FORMULAS[self.kind]}


def exchanges(held: Sequence[Held], sizes: Sizes, setup: Setup, mesh: Mesh) -> list[Exchange]:
    """Returns the messages of a step.

    Args:
        held: arrays of the step, whole.
        sizes: sizes of the blocks.
        setup: the step.
        mesh: the devices.

    Returns:
        The messages that are not empty, by axis.
    """
    found = [
        *_gradients(held, mesh),
        *_weights(held, setup, mesh),
        *_inside(held, sizes, setup, mesh),
    ]
    return [one for one in found if one.size and one.devices > 1]


def _bytes(arrays: Sequence[Held], mesh: Mesh, dtype: str | None = None) -> int:
    return sum(replace(share(h, mesh), dtype=dtype or h.dtype).bytes for h in arrays)


def _gradients(held: Sequence[Held], mesh: Mesh) -> Iterator[Exchange]:
    trained = [h for h in held if h.part == TRAINED]
    cut = [h for h in trained if on_axis(h, mesh, "fsdp")]
    whole = [h for h in trained if h not in cut]
    unparted = replace(mesh, fsdp=1)
    yield Exchange("data", "all-reduce", "gradients", _bytes(cut, mesh), mesh.data, RING)
    lengths = {"data": mesh.data, "fsdp": mesh.fsdp}
    over = "+".join(axis for axis, length in lengths.items() if length > 1) or "data"
    what = "gradients of uncut weights" if mesh.fsdp > 1 else "gradients"
    yield Exchange(over, "all-reduce", what, _bytes(whole, mesh), mesh.replicas, RING)
    size = _bytes(cut, unparted)
    yield Exchange("fsdp", "reduce-scatter", "gradients", size, mesh.fsdp, ZERO)


def _weights(held: Sequence[Held], setup: Setup, mesh: Mesh) -> Iterator[Exchange]:
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    unparted = replace(mesh, fsdp=1)
    cut = [h for h in held if h.part in WEIGHTS and on_axis(h, mesh, "fsdp")]
    # A table is read before the blocks, and after them for the logits.
    tables = [
        h
        for h in cut
        if "vocab" in (layout.dimensions(h.name, len(h.shape), h.family) or ())
        and gathers_again(h.name, setup)
    ]
    first = first_learned(held)
    # A tiled head with a frozen table computes its gradient together with the loss.
    once = setup.lora is not None and not any(h.name == "head/logits" for h in held)
    back = [
        h
        for h in cut
        if gathers_again(h.name, setup)
        and (group_of(h.name) >= first if group_of(h.name) >= 0 else not once)
    ]
    for what, arrays in (("weights, forward", cut + tables), ("weights, backward", back)):
        size = _bytes(arrays, unparted, dtype)
        yield Exchange("fsdp", "all-gather", what, size, mesh.fsdp, ZERO)


def first_learned(held: Sequence[Held]) -> int:
    """Returns the first block that the backward pass reaches; -1 if it goes below all blocks."""
    return min((group_of(h.name) for h in held if h.part == TRAINED), default=-1)


def _inside(held: Sequence[Held], sizes: Sizes, setup: Setup, mesh: Mesh) -> Iterator[Exchange]:
    """Yields the all-reduces over `model` inside layers."""
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    tokens = setup.batch_size // mesh.replicas * (sizes.tokens or setup.sequence_length)
    hidden = tokens * sizes.width * width_of(dtype)
    first = first_learned(held)
    attention = [int(block.heads % mesh.model == 0) for block in sizes.blocks]
    mlp = [int(block.mlp_dim % mesh.model == 0) for block in sizes.blocks]
    learned = range(max(first, 0), sizes.layers)
    # The input of the first trained block needs no gradient.
    backward = sum(attention[i] + mlp[i] for i in learned)
    backward -= attention[first] if 0 <= first < sizes.layers else 0
    forward = sum(attention) + sum(mlp)
    if setup.remat == "block":
        # The last sum of a block is its result, which only a following norm needs again.
        forward += sum(attention[i] + mlp[i] * sizes.blocks[i].post_norms for i in learned)

    def sums(what: str, size: int) -> Exchange:
        return Exchange("model", "all-reduce", what, size, mesh.model, MEGATRON)

    yield sums("hidden states, forward", forward * hidden)
    yield sums("hidden states, backward", backward * hidden)
    whole = [
        2 * tokens * sizes.blocks[i].groups * sizes.blocks[i].head_dim * width_of(dtype)
        for i in learned
        if attention[i] and sizes.blocks[i].groups % mesh.model
    ]
    if whole:
        yield sums("gradients of keys and values that are whole", sum(whole))
    ranks = [
        h.shape[1] if h.name.endswith("lora_a") else h.shape[0]
        for h in held
        if h.part == TRAINED
        and h.name.endswith(("lora_a", "lora_b"))
        and on_axis(h, mesh, "model")
        and len(h.shape) == 2  # those of experts are whole on their device
    ]
    yield sums("inside adapters", sum(ranks) * tokens * width_of(dtype))
    if sizes.vocabulary is not None and sizes.vocabulary % mesh.model == 0:
        yield sums("embeddings of the tokens", hidden)
        yield sums("gradient of the head", hidden)
        # The largest logit for the loss and for the accuracy, the sum, and the logit of the label.
        yield sums("loss", tokens * 4 * width_of("float32"))
