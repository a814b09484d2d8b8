"""The arrays of a checkpoint, by file: how they are named, written and found again.

A run of one process writes `model.safetensors`. Each of several writes what it holds to files of
its own, `model-00001-0.safetensors`: number of the process, then of the part, since a process with
several devices may hold several parts of an array. What differs between processes, such as states
of random generators, is called `process_00001/...` in them.

In memory a part is called `name@start`, as in "block_0/mlp/up/kernel@0,32".
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kmodels.core.errors import InputError
from kmodels.distribution import processes
from kmodels.weights.parts import Start, read_parts, write_parts
from kmodels.weights.tensors import LazyArray

Arrays = dict[str, np.ndarray]
PARTS = ("model", "optimizer", "metrics", "other")
_FILE = re.compile(rf"({'|'.join(PARTS)})(-\d{{5}}-\d+)?\.safetensors")
_START = re.compile(r"@([\d,]*)$")
_PROCESS = re.compile(r"process_(\d{5})/")


def part_name(name: str, start: Start) -> str:
    """Returns what a part of an array is called in memory."""
    return f"{name}@{','.join(map(str, start))}"


def here(name: str) -> str:
    """Returns what is called so in each process, but differs."""
    return name if processes.count() == 1 else f"process_{processes.index():05d}/{name}"


def replace(arrays: Arrays, new: Arrays) -> Arrays:
    """Returns the arrays of this process with others in the place of those of the same names.

    Args:
        arrays: whole ones by name, parts by `part_name`.
        new: whole ones by name, in every process; the first one writes them.
    """
    kept = {name: values for name, values in arrays.items() if _split(name)[0] not in new}
    return kept | (new if processes.is_rank_zero() else {})


def _split(full: str) -> tuple[str, Start | None]:
    """Returns name and begin of a part, or of a whole array None."""
    match = _START.search(full) if processes.count() > 1 else None
    if match is None:
        return full, None
    return full[: match.start()], tuple(int(n) for n in match[1].split(",") if n)


def part_of(file: str) -> str | None:
    """Returns the part of a checkpoint that a file of this name holds, or None."""
    match = _FILE.fullmatch(file)
    return match[1] if match else None


def write(folder: Path, part: str, arrays: Mapping[str, np.ndarray]) -> list[Path]:
    """Writes what this process holds.

    Args:
        folder: of the checkpoint.
        part: one of `PARTS`.
        arrays: whole ones by name, parts by `part_name`.

    Returns:
        The files.
    """
    # A file holds one part of an array, as in the format that others read too.
    files: list[dict[str, tuple[Start, np.ndarray]]] = [{}] if processes.is_rank_zero() else []
    for full, values in arrays.items():
        name, start = _split(full)
        free = next((file for file in files if name not in file), None)
        if free is None:
            files.append(free := {})
        free[name] = (0,) * values.ndim if start is None else start, values
    several = processes.count() > 1
    paths = []
    for number, file in enumerate(files):
        end = f"-{processes.index():05d}-{number}" if several else ""
        paths.append(folder / f"{part}{end}.safetensors")
        write_parts(paths[-1], file)
    return paths


def read(path: Path, part: str) -> dict[str, LazyArray]:
    """Returns the whole arrays of a part, with this process's own where they differ.

    Where the run has another number of processes now, random generators are those of a former
    process. Of running averages the sum over the processes is what it was, of accumulated gradients
    the mean.

    Args:
        path: of the checkpoint, verified.
        part: one of `PARTS`.

    Raises:
        InputError: for files that are damaged.
    """
    files = sorted(file for file in path.iterdir() if part_of(file.name) == part)
    if not files:
        raise InputError(f"{path} has no {part}.safetensors; use another checkpoint")
    found: dict[str, LazyArray] = {}
    differ: dict[str, list[LazyArray]] = {}
    for name, array in read_parts(files).items():
        if (match := _PROCESS.match(name)) is None:
            found[name] = array
        else:  # In the order of the processes, since names are sorted.
            differ.setdefault(name[match.end() :], []).append(array)
    index, count = processes.index(), processes.count()
    for name, arrays in differ.items():
        if part == "metrics":
            found[name] = _sum(arrays[index::count], arrays[0], 1)
        elif part == "optimizer" and len(arrays) != count:
            found[name] = _sum(arrays, arrays[0], len(arrays))
        else:
            found[name] = arrays[index % len(arrays)]
    return found


def _sum(arrays: list[LazyArray], like: LazyArray, parts: int) -> LazyArray:
    def add() -> np.ndarray:
        total = np.zeros(like.shape, like.dtype)
        for array in arrays:
            total += array.read() / parts if parts > 1 else array.read()
        return total

    return LazyArray(like.shape, like.dtype, add)
