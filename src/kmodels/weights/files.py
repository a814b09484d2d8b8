"""Files of tensors: safetensors, `.npz` and pickles, opened without reading the values."""

import json
import math
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kmodels.core.errors import InputError, one_line
from kmodels.core.files import check_zip, is_inside
from kmodels.core.schema import Needed, read_json
from kmodels.weights import packed
from kmodels.weights.tensors import PART, Index, LazyArray

_DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U16": np.dtype("uint16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# Those that the reader of safetensors has no NumPy type for.
_MAPPED = ("F8_E4M3", "F8_E8M0")
SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
# Key of the header of a file with parts, and key of their offsets.
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
Start = tuple[int, ...]
Part = tuple[Start, LazyArray]
# A longer header is not a model's: it looks like an attack on memory and time.
MOST_HEADER = 5_000_000


def read_safetensors(path: str | Path) -> dict[str, LazyArray]:
    """Returns the tensors of a safetensors file, or of a directory of one or several.

    Those of bitsandbytes, GPTQ, AWQ and FP8 are a `PackedArray` each.

    Raises:
        InputError: for a file that is missing, cut short, or not safetensors.
    """
    return packed.grouped(Path(path), stored_tensors(Path(path)))


def stored_tensors(path: Path) -> dict[str, LazyArray]:
    """Returns the tensors of `read_safetensors` with the parts of packed ones as they are stored.

    Raises:
        InputError: as `read_safetensors` does.
    """
    if not path.is_dir():
        return _one_safetensors(path)
    files = sorted(path.glob("*.safetensors"))
    # As in transformers, one whole file counts before the list of several, which may be left over
    # from an earlier save.
    names = [SAFE, INDEX, *(file.name for file in files if len(files) == 1)]
    names += [] if files else [PICKLED, f"{PICKLED}.index.json"]
    name = next((name for name in names if (path / name).is_file()), None)
    if name is None:
        listing = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise InputError(
            f"{path} holds no {SAFE} and no {INDEX}, but {listing}; write it again as safetensors"
        )
    read = READERS.get(Path(name).suffix)
    tensors = _sharded(path, name) if read is None else read(path / name)
    if not tensors:
        raise InputError(f"{path / name} holds no tensors; copy it again")
    return tensors


def holds_tensors(path: Path) -> bool:
    """Returns True for a directory with a file that `read_safetensors` would try to read."""
    return any(any(path.glob(files)) for files in ("*.safetensors", "pytorch_model*.bin"))


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata in the header of a safetensors file."""
    from safetensors import safe_open

    with safe_open(str(path), framework="numpy") as file:
        return file.metadata() or {}


def _one_safetensors(path: Path) -> dict[str, LazyArray]:
    from safetensors import SafetensorError, safe_open

    try:
        _check_header(path)
        file: Any = safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is not a whole safetensors file: {one_line(error)}; copy it again"
        ) from None

    def lazy(name: str) -> LazyArray:
        header = file.get_slice(name)
        if (kind := header.get_dtype()) not in _DTYPES:
            raise InputError(
                f"{path}: {name} is stored as {kind}; choose a file with "
                f"{', '.join(sorted(_DTYPES))}"
            )
        shape = tuple(header.get_shape())
        if kind in _MAPPED:
            return LazyArray(
                shape, _DTYPES[kind], lambda: np.array(memory_map(name, shape, _DTYPES[kind]))
            )
        return LazyArray(
            shape,
            _DTYPES[kind],
            lambda: read(name),
            (lambda index: read_part(name, index)) if shape else None,
            (lambda: memory_map(name, shape, _DTYPES[kind])) if shape else None,
        )

    def memory_map(name: str, shape: tuple[int, ...], kind: np.dtype) -> Any:
        size, header = _header(path)
        start = size + header[name]["data_offsets"][0]
        return np.memmap(path, kind, mode="c", offset=start, shape=shape)

    def reopened() -> Any:
        try:
            return safe_open(str(path), framework="numpy")
        except FileNotFoundError:
            return nullcontext(file)  # removed since, such as an old checkpoint by its writer

    def read(name: str) -> Any:
        # Opened again for each part: pages of a mapped file count to the process until it closes,
        # so the values would be in memory twice.
        with reopened() as once:
            header = once.get_slice(name)
            shape, kind = header.get_shape(), _DTYPES[header.get_dtype()]
            step = PART // max(math.prod(shape[1:]) * kind.itemsize, 1)
            if not shape or not 0 < step < shape[0]:
                return once.get_tensor(name)
        values = np.empty(shape, kind)
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            with reopened() as once:
                values[start:stop] = once.get_slice(name)[start:stop]
        return values

    def read_part(name: str, index: Index) -> Any:
        with reopened() as once:
            return once.get_slice(name)[index]

    return {name: lazy(name) for name in sorted(file.keys())}


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns the offset of the values, and the header."""
    size = _header_size(path)
    with path.open("rb") as opened:
        opened.seek(8)
        return 8 + size, json.loads(opened.read(size))


def _header_size(path: Path) -> int:
    with path.open("rb") as opened:
        return int.from_bytes(opened.read(8), "little")


def _check_header(path: Path) -> None:
    if (size := _header_size(path)) > MOST_HEADER:
        raise InputError(
            f"{path} announces a description of {size:,} bytes, at most {MOST_HEADER:,} are read; "
            "copy it again"
        )


def read_tensors(directory: Path, stem: str) -> dict[str, LazyArray]:
    """Returns the tensors of `stem`.safetensors or .bin in a directory, in one file or several.

    Raises:
        InputError: for a directory without such a file, or files that cannot be read.
    """
    for ending, read in READERS.items():
        if (file := directory / f"{stem}{ending}").is_file():
            return read(file)
        if (index := directory / f"{stem}{ending}.index.json").is_file():
            return _sharded(directory, index.name)
    raise InputError(f"{directory} holds no {stem}.safetensors and no {stem}.bin; copy it again")


def _sharded(path: Path, index_name: str) -> dict[str, LazyArray]:
    index = read_json(path / index_name, {"weight_map": Needed({"*": Needed(str)})})["weight_map"]
    strange = [x for x in index.values() if not is_inside(x) or "/" in x or "\\" in x or x == "."]
    if strange:
        raise InputError(
            f"{path / index_name} names {strange[0]!r}, which is not a file of the directory; copy "
            "the directory again"
        )
    shards = sorted(set(index.values()))
    if missing := [shard for shard in shards if not (path / shard).is_file()]:
        raise InputError(
            f"{path} lacks {', '.join(missing)} of its {len(shards)} files; copy them too"
        )
    unread = [shard for shard in shards if Path(shard).suffix not in READERS]
    if unread:
        raise InputError(
            f"{path / index_name} names {unread[0]!r}; files of {' and '.join(READERS)} are read"
        )
    shard_of: dict[str, str] = {}
    tensors: dict[str, LazyArray] = {}
    for shard in shards:  # with tensors that the index does not list, as in transformers
        for name, tensor in READERS[Path(shard).suffix](path / shard).items():
            if name in tensors:
                raise InputError(
                    f"{path}: {name} is in {shard_of[name]} and in {shard}; copy the directory "
                    "again"
                )
            shard_of[name], tensors[name] = shard, tensor
    if lost := [
        f"{name} in {shard}" for name, shard in index.items() if shard_of.get(name) != shard
    ]:
        raise InputError(
            f"{path / index_name} names tensors that are not there: {', '.join(lost[:8])}; copy it "
            "again"
        )
    return dict(sorted(tensors.items()))


def read_pickled(path: Path) -> dict[str, LazyArray]:
    """Returns the tensors of a file that torch pickled, without running code in it.

    Raises:
        InputError: if the file holds anything but tensors, or torch is not installed.
    """
    if find_spec("torch") is None:
        raise InputError(f"{path} needs torch to be read; write it again as safetensors")
    return import_module("kmodels.weights.pickled_torch").read(path)


READERS = {".safetensors": _one_safetensors, ".bin": read_pickled}


def read_npz(path: str | Path) -> dict[str, LazyArray]:
    """Returns the arrays of an `.npz` file, after verifying its checksums, which reads it once.

    Raises:
        InputError: for a file that is damaged, or holds something other than plain arrays.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, path)
            if (bad := archive.testzip()) is not None:
                raise InputError(f"{path} is damaged at {bad}; copy it again")
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            headers = {name.removesuffix(".npy"): _npy_header(archive, name) for name in names}
    except InputError:
        raise
    except Exception as error:
        # A damaged archive raises nearly anything: zlib.error, KeyError, RuntimeError, EOFError.
        raise InputError(f"{path} is not a whole .npz file: {one_line(error)}") from None
    if not headers:
        raise InputError(f"{path} holds no arrays; write it with np.savez")
    return {
        name: LazyArray(shape, dtype, _npy_reader(path, name))
        for name, (shape, dtype) in sorted(headers.items())
    }


def _npy_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        size = archive.getinfo(name).file_size - file.tell()
    if dtype.hasobject:
        raise InputError(f"{archive.filename}: {name} holds Python objects; only arrays are read")
    if math.prod(shape) * dtype.itemsize != size:
        raise InputError(f"{archive.filename}: {name} says it is {shape}, but has {size} bytes")
    # JAX writes bfloat16 as two opaque bytes.
    return shape, np.dtype(ml_dtypes.bfloat16) if dtype == np.dtype("V2") else dtype


def _npy_reader(path: Path, name: str) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                array = arrays[name]
        except Exception as error:
            raise InputError(f"{path}: {name} cannot be read: {one_line(error)}") from None
        return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array

    return read


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, LazyArray | np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file, reading one tensor at a time.

    Args:
        path: path of the file to make.
        tensors: tensors by name; each is read once, in this order. Arrays are values.
        metadata: texts for the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            values = tensor if isinstance(tensor, np.ndarray) else tensor.read()
            array = np.ascontiguousarray(values, dtype=tensor.dtype)
            if array.shape != tensor.shape and array.size != 1:
                raise ValueError(f"{name} was announced as {tensor.shape} but is {array.shape}")
            # NumPy's buffers do not know bfloat16; its bytes are the same as any other's.
            file.write(array.reshape(-1).view(np.uint8).data)


# === Parts of tensors in several safetensors files, written by the processes of a run ===

# The header of each file has the offsets of its parts in the whole tensors, in the format of
# `torch.distributed.checkpoint`, whose `HuggingFaceStorageReader` reads such files too:
#
#     "DCP_SHARDING_INFO": {"block_0/mlp/up/kernel": {"saved_offsets": [0, 32]}, ...}


def write_parts(path: Path, parts: Mapping[str, tuple[Start, np.ndarray]]) -> None:
    """Writes one file of (offsets, values) by the name of the whole tensor."""
    tensors = {
        name: LazyArray(values.shape, values.dtype, lambda values=values: values)
        for name, (_, values) in sorted(parts.items())
    }
    offsets = {name: {OFFSETS: list(start)} for name, (start, _) in sorted(parts.items())}
    write_safetensors(path, tensors, {"format": "kmodels", SHARDING: json.dumps(offsets)})


def read_parts(files: Sequence[Path]) -> dict[str, LazyArray]:
    """Returns the whole tensors of several files; only the parts that are needed are read.

    Raises:
        InputError: for a file that is damaged, or parts that leave a gap.
    """
    parts_by_name: dict[str, list[Part]] = {}
    for file in files:
        offsets = _offsets(file)
        for name, array in read_safetensors(file).items():
            start = offsets.get(name, {}).get(OFFSETS, [0] * len(array.shape))
            if len(start) != len(array.shape) or not all(isinstance(n, int) for n in start):
                raise InputError(f"{file} says that {name} begins at {start}; copy it again")
            parts_by_name.setdefault(name, []).append((tuple(start), array))
    return {
        name: _join(name, parts, files[0].parent) for name, parts in sorted(parts_by_name.items())
    }


def _offsets(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_metadata(file).get(SHARDING, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{file} has a damaged {SHARDING}; copy it again") from error


def _join(name: str, parts: list[Part], folder: Path) -> LazyArray:
    ends = [tuple(np.add(start, array.shape)) for start, array in parts]
    shape = tuple(int(max(sizes)) for sizes in zip(*ends, strict=True))
    if len(parts) == 1 and not any(parts[0][0]):
        return parts[0][1]
    if sum(math.prod(array.shape) for _, array in parts) != math.prod(shape):
        raise InputError(f"{folder} lacks parts of {name}; copy the directory again")

    def read_part(index: Index) -> np.ndarray:
        wanted = [piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)]
        whole = np.empty([stop - start for start, stop in wanted], parts[0][1].dtype)
        for begin, array in parts:
            # The overlap of the wanted range and this part, in indices of the whole tensor.
            low = [max(a, start) for a, (start, _) in zip(begin, wanted, strict=True)]
            high = [
                min(a + size, stop)
                for a, size, (_, stop) in zip(begin, array.shape, wanted, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = _slices(low, high, [start for start, _ in wanted])
                whole[target] = array.part(_slices(low, high, begin))
        return whole

    everything = tuple(slice(0, size) for size in shape)
    return LazyArray(shape, parts[0][1].dtype, lambda: read_part(everything), read_part)


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> Index:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
