"""GGUF files, opened by the gguf package after their header was checked.

The package reads on past the end of a file: a list that claims more entries than there are bytes
keeps it busy, and growing, forever. The format is described in ggml's docs/gguf.md.
"""

import mmap
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmodels.core.errors import InputError, one_line
from kmodels.core.schema import GGUF, check_shape, warn_of_unknown

if TYPE_CHECKING:
    import gguf

# Bytes of a value of each kind; 8 is a text, 9 a list.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9
_NUMBER = re.compile(r"\.\d+\.")
_MAGIC = b"GGUF"
# The largest vocabulary there is has a quarter of it.
_MOST_ENTRIES = 2**20


def open_gguf(path: str | Path) -> Any:
    """Returns a `gguf.GGUFReader` of a whole file.

    Raises:
        InputError: for a file that is damaged, or without the gguf package.
    """
    try:
        import gguf
    except ImportError:
        raise InputError(f"{path} needs the gguf package: pip install 'kmodels[gguf]'") from None
    try:
        _check(Path(path))
        reader = gguf.GGUFReader(str(path))
        _check_places(reader)
        return reader
    except Exception as error:
        # A damaged file raises nearly anything: IndexError, KeyError, OverflowError, struct.error.
        raise InputError(
            f"{path} is not a whole GGUF file: {one_line(error)}; copy it again"
        ) from None


class Settings:
    """The settings of a file, with a record of those that were read.

    Args:
        path: path of the file.
        reader: a result of `open_gguf`.
    """

    def __init__(self, path: str | Path, reader: "gguf.GGUFReader"):
        self.path, self.reader = Path(path), reader
        self._read: set[str] = set()

    def __call__(self, name: str, default: object = None) -> Any:
        """Returns a setting by its full name, see `setting`."""
        self._read.add(name)
        return setting(self.reader, name, default)

    def warn_of_others(
        self,
        owners: tuple[str, ...],
        idle: Collection[str],
        idle_at: Mapping[str, Collection[object]],
    ) -> None:
        """Logs a warning with the names of settings that were not read and have an effect.

        Args:
            owners: prefixes of the names to check; others are notes of other programs.
            idle: names of settings without an effect, with {id} for a number.
            idle_at: values without an effect, by the name of their setting.
        """
        names = [name for name in self.reader.fields if name.startswith(owners)]
        names = [x for x in names if x not in self._read and _NUMBER.sub(".{id}.", x) not in idle]
        others = {name: setting(self.reader, name) for name in names}
        warn_of_unknown(self.path, others, (), idle_at)


def setting(reader: "gguf.GGUFReader", name: str, default: object = None) -> Any:
    """Returns a setting by its full name, such as "general.architecture", or `default`.

    Raises:
        InputError: for a setting of another type.
    """
    field = reader.fields.get(name)
    try:
        value = default if field is None else field.contents()
    except Exception as error:
        raise InputError(f"{name} in a GGUF file is damaged: {error}; copy it again") from None
    if (shape := GGUF.get(name.partition(".")[2])) is not None:
        check_shape(value, shape, f"{name} in a GGUF file")
    return value


def _check(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, _, count = struct.unpack_from("<4sIQQ", data)
        if magic != _MAGIC or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version}")
        at = 24
        for _ in range(count):
            at = _text(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            at = _value(data, at + 4, kind)


def _check_places(reader: "gguf.GGUFReader") -> None:
    """Checks that each tensor follows the one before, aligned and without a gap, like llama.cpp."""
    expected = reader.data_offset
    for tensor in reader.tensors:
        if tensor.data_offset != expected:
            raise ValueError(
                f"tensor {tensor.name} begins at byte {tensor.data_offset}, not at {expected}"
            )
        expected += -(-tensor.n_bytes // reader.alignment) * reader.alignment


def _text(data: mmap.mmap, at: int) -> int:
    (size,) = struct.unpack_from("<Q", data, at)
    return _within(data, at + 8 + size)


def _value(data: mmap.mmap, at: int, kind: int) -> int:
    """Returns the end of the value that begins at `at`."""
    if kind == _TEXT:
        return _text(data, at)
    if kind != _LIST:
        return _within(data, at + _SIZES[kind])
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if count > _MOST_ENTRIES or kind == _LIST:
        raise ValueError(f"a list of {count:,} entries of kind {kind}")
    if kind != _TEXT:
        return _within(data, at + count * _SIZES[kind])
    for _ in range(count):
        at = _text(data, at)
    return at


def _within(data: mmap.mmap, end: int) -> int:
    if end > len(data):
        raise ValueError("it ends inside its description")
    return end
