"""TFRecord files of tf.train.Example, without TensorFlow.

A record is its length (8 bytes), a checksum of that, the content, and a checksum of that; both
checksums are CRC-32C, turned and shifted so that checksums of checksums differ (TensorFlow's
`core/lib/io/record_writer.h`). A content is a Protocol Buffers message.
"""

import functools
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.formats import protobuf
from kmodels.data.formats.file_ranges import Files, expand
from kmodels.data.formats.protobuf import Field, message_classes
from kmodels.data.images.pictures import MAX_BYTES, PictureError, decode

PICTURE_KEYS = ("image/encoded", "image", "image_raw", "encoded")
LABEL_KEYS = ("image/class/label", "label")
_HEADER = struct.Struct("<QI")
_KINDS = ("bytes", "float", "int64")
_NEEDS = "TFRecord files need a small package: pip install 'kmodels[tfrecord]'"


class TFRecords:
    """Examples of TFRecord files, by number: a sequence for `fit`, images for `open_dataset`.

    A sample is a dictionary from feature names to int64 or float32 arrays, (n,) or () where there
    is one number, and bytes, or a list of them where there is not one. Opening a file counts its
    records and checks their lengths; contents are checked when they are read.

    Args:
        pattern: path of a file, or of several as in "train-*-of-00010.tfrecord".
        fields: names that a sample has, and the features they stand for; by default all features
            under their own names.

    Raises:
        InputError: for a missing, compressed or damaged file, or no record in it.
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
        """Returns the image of a record, uint8 (H, W, C), of a file or of raw pixels."""
        sample, where = self._example(number), self.name(number)
        key = next((k for k in PICTURE_KEYS if isinstance(sample.get(k), bytes)), None)
        if key is None:
            known = ", ".join(PICTURE_KEYS)
            raise PictureError(where, f"no image under {known}, only {', '.join(sample)}")
        content = sample[key]
        sides = [
            next((sample[k] for k in (f"image/{side}", side) if np.ndim(sample.get(k, [])) == 0), 0)
            for side in ("height", "width", "depth")
        ]
        shape = tuple(int(side) for side in sides)
        if len(content) == np.prod(shape, dtype=np.int64):
            return np.frombuffer(content, "uint8").reshape(shape)
        return decode(content, where)

    def label(self, number: int) -> int:
        """Returns the class of a record."""
        sample = self._example(number)
        found = next((sample[key] for key in LABEL_KEYS if key in sample), None)
        if not isinstance(found, np.ndarray) or found.shape or found.dtype != np.int64 or found < 0:
            known = " or ".join(LABEL_KEYS)
            raise InputError(f"{self.name(number)} has no label; give a whole number as {known}")
        return int(found)

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
        path, found, offset = self._files.paths[number], [], 0
        whole = path.stat().st_size
        while offset < whole:
            header = self._files.read(number, offset, _HEADER.size)
            where = f"{path}: record {len(found)}"
            if header[:2] == b"\x1f\x8b" and not found:
                raise InputError(f"{path} is compressed; unpack it, as by gunzip")
            if len(header) < _HEADER.size:
                raise InputError(f"{where} is cut short; write the file again")
            size, checksum = _HEADER.unpack(header)
            if _masked(header[:8]) != checksum:
                raise InputError(f"{where} is damaged (checksum of its length); write it again")
            offset += _HEADER.size
            if offset + size + 4 > whole:
                raise InputError(f"{where} is cut short; write the file again")
            if size > MAX_BYTES:
                raise InputError(f"{where} has {size} bytes, over {MAX_BYTES}; split it")
            found.append((number, len(found), offset, size))
            offset += size + 4
        return found


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
    entries = protobuf.parse(_example_class(), content).features.feature
    found: dict[str, Any] = {}
    # The entries of a map: of several with one key, the last one counts.
    for name, feature in sorted({entry.key: entry.value for entry in entries}.items()):
        kind = feature.WhichOneof("kind")
        if kind is None:
            continue
        values = getattr(feature, kind).value
        if kind == "bytes_list":
            found[name] = values[0] if len(values) == 1 else list(values)
        else:
            numbers = np.array(values, "float32" if kind == "float_list" else "int64")
            found[name] = numbers[0, ...] if len(numbers) == 1 else numbers
    return found


# TensorFlow's core/example/example.proto; a map is a list of entries on the wire.
_TABLE = {
    **{f"{kind}_list": (Field("value", 1, kind, repeated=True),) for kind in _KINDS},
    "Feature": tuple(
        Field(f"{kind}_list", number, f"{kind}_list", oneof="kind")
        for number, kind in enumerate(_KINDS, 1)
    ),
    "FeatureEntry": (Field("key", 1, "string"), Field("value", 2, "Feature")),
    "Features": (Field("feature", 1, "FeatureEntry", repeated=True),),
    "Example": (Field("features", 1, "Features"),),
}


@functools.cache
def _example_class() -> Any:
    return message_classes("kmodels.example", _TABLE)["Example"]
