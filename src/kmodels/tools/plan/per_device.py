"""The part of a step that each device of a mesh holds, and the traffic between the devices.

A ring moves an array of S bytes over n devices with (n-1)/n S bytes sent by each for an all-gather
or a reduce-scatter, and twice that for an all-reduce (Patarasuk & Yuan 2009). Which arrays move:

- `data` has each device reduce its gradients: one all-reduce of them.
- `fsdp` (Rajbhandari et al. 2020, section 7.2.2) gathers weights for the forward pass and again for
  the backward pass, and reduces gradients to the shard of each device. Gradients of unsharded
  weights are reduced as on `data`. XLA keeps gathered weights instead of gathering again, except
  in blocks with gradient checkpointing.
- `model` (Shoeybi et al. 2019, section 3) sums the results of heads and MLPs on different devices,
  in each block twice forward and twice backward; a sharded vocabulary costs one sum before the
  blocks, one after them, and four numbers per token for the loss.

Small messages, such as metrics and norms of gradients, are not counted.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from kmodels.core.runtime import width_of
from kmodels.distribution import layout
from kmodels.distribution.mesh import Mesh
from kmodels.models.blocks.sizes import Sizes
from kmodels.tools.plan.estimate import (
    FROZEN,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    TRAINED,
    Setup,
    StepArray,
    facts,
)

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


def share(array: StepArray, mesh: Mesh) -> StepArray:
    """Returns the part of an array on one device.

    Variables, gradients and slots are sharded by `distribution.layout`; rows over `data` and
    `fsdp`; heads, MLPs and vocabulary of activations over `model`, like their weights.
    """
    if array.part == OPTIMIZER:
        slots, *shape = array.shape
        one = share(replace(array, part=TRAINED, shape=tuple(shape)), mesh)
        return replace(array, shape=(slots, *one.shape))
    if array.part in (*WEIGHTS, GRADIENTS):
        axes = layout.axes(array.name, array.shape, mesh, array.granularity, array.family)
        lengths = [mesh.lengths[axis] if axis else 1 for axis in axes]
    else:
        words = array.axes or (None,) * len(array.shape)
        lengths = [_length(word, mesh) for word in words]
    # An indivisible dimension is not sharded; `layout.axes` ensures that for variables.
    shape = tuple(
        size // length if size % length == 0 else size
        for size, length in zip(array.shape, lengths, strict=True)
    )
    return replace(array, shape=shape)


def _length(word: str | None, mesh: Mesh) -> int:
    if word == "batch":
        return mesh.replicas
    return mesh.lengths[layout.MESH_AXES[word]] if word else 1


def gathered(arrays: Iterable[StepArray], mesh: Mesh, setup: Setup) -> list[StepArray]:
    """Returns the arrays that `fsdp` gathers on each device.

    The weights of a block are whole while it is computed, in the compute dtype, and those of the
    next are prefetched; its gradients are whole until they are reduced and scattered. Weights that
    are not freed in between stay from the forward to the backward pass.
    """
    if mesh.fsdp == 1:
        return []
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    whole = replace(mesh, fsdp=1)
    constant = 0
    weights: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for one in (
        array for array in arrays if array.part in WEIGHTS and on_axis(array, mesh, "fsdp")
    ):
        group, there = group_of(one.name), share(one, whole)
        size = replace(there, dtype=dtype).bytes
        if gathers_again(one.name, setup):
            weights[group] = weights.get(group, 0) + size
        else:
            constant += size
        if one.part == TRAINED:
            gradients[group] = gradients.get(group, 0) + there.bytes
    in_turn = [weights[group] for group in sorted(weights)]
    together = [here + following for here, following in itertools.pairwise(in_turn)]
    sizes = {
        "weights kept": constant,
        "weights of two blocks": max(together or in_turn, default=0),
        "gradients of a block": max(gradients.values(), default=0),
    }
    return [StepArray(GATHERED, name, (size,), "int8") for name, size in sizes.items() if size]


def gathers_again(path: str, setup: Setup) -> bool:
    """Returns True if a weight is gathered for the forward and again for the backward pass."""
    if facts(setup.accelerator).gathers_again:
        return True
    inside = "" if setup.remat == "block" else f"/{setup.remat}/"
    return setup.remat != "none" and group_of(path) >= 0 and inside in path


def group_of(path: str) -> int:
    """Returns the block that a variable belongs to, -1 for those outside of all blocks."""
    match = _BLOCK.search(path)
    return int(match[1]) if match else -1


def on_axis(array: StepArray, mesh: Mesh, axis: str) -> bool:
    """Returns True if a variable is sharded along an axis of the mesh."""
    return axis in layout.axes(array.name, array.shape, mesh, array.granularity, array.family)


def on_device(arrays: Sequence[StepArray], mesh: Mesh, setup: Setup) -> list[StepArray]:
    """Returns the arrays of a step on one device: its shards and gathered arrays."""
    return [share(array, mesh) for array in arrays] + gathered(arrays, mesh, setup)


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


def exchanges(
    arrays: Sequence[StepArray], sizes: Sizes, setup: Setup, mesh: Mesh
) -> list[Exchange]:
    """Returns the messages of a step that are not empty, by axis."""
    messages = [
        *_gradients(arrays, mesh),
        *_weights(arrays, setup, mesh),
        *_inside(arrays, sizes, setup, mesh),
    ]
    return [one for one in messages if one.size and one.devices > 1]


def _bytes(arrays: Sequence[StepArray], mesh: Mesh, dtype: str | None = None) -> int:
    return sum(replace(share(array, mesh), dtype=dtype or array.dtype).bytes for array in arrays)


def _gradients(arrays: Sequence[StepArray], mesh: Mesh) -> Iterator[Exchange]:
    trained = [array for array in arrays if array.part == TRAINED]
    cut = [array for array in trained if on_axis(array, mesh, "fsdp")]
    whole = [array for array in trained if array not in cut]
    unparted = replace(mesh, fsdp=1)
    yield Exchange("data", "all-reduce", "gradients", _bytes(cut, mesh), mesh.data, RING)
    lengths = {"data": mesh.data, "fsdp": mesh.fsdp}
    over = "+".join(axis for axis, length in lengths.items() if length > 1) or "data"
    what = "gradients of unsharded weights" if mesh.fsdp > 1 else "gradients"
    yield Exchange(over, "all-reduce", what, _bytes(whole, mesh), mesh.replicas, RING)
    size = _bytes(cut, unparted)
    yield Exchange("fsdp", "reduce-scatter", "gradients", size, mesh.fsdp, ZERO)


def _weights(arrays: Sequence[StepArray], setup: Setup, mesh: Mesh) -> Iterator[Exchange]:
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    unparted = replace(mesh, fsdp=1)
    cut = [weight for weight in arrays if weight.part in WEIGHTS and on_axis(weight, mesh, "fsdp")]
    # A table is read before the blocks, and after them for the logits.
    tables = [
        weight
        for weight in cut
        if "vocab" in (layout.dimensions(weight.name, len(weight.shape), weight.family) or ())
        and gathers_again(weight.name, setup)
    ]
    first = first_learned(arrays)
    # A tiled head with a frozen table computes its gradient together with the loss.
    once = setup.lora is not None and not any(weight.name == "head/logits" for weight in arrays)
    back = [
        weight
        for weight in cut
        if gathers_again(weight.name, setup)
        and (group_of(weight.name) >= first if group_of(weight.name) >= 0 else not once)
    ]
    for what, sent in (("weights, forward", cut + tables), ("weights, backward", back)):
        size = _bytes(sent, unparted, dtype)
        yield Exchange("fsdp", "all-gather", what, size, mesh.fsdp, ZERO)


def first_learned(arrays: Sequence[StepArray]) -> int:
    """Returns the first block that the backward pass reaches; -1 if it goes below all blocks."""
    return min((group_of(array.name) for array in arrays if array.part == TRAINED), default=-1)


def _inside(
    arrays: Sequence[StepArray], sizes: Sizes, setup: Setup, mesh: Mesh
) -> Iterator[Exchange]:
    """Yields the all-reduces over `model` inside layers."""
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    tokens = setup.batch_size // mesh.replicas * (sizes.tokens or setup.sequence_length)
    hidden = tokens * sizes.width * width_of(dtype)
    first = first_learned(arrays)
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
        array.shape[1] if array.name.endswith("lora_a") else array.shape[0]
        for array in arrays
        if array.part == TRAINED
        and array.name.endswith(("lora_a", "lora_b"))
        and on_axis(array, mesh, "model")
        and len(array.shape) == 2  # those of experts are whole on their device
    ]
    yield sums("inside adapters", sum(ranks) * tokens * width_of(dtype))
    if sizes.vocabulary is not None and sizes.vocabulary % mesh.model == 0:
        yield sums("embeddings of the tokens", hidden)
        yield sums("gradient of the head", hidden)
        # The largest logit for the loss and for the accuracy, the sum, and the logit of the label.
        yield sums("loss", tokens * 4 * width_of("float32"))
