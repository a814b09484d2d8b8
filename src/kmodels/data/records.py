"""Files of numbered samples: TFRecord, and WebDataset's tar shards.

Nothing is unpacked to the disk or unpickled.
"""

import functools
import glob
import io
import json
import math
import os
import re
import struct
import tarfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core import protobuf
from kmodels.core.errors import InputError, one_line, pluralize, shown
from kmodels.core.files import is_remote, local_path
from kmodels.core.protobuf import Field, message_classes
from kmodels.core.remote import list_matching, local_copy
from kmodels.data.images.decoding import MAX_BYTES, PictureError, decode, suffixes

_MOST_OPEN = 64
# Bytes behind the last member of a tar that are searched for another one.
_PADDING = 1 << 20
_BRACES = re.compile(r"\{([^{}]*)\}")


def expand(pattern: str) -> list[Path]:
    """Returns the files of a pattern, in order.

    It may have "{0000..0003}", "{a,b}", "*", "**", "?" or "[...]"; the path of a file is this file,
    whatever its name. Raises `InputError` if a file is missing, or none matches.
    """
    files: list[Path] = []
    remote = is_remote(pattern)
    if not remote and (path := local_path(pattern)).is_file():
        return [path]
    for name in dict.fromkeys(_braced(str(pattern if remote else local_path(pattern)))):
        hits = [name]
        if any(mark in name for mark in "*?["):
            hits = list_matching(name) if remote else sorted(glob.glob(name, recursive=True))
        # A name on the disk is a path, even if it looks like an address.
        files += [local_copy(hit) if remote else Path(hit) for hit in hits]
    if not files:
        raise InputError(f"no file fits {pattern}; give the path of one or more files")
    files = list(dict.fromkeys(files))
    if missing := [path for path in files if not path.is_file()]:
        raise InputError(f"{missing[0]} does not exist; {pattern} names {len(files)} files")
    return files


def _braced(name: str) -> Iterator[str]:
    braces = _BRACES.search(name)
    if braces is None:
        yield name
        return
    inner = braces[1]
    if limits := re.fullmatch(r"(\d+)\.\.(\d+)", inner):
        low, high = limits.groups()
        parts = [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    else:
        parts = inner.split(",")
    for part in parts:
        yield from _braced(name[: braces.start()] + part + name[braces.end() :])


class Files:
    """Reads parts of files, from any thread or process, and keeps few of them open."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        self._finalizer = weakref.finalize(self, _close, self._open)

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.paths = state["paths"]
        self._begin()

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Returns `size` bytes of a file from `offset`, or fewer at its end."""
        try:
            with self._lock:
                if number not in self._open:
                    while len(self._open) >= _MOST_OPEN:
                        os.close(self._open.pop(next(iter(self._open))))
                    self._open[number] = os.open(self.paths[number], os.O_RDONLY)
                return os.pread(self._open[number], size, offset)
        except OSError as error:
            raise InputError(
                f"{self.paths[number]} cannot be read ({error.strerror}); put it back"
            ) from error


def _close(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


PICTURE_KEYS = ("image/encoded", "image", "image_raw", "encoded")
LABEL_KEYS = ("image/class/label", "label")
_HEADER = struct.Struct("<QI")
_KINDS = ("bytes", "float", "int64")
# The first bytes of files in the formats that TensorFlow compresses with, gzip and zlib.
_PACKED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_NEEDS = "TFRecord files need a small package: pip install 'kmodels[tfrecord]'"


class TFRecords:
    """Examples of TFRecord files, by number: a sequence for `fit`, images for `open_dataset`.

    A sample is a dictionary of features: int64 or float32 arrays, (n,) or () for one number, and
    bytes, or a list of them unless there is one. Opening a file counts its records and checks their
    lengths; contents are checked when they are read.

    Args:
        pattern: path of a file, or of several as in "train-*-of-00010.tfrecord".
        fields: the feature for each name in a sample; default: all features by their own names.

    Raises:
        InputError: for a missing, compressed or damaged file, or one without records.
    """

    def __init__(self, pattern: str, fields: Mapping[str, str] | None = None):
        self.fields = fields
        paths = expand(pattern)
        self._files = Files(paths)
        # Each record has a row: file, number in it, offset of the content, size.
        places = [place for number in range(len(paths)) for place in self._index(number)]
        if not places:
            raise InputError(f"{pattern} holds no records; give TFRecord files that do")
        self._places = np.array(places, np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self._example(number)
        if self.fields is None:
            return sample
        if lacking := [name for name in self.fields.values() if name not in sample]:
            raise InputError(
                f"{self.name(number)} has no feature {lacking[0]}, only {', '.join(sample)}"
            )
        return {name: sample[feature] for name, feature in self.fields.items()}

    def name(self, number: int) -> str:
        """Returns file and number of a record, for messages."""
        file, record, _, _ = self._places[number].tolist()
        return f"{self._files.paths[file]}: record {record}"

    def picture(self, number: int) -> np.ndarray:
        """Returns the image of a record, uint8 (H, W, C), from an image file or raw pixels."""
        sample, where = self._example(number), self.name(number)
        key = next((k for k in PICTURE_KEYS if isinstance(sample.get(k), bytes)), None)
        if key is None:
            known = ", ".join(PICTURE_KEYS)
            raise PictureError(where, f"no image under {known}, only {', '.join(sample)}")
        content = sample[key]
        shape = tuple(
            next((int(sample[k]) for k in (f"image/{side}", side) if _is_side(sample.get(k))), 0)
            for side in ("height", "width", "depth")
        )
        if content and len(content) == math.prod(shape):
            return np.frombuffer(content, "uint8").reshape(shape)
        return decode(content, where)

    def label(self, number: int) -> int:
        """Returns the class of a record."""
        sample = self._example(number)
        label = next((sample[key] for key in LABEL_KEYS if key in sample), None)
        if not isinstance(label, np.ndarray) or label.shape or label.dtype != np.int64 or label < 0:
            known = " or ".join(LABEL_KEYS)
            raise InputError(f"{self.name(number)} has no label; give a whole number as {known}")
        return int(label)

    def _example(self, number: int) -> dict[str, Any]:
        file, _, offset, size = self._places[number].tolist()
        content = self._files.read(file, offset, size + 4)
        if _masked(content[:size]) != int.from_bytes(content[size:], "little"):
            raise InputError(f"{self.name(number)} is damaged (checksum); write the file again")
        try:
            return _parsed(content[:size])
        except (ValueError, TypeError) as error:
            raise InputError(f"{self.name(number)} is not a tf.train.Example ({error})") from error

    def _index(self, number: int) -> list[tuple[int, int, int, int]]:
        path, places, offset = self._files.paths[number], [], 0
        whole = path.stat().st_size
        while offset < whole:
            header = self._files.read(number, offset, _HEADER.size)
            where = f"{path}: record {len(places)}"
            if len(header) < _HEADER.size:
                raise InputError(f"{where} is cut short; write the file again")
            size, checksum = _HEADER.unpack(header)
            if _masked(header[:8]) != checksum:
                if header[:2] in _PACKED and not places:
                    raise InputError(f"{path} is compressed; unpack it, as by gunzip")
                raise InputError(f"{where} is damaged (checksum of its length); write it again")
            offset += _HEADER.size
            if offset + size + 4 > whole:
                raise InputError(f"{where} is cut short; write the file again")
            if size > MAX_BYTES:
                raise InputError(f"{where} has {size} bytes, over {MAX_BYTES}; split it")
            places.append((number, len(places), offset, size))
            offset += size + 4
        return places


def _is_side(value: Any) -> bool:
    """Returns True for one number that may be the side of an image."""
    return isinstance(value, np.ndarray) and not value.shape and 1 <= float(value) < math.inf


def _masked(content: bytes) -> int:
    crc = _crc32c()(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc32c() -> Any:
    try:
        import google_crc32c  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(_NEEDS) from error
    return google_crc32c.value


def _parsed(content: bytes) -> dict[str, Any]:
    example = protobuf.parse(_example_class(), content)
    if example.feature_lists:
        raise ValueError("it has feature_lists, as a SequenceExample")
    entries = example.features.feature
    features: dict[str, Any] = {}
    # Entries of a map: the last one of a key counts.
    for name, feature in sorted({entry.key: entry.value for entry in entries}.items()):
        kind = feature.WhichOneof("kind")
        if kind is None:
            continue
        values = getattr(feature, kind).value
        if kind == "bytes_list":
            features[name] = values[0] if len(values) == 1 else list(values)
        else:
            numbers = np.array(values, "float32" if kind == "float_list" else "int64")
            features[name] = numbers[0, ...] if len(numbers) == 1 else numbers
    return features


# TensorFlow's core/example/example.proto; a map is a list of entries on the wire.
_TABLE = {
    **{f"{kind}_list": (Field("value", 1, kind, repeated=True),) for kind in _KINDS},
    "Feature": tuple(
        Field(f"{kind}_list", number, f"{kind}_list", oneof="kind")
        for number, kind in enumerate(_KINDS, 1)
    ),
    "FeatureEntry": (Field("key", 1, "string"), Field("value", 2, "Feature")),
    "Features": (Field("feature", 1, "FeatureEntry", repeated=True),),
    "Example": (Field("features", 1, "Features"), Field("feature_lists", 2, "bytes")),
}


@functools.cache
def _example_class() -> Any:
    return message_classes("kmodels.example", _TABLE)["Example"]


class TarShards:
    """Samples of tar shards, by number: a sequence for `fit`, and images for `open_dataset`.

    A sample is a dictionary from extensions to contents. Images (jpg, png, webp and all formats
    of Pillow: uint8 (H, W, 3)), cls and index (an int), txt and text, json, and npy (without
    pickled objects) are decoded; others stay bytes. The file "dir/0001.left.jpg" belongs to the
    sample "dir/0001" as "left.jpg".

    Args:
        pattern: path of a shard, or of several as in "train-{0000..0003}.tar".
        fields: the extension for each name in a sample, such as {"image": "jpg", "label": "cls"};
            default: all extensions.

    Raises:
        InputError: for a missing, compressed or damaged file, or one without samples.
    """

    def __init__(self, pattern: str, fields: Mapping[str, str] | None = None):
        self.fields = fields
        paths = expand(pattern)
        self._files = Files(paths)
        self._kinds: list[str] = []
        # Each member has a row: file, kind, offset, size; each sample has its first member.
        members: list[tuple[int, int, int, int]] = []
        starts: list[int] = []
        for number in range(len(paths)):
            self._index(number, members, starts)
        if not starts:
            raise InputError(f"{pattern} holds no samples; give tar files with KEY.jpg, KEY.cls")
        self._members = np.array(members, np.int64)
        self._starts = np.array([*starts, len(members)], np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        parts = self._of(number)
        if self.fields is None:
            return {kind: self._value(number, kind, parts[kind]) for kind in parts}
        if lacking := [kind for kind in self.fields.values() if kind not in parts]:
            raise InputError(f"{self.name(number)} has no {lacking[0]}, only {', '.join(parts)}")
        return {name: self._value(number, kind, parts[kind]) for name, kind in self.fields.items()}

    def name(self, number: int) -> str:
        """Returns shard and key of a sample, for messages."""
        file, _, offset, _ = self._members[self._starts[range(len(self))[number]]].tolist()
        with tarfile.open(self._files.paths[file], "r:") as archive:
            member = next(m for m in archive if m.offset_data == offset)
        return f"{self._files.paths[file]}: sample {_split(member.name)[0]}"

    def picture(self, number: int) -> np.ndarray:
        """Returns the first image of a sample, uint8 (H, W, 3)."""
        parts = self._of(number)
        kind = next((kind for kind in parts if _is_picture(kind)), None)
        if kind is None:
            raise PictureError(self.name(number), f"no image in it, only {', '.join(parts)}")
        return self._value(number, kind, parts[kind])

    def label(self, number: int) -> int:
        """Returns the class of a sample: its cls, or "label" of its json."""
        parts = self._of(number)
        label: Any = None
        if "cls" in parts:
            label = self._value(number, "cls", parts["cls"])
        elif "json" in parts:
            about = self._value(number, "json", parts["json"])
            label = about.get("label") if isinstance(about, dict) else None
        if not isinstance(label, int) or label < 0:
            raise InputError(f"{self.name(number)} has no label; give KEY.cls or KEY.json")
        return label

    def _of(self, number: int) -> dict[str, tuple[int, int, int]]:
        number = range(len(self))[number]
        rows = self._members[self._starts[number] : self._starts[number + 1]].tolist()
        return {self._kinds[kind]: (file, offset, size) for file, kind, offset, size in rows}

    def _value(self, number: int, kind: str, place: tuple[int, int, int]) -> Any:
        file, offset, size = place
        if size > MAX_BYTES:
            raise InputError(f"{self.name(number)}: {kind} has {size} bytes; split it")
        content = self._files.read(file, offset, size)
        try:
            return _decoded(kind, content)
        except PictureError as error:
            raise PictureError(self.name(number), error.reason) from error
        except Exception as error:
            # NumPy raises nearly anything for the header of an array, such as MemoryError.
            raise InputError(
                f"{self.name(number)}: {kind} is damaged ({one_line(error)}); repair or remove it"
            ) from error

    def _index(self, number: int, members: list, starts: list) -> None:
        path, former, here = self._files.paths[number], None, set()
        whole, last, end = path.stat().st_size, "its beginning", 0
        known = {kind: place for place, kind in enumerate(self._kinds)}
        links: list[str] = []
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    size = member.size if member.isfile() else 0
                    last, end = member.name, member.offset_data + -(-size // 512) * 512
                    if not member.isfile() or member.issparse():
                        if not member.isdir():
                            links.append(member.name)
                        continue
                    if end > whole:
                        raise InputError(f"{path} is cut short in {last}; copy it again")
                    key, kind = _split(member.name)
                    if key is None:
                        continue
                    if key != former:
                        starts.append(len(members))
                        former, here = key, set()
                    if kind in here:
                        raise InputError(f"{path} has {member.name} twice; give it once")
                    here.add(kind)
                    place = known.setdefault(kind, len(known))
                    members.append((number, place, member.offset_data, member.size))
        except (tarfile.TarError, OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{path} is not a readable tar file ({error}); unpack it if it is compressed, or "
                "copy it again"
            ) from error
        rest = self._files.read(number, end, _PADDING)
        if rest[:512] != bytes(512):
            raise InputError(f"{path} is cut short after {last}; copy it again")
        if any(rest):
            raise InputError(
                f"{path} continues after its end, as joined files do; give each tar file by itself"
            )
        if links:
            warnings.warn(
                f"{shown(path)}: {pluralize(len(links), 'member')} left out, which are links, "
                f"devices or sparse: {', '.join(links[:8])}; write them as plain files",
                stacklevel=3,
            )
        self._kinds = list(known)


def _split(name: str) -> tuple[str | None, str]:
    """Returns the key and the extension of a member; None as key if it is not part of a sample."""
    folder, slash, file = name.rpartition("/")
    stem, dot, kind = file.partition(".")
    if not dot or not stem or file.startswith("__"):
        return None, ""
    return folder + slash + stem, kind.lower()


def _is_picture(kind: str) -> bool:
    return "." + kind.rpartition(".")[2] in suffixes()


def _decoded(kind: str, content: bytes) -> Any:
    ending = kind.rpartition(".")[2]
    if _is_picture(kind):
        return decode(content, kind).copy()  # torch wants arrays that can be written to
    if ending in ("cls", "index"):
        return int(content)
    if ending in ("txt", "text"):
        return content.decode()
    if ending == "json":
        return json.loads(content)
    if ending == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    return content
