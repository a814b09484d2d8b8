"""Adapters of experts in PEFT's files, where they stand beside one tensor of all experts.

PEFT wraps the module of the tensor. Where two tensors of a module have adapters, it wraps it twice:
the first one's wrapper is the inner one, and the tensors of both are told apart by that alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kmodels.layers import GroupedDense

INNER = ".base_layer"


def end(name: str) -> str:
    """Returns module and tensor alone, such as "experts.down_proj"."""
    return ".".join(name.split(".")[-2:])


def modules(names: Iterable[str]) -> dict[str, str]:
    """Returns the module in a file for the name of each tensor that has an adapter.

    Args:
        names: such as "layers.0.experts.down_proj", in the order in which their module has them.
    """
    held: dict[str, list[str]] = {}
    for name in names:
        held.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + INNER * (len(tensors) - 1 - place)
        for module, tensors in held.items()
        for place, name in enumerate(tensors)
    }


def named(names: Iterable[str], targets: Sequence[str]) -> dict[str, str]:
    """Returns the tensor's name for each module in a file that adapts these targets."""
    found = [name for name in names if any(name == t or name.endswith(f".{t}") for t in targets)]
    return {module: name for name, module in modules(found).items()}


def shapes(layer: GroupedDense, rank: int) -> list[tuple[int, int]]:
    """Returns the shapes of the two matrices in a file: all experts side by side."""
    rows = rank * layer.groups
    return [(rows, layer.input_dim), (layer.units, rows)]


def to_file(array: np.ndarray, first: bool) -> np.ndarray:
    """(E, in, rank) -> (E * rank, in) for the first matrix, (E, rank, out) -> (out, rank * E)."""
    if first:
        return np.swapaxes(array, 1, 2).reshape(-1, array.shape[1])
    return np.transpose(array, (2, 1, 0)).reshape(array.shape[2], -1)


def from_file(array: np.ndarray, first: bool, experts: int) -> np.ndarray:
    """Undoes `to_file`."""
    if first:
        return np.swapaxes(array.reshape(experts, -1, array.shape[1]), 1, 2)
    return np.transpose(array.reshape(array.shape[0], -1, experts), (2, 1, 0))


def described(adapters: Mapping[str, Any], experts: Iterable[str]) -> list[str]:
    """Returns what adapter_config.json calls `target_parameters`.

    Args:
        adapters: by the name of their tensor or module.
        experts: names of all tensors of experts.
    """
    names = list(experts)
    ends = {name: end(name) for name in names if name in adapters}
    unclear = any(end(name) in ends.values() for name in names if name not in adapters)
    return sorted(ends) if unclear else sorted(set(ends.values()))
