"""Files of records as the tests need them, written without the code that reads them."""

import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def crc32c(content: bytes) -> int:
    """Bit by bit, by the polynomial of RFC 3720."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def _varint(number: int) -> bytes:
    number %= 2**64
    found = []
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def example(features: dict) -> bytes:
    """tf.train.Example: bytes, float arrays and whole numbers by name."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = _field(1, _field(1, value))
        elif np.asarray(value).dtype.kind == "f":
            feature = _field(2, _field(1, np.ravel(value).astype("<f4").tobytes()))
        else:
            packed = b"".join(_varint(int(number)) for number in np.ravel(value))
            feature = _field(3, _field(1, packed))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, entries)


def write_tfrecords(path: Path, samples: list[dict]) -> Path:
    with path.open("wb") as file:
        for sample in samples:
            content = example(sample)
            length = struct.pack("<Q", len(content))
            file.write(length + _masked(length) + content + _masked(content))
    return path


def encoded(thing: object, kind: str) -> bytes:
    """What stands in a shard under this end of the name."""
    stream, kind = io.BytesIO(), kind.lower()
    if isinstance(thing, bytes):
        return thing
    if kind.endswith("npy"):
        np.save(stream, np.asarray(thing), allow_pickle=True)
    elif kind.endswith("png"):
        Image.fromarray(np.asarray(thing)).save(stream, "PNG")
    else:
        return (json.dumps(thing) if kind.endswith("json") else str(thing)).encode()
    return stream.getvalue()


def write_shard(path: Path, samples: dict[str, dict]) -> Path:
    with tarfile.open(path, "w") as archive:
        for key, sample in samples.items():
            for kind, thing in sample.items():
                content = encoded(thing, kind)
                member = tarfile.TarInfo(f"{key}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path
