"""The share of a step's arrays that one device of a mesh holds."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import keras

from kmodels.distribution import layout
from kmodels.distribution.mesh import Mesh
from kmodels.memory.activations import facts
from kmodels.memory.sizes import FROZEN, GATHERED, GRADIENTS, OPTIMIZER, TRAINED, Held, Setup

WEIGHTS = (FROZEN, TRAINED)
_BLOCK = re.compile(r"(?:^|/)block_(\d+)/")


def share(held: Held, mesh: Mesh) -> Held:
    """Returns the part of an array that lies on one device.

    Variables, their gradients and slots lie by `distribution.layout`; rows over `data` and `fsdp`;
    heads, MLPs and words of activations over `model`, as the weights that make them.
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
    # A dimension that a length does not divide stays whole; `layout.axes` sees to it for variables.
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
    """Returns what `fsdp` brings together for a moment, on each device.

    The weights of a block are whole while it is computed, in the compute dtype, and those of the
    next are on their way; its gradients are whole until they are reduced and parted. Weights that
    are not let go in between stay from the forward to the backward pass.
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
    """Returns whether a weight is gathered for the forward and again for the backward pass."""
    if facts(setup.accelerator).gathers_again:
        return True
    inside = "" if setup.remat == "block" else f"/{setup.remat}/"
    return setup.remat != "none" and group_of(path) >= 0 and inside in path


def group_of(path: str) -> int:
    """Returns the block that a variable belongs to, -1 for those outside of all blocks."""
    found = _BLOCK.search(path)
    return int(found[1]) if found else -1


def on_axis(held: Held, mesh: Mesh, axis: str) -> bool:
    """Returns whether a variable lies in parts along an axis of the mesh."""
    return axis in layout.axes(held.name, held.shape, mesh, held.granularity, held.family)


def on_device(held: Sequence[Held], mesh: Mesh, setup: Setup) -> list[Held]:
    """Returns what a device holds of a step: its parts, and what it gathers."""
    return [share(h, mesh) for h in held] + gathered(held, mesh, setup)
