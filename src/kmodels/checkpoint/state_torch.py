"""Sharded tensors, the `DTensor`s of FSDP2, and torch's random generator of the host."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from kmodels.weights.files import Start
from kmodels.weights.host_torch import to_numpy
from kmodels.weights.tensors import LazyArray


def is_placed(variable: Any) -> bool:
    """See `StateBackend`."""
    return isinstance(variable.value, DTensor)


def parts(variable: Any) -> Iterator[tuple[Start, np.ndarray]]:
    """See `StateBackend`: of ranks with equal parts, the first one's."""
    start, sizes, is_first = _place(variable.value)
    if is_first and 0 not in sizes:
        yield start, np.array(to_numpy(variable.value.to_local().detach().cpu()))


def read(variable: Any, array: LazyArray) -> torch.Tensor:
    """See `StateBackend`."""
    start, sizes, _ = _place(variable.value)
    index = tuple(slice(a, a + size) for a, size in zip(start, sizes, strict=True))
    values = np.array(array.part(index), dtype=array.dtype)
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def put(variable: Any, values: torch.Tensor) -> None:
    """See `StateBackend`."""
    with torch.no_grad():
        variable.value.to_local().copy_(values)


def generators() -> dict[str, np.ndarray]:
    """See `StateBackend`: the one from which torch's data loaders draw."""
    return {"torch": np.array(torch.get_rng_state().numpy())}


def restore_generators(states: Mapping[str, np.ndarray]) -> None:
    """See `StateBackend`."""
    if "torch" in states:
        torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))


def _place(tensor: DTensor) -> tuple[Start, tuple[int, ...], bool]:
    """Returns (start, sizes, True if it is the first to hold it) of this rank's part."""
    start, sizes, is_first = [0] * tensor.ndim, list(tensor.shape), True
    for axis, placement in enumerate(tensor.placements):
        rank = tensor.device_mesh.get_local_rank(axis)
        if not placement.is_shard():
            is_first &= rank == 0
            continue
        dimension: int = placement.dim  # type: ignore[attr-defined]
        size = sizes[dimension]
        # As torch cuts: equal parts, the last ones shorter or empty.
        step = -(-size // tensor.device_mesh.size(axis))
        begin = min(rank * step, size)
        start[dimension] += begin
        sizes[dimension] = min(step, size - begin)
    return tuple(start), tuple(sizes), is_first
