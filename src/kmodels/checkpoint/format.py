"""The files and names of the arrays of a checkpoint; `manager` lists all files of one.

A run of one process writes `model.safetensors`. Each of several processes writes the parts that it
holds to `model-00001-0.safetensors`: number of the process, then of the part, since a process with
several devices may hold several parts of an array. Arrays that differ between processes, such as
states of random generators, are called `process_00001/...` in them.

In memory a part is called `name@start`, as in "block_0/mlp/up/kernel@0,32".

The state of a loader, nested plain values, is saved as JSON in an array, which names other arrays.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kmodels.core import processes
from kmodels.core.errors import InputError
from kmodels.weights.files import (
    Start,
    read_parts,
    read_safetensors,
    write_parts,
    write_safetensors,
)
from kmodels.weights.tensors import LazyArray

Arrays = dict[str, np.ndarray]
T = TypeVar("T")
PARTS = ("model", "optimizer", "metrics", "other")
_FILE = re.compile(rf"({'|'.join(PARTS)})(-\d{{5}}-\d+)?\.safetensors")
# A layer's name; Keras' first number is 1, and `block_0` is a name that somebody gave.
_LAYER = re.compile(r"([^/:]+?)(?:_([1-9]\d*))?(?=[/:]|$)")
_START = re.compile(r"@([\d,]*)$")
# Marks in JSON of the values of a loader's state that JSON does not have.
_JSON = "json"
_ARRAY, _BYTES, _TENSOR, _TUPLE, _ITEMS = "array", "bytes", "tensor", "tuple", "items"
_MARKS = {_ARRAY, _BYTES, _TENSOR, _TUPLE, _ITEMS}
_PROCESS = re.compile(r"process_(\d{5})/")


def part_name(name: str, start: Start) -> str:
    """Returns the name of a part of an array in memory."""
    return f"{name}@{','.join(map(str, start))}"


def here(name: str) -> str:
    """Returns the name in the files of an array that differs between processes."""
    return name if processes.count() == 1 else f"process_{processes.index():05d}/{name}"


def replace(arrays: Arrays, new: Arrays) -> Arrays:
    """Returns the arrays of this process, those of the same names replaced by new ones.

    Args:
        arrays: whole arrays by name, parts by `part_name`.
        new: whole arrays by name, in every process; rank zero writes them.
    """
    others = {name: values for name, values in arrays.items() if _split(name)[0] not in new}
    return others | (new if processes.is_rank_zero() else {})


def _split(full: str) -> tuple[str, Start | None]:
    """Returns the name and the start of a part; a whole array has no start."""
    match = _START.search(full) if processes.count() > 1 else None
    if match is None:
        return full, None
    return full[: match.start()], tuple(int(n) for n in match[1].split(",") if n)


def part_of(file: str) -> str | None:
    """Returns the part of a checkpoint that a file of this name holds, or None."""
    match = _FILE.fullmatch(file)
    return match[1] if match else None


def write(folder: Path, part: str, arrays: Mapping[str, np.ndarray]) -> list[Path]:
    """Writes the arrays of this process, and returns the files.

    Args:
        folder: folder of the checkpoint.
        part: one of `PARTS`.
        arrays: whole arrays by name, parts by `part_name`.
    """
    if processes.count() == 1:
        path = folder / f"{part}.safetensors"
        write_safetensors(path, dict(sorted(arrays.items())), {"format": "kmodels"})
        return [path]
    # A file holds one part of an array, as in the format that others read too.
    files: list[dict[str, tuple[Start, np.ndarray]]] = [{}] if processes.is_rank_zero() else []
    for full, values in arrays.items():
        name, start = _split(full)
        free = next((file for file in files if name not in file), None)
        if free is None:
            files.append(free := {})
        free[name] = (0,) * values.ndim if start is None else start, values
    paths = []
    for number, file in enumerate(files):
        paths.append(folder / f"{part}-{processes.index():05d}-{number}.safetensors")
        write_parts(paths[-1], file)
    return paths


def read(path: Path, part: str, counted: Iterable[str] = ()) -> dict[str, LazyArray]:
    """Returns the whole arrays of a part of a checkpoint, and this process's own ones.

    If the number of processes has changed, random generators are those of a former process. Running
    averages keep their sum over the processes, and accumulated gradients their mean.

    Args:
        path: path of the checkpoint, verified.
        part: one of `PARTS`.
        counted: names of running averages that count the rows of their own process. Averages of
            all rows go to rank zero, and are zero in the others.

    Raises:
        InputError: for files that are damaged.
    """
    files = sorted(file for file in path.iterdir() if part_of(file.name) == part)
    if not files:
        raise InputError(f"{path} has no {part}.safetensors; use another checkpoint")
    arrays_by_name: dict[str, LazyArray] = {}
    differ: dict[str, list[LazyArray]] = {}
    # A run of one process wrote it; several processes number their files.
    whole = files[0].name == f"{part}.safetensors"
    for name, array in (read_safetensors(files[0]) if whole else read_parts(files)).items():
        if (match := _PROCESS.match(name)) is None:
            arrays_by_name[name] = array
        else:  # In the order of the processes, since names are sorted.
            differ.setdefault(name[match.end() :], []).append(array)
    index, count = processes.index(), processes.count()
    for name in arrays_by_name.keys() & set(counted) if index > 0 else ():
        arrays_by_name[name] = _sum([], arrays_by_name[name], 1)
    for name, arrays in differ.items():
        if part == "metrics":
            arrays_by_name[name] = _sum(arrays[index::count], arrays[0], 1)
        elif part == "optimizer" and len(arrays) != count:
            arrays_by_name[name] = _sum(arrays, arrays[0], len(arrays))
        else:
            arrays_by_name[name] = arrays[index % len(arrays)]
    return arrays_by_name


def _sum(arrays: list[LazyArray], like: LazyArray, parts: int) -> LazyArray:
    def add() -> np.ndarray:
        total = np.zeros(like.shape, like.dtype)
        for array in arrays:
            total += array.read() / parts if parts > 1 else array.read()
        return total

    return LazyArray(like.shape, like.dtype, add)


def arrays_of_data(state: Any) -> Arrays:
    """Returns the state of a loader as arrays by name, one of them JSON; {} for None."""
    if state is None:
        return {}
    arrays: Arrays = {}
    text = json.dumps(encode(state, arrays))
    return {**arrays, _JSON: np.frombuffer(text.encode(), np.uint8)}


def data_of_arrays(arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the state of a loader from its arrays."""
    if _JSON not in arrays:
        return None
    return decode(json.loads(arrays[_JSON].tobytes()), arrays)


def encode(value: Any, arrays: Arrays) -> Any:
    """Returns nested plain values as JSON values, whose arrays are added to `arrays` by a number.

    Raises:
        InputError: for a value that is not a number, string, bytes, array or nest of them.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [encode(part, arrays) for part in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encode(part, arrays) for part in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _MARKS & set(value):
            return {key: encode(part, arrays) for key, part in value.items()}
        return {_ITEMS: [[encode(k, arrays), encode(v, arrays)] for k, v in value.items()]}
    name = str(len(arrays))
    if isinstance(value, bytes):
        arrays[name] = np.frombuffer(value, np.uint8)
        return {_BYTES: name}
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "fiubV":
            arrays[name] = value
            return {_ARRAY: name}
        raise InputError(
            f"the state of the data holds an array of {value.dtype}; have state_dict() give numbers"
        )
    package = type(value).__module__.partition(".")[0]
    if hasattr(value, "detach") and importlib.util.find_spec(_module(package)):
        arrays[name] = np.array(value.detach().cpu())
        return {_TENSOR: [name, package]}
    raise InputError(
        f"the state of the data holds a {type(value).__name__}; have state_dict() give numbers, "
        "strings, bytes, arrays, lists and dictionaries"
    )


def decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the values of `encode`."""
    if isinstance(value, list):
        return [decode(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not _MARKS & set(value):
        return {key: decode(part, arrays) for key, part in value.items()}
    ((mark, content),) = value.items()
    if mark == _TUPLE:
        return tuple(decode(part, arrays) for part in content)
    if mark == _ITEMS:
        return {decode(k, arrays): decode(v, arrays) for k, v in content}
    if mark == _TENSOR:
        name, package = content
        return importlib.import_module(_module(package)).from_array(arrays[name])
    return arrays[content].tobytes() if mark == _BYTES else arrays[content]


def _module(package: str) -> str:
    """Returns the module for tensors of a package, which may be another than the backend."""
    return f"kmodels.data.tensors_{package}"


def as_counted(
    stored: Mapping[str, Mapping[str, T]], wanted: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, T]]:
    """Renames stored arrays of layers that this process counts from another number.

    Keras calls unnamed layers `dense`, `dense_1` and so on, and counts on if a cell of a notebook
    builds the same model again. All layers of one kind are counted together, so their numbers
    differ by the same amount.

    Args:
        stored: arrays by name, by part of the checkpoint.
        wanted: variables by name, by part of the checkpoint.

    Returns:
        The arrays under the names of the variables; unchanged if the names differ by more than
        such numbers.
    """
    if all(set(stored[part]) == set(names) for part, names in wanted.items()):
        return stored
    before = _lowest(name for arrays in stored.values() for name in arrays)
    now = _lowest(name for arrays in wanted.values() for name in arrays)
    if before.keys() != now.keys():
        return stored
    move = _moved({kind: now[kind] - number for kind, number in before.items()})
    moved = {
        part: {move(name): arrays for name, arrays in of.items()} for part, of in stored.items()
    }
    same = all(set(moved[part]) == set(names) for part, names in wanted.items())
    return moved if same else stored


def from_first(arrays: Mapping[str, T]) -> dict[str, T]:
    """Renames layers as if the process had made none of their kind before."""
    move = _moved({kind: -number for kind, number in _lowest(arrays).items()})
    return {move(name): value for name, value in arrays.items()}


def _lowest(names: Iterable[str]) -> dict[str, int]:
    """Returns the lowest number of each kind of layer; a name without a number is number 0."""
    lowest: dict[str, int] = {}
    for name in names:
        for kind, number in _LAYER.findall(name):
            lowest[kind] = min(lowest.get(kind, int(number or 0)), int(number or 0))
    return lowest


def _moved(by: Mapping[str, int]) -> Callable[[str], str]:
    """Returns a function that adds to the numbers in a name."""

    def word(match: re.Match[str]) -> str:
        number = int(match[2] or 0) + by[match[1]]
        return f"{match[1]}_{number}" if number else match[1]

    return lambda name: _LAYER.sub(word, name)
