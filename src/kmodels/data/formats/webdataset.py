"""WebDataset's shards: tar files in which files of one name except for their ends are one sample.

Read with Python's own tarfile, and sample by sample: nothing is unpacked to the disk, and nothing
is unpickled, whatever a shard holds.
"""

import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.formats.file_ranges import Files, expand
from kmodels.data.images.pictures import MAX_BYTES, PictureError, decode, suffixes


class TarShards:
    """Samples of tar shards, by number: a sequence for `fit`, and images for `open_dataset`.

    A sample is a dictionary from ends of names to contents. Decoded are images (jpg, png, webp
    and what else Pillow reads: uint8 (H, W, 3)), cls and index (an int), txt and text, json, and
    npy (without pickled objects); what else there is stays bytes. The file "dir/0001.left.jpg"
    belongs to the sample "dir/0001" as "left.jpg".

    Args:
        pattern: path of a shard, or of several as in "train-{0000..0003}.tar".
        fields: names that a sample has, and the ends they stand for, as in
            {"image": "jpg", "label": "cls"}; by default all ends under their own names.

    Raises:
        InputError: for a missing, compressed or damaged file, or no sample in it.
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
        held = self._held(number)
        if self.fields is None:
            return {kind: self._value(number, kind, held[kind]) for kind in held}
        if lacking := [kind for kind in self.fields.values() if kind not in held]:
            raise InputError(f"{self.name(number)} has no {lacking[0]}, only {', '.join(held)}")
        return {name: self._value(number, kind, held[kind]) for name, kind in self.fields.items()}

    def name(self, number: int) -> str:
        """Returns shard and key of a sample, for messages."""
        file, _, offset, _ = self._members[self._starts[range(len(self))[number]]].tolist()
        with tarfile.open(self._files.paths[file], "r:") as archive:
            member = next(m for m in archive if m.offset_data == offset)
        return f"{self._files.paths[file]}: sample {_split(member.name)[0]}"

    def picture(self, number: int) -> np.ndarray:
        """Returns the first image of a sample, uint8 (H, W, 3)."""
        held = self._held(number)
        kind = next((kind for kind in held if _is_picture(kind)), None)
        if kind is None:
            raise PictureError(self.name(number), f"no image in it, only {', '.join(held)}")
        return self._value(number, kind, held[kind])

    def label(self, number: int) -> int:
        """Returns the class of a sample: its cls, or "label" of its json."""
        held = self._held(number)
        found: Any = None
        if "cls" in held:
            found = self._value(number, "cls", held["cls"])
        elif "json" in held:
            about = self._value(number, "json", held["json"])
            found = about.get("label") if isinstance(about, dict) else None
        if not isinstance(found, int) or found < 0:
            raise InputError(f"{self.name(number)} has no label; give KEY.cls or KEY.json")
        return found

    def _held(self, number: int) -> dict[str, tuple[int, int, int]]:
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
        except (ValueError, EOFError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.name(number)}: {kind} is damaged ({reason}); repair or remove it"
            ) from error

    def _index(self, number: int, members: list, starts: list) -> None:
        path, former, here = self._files.paths[number], None, set()
        whole, last, end = path.stat().st_size, "its beginning", 0
        known = {kind: place for place, kind in enumerate(self._kinds)}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    size = member.size if member.isfile() else 0
                    last, end = member.name, member.offset_data + -(-size // 512) * 512
                    if not member.isfile() or member.issparse():
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
        if self._files.read(number, end, 512) != bytes(512):
            raise InputError(f"{path} is cut short after {last}; copy it again")
        self._kinds = list(known)


def _split(name: str) -> tuple[str | None, str]:
    """Returns key and kind of a member; no key for what is not a part of a sample."""
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
