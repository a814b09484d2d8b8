"""Many files as one: names by pattern, and pieces of the files by place."""

import glob
import os
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import is_remote, local_path
from kmodels.core.remote import list_matching, local_copy

_MOST_OPEN = 64
_BRACES = re.compile(r"\{([^{}]*)\}")


def expand(pattern: str) -> list[Path]:
    """Returns files that a pattern names, in order.

    Args:
        pattern: a path or an address, with "{0000..0003}" or "{a,b}" for each of several, "*", "?"
            or "[...]".

    Raises:
        InputError: where a file is missing, or none fits.
    """
    found: list[Path] = []
    remote = is_remote(pattern)
    for name in dict.fromkeys(_braced(str(pattern if remote else local_path(pattern)))):
        hits = [name]
        if any(mark in name for mark in "*?["):
            hits = list_matching(name) if remote else sorted(glob.glob(name))
        # What a pattern finds on the disk is a path, whatever it looks like.
        found += [local_copy(hit) if remote else Path(hit) for hit in hits]
    if not found:
        raise InputError(f"no file fits {pattern}; give the path of one or more files")
    if missing := [path for path in found if not path.is_file()]:
        raise InputError(f"{missing[0]} does not exist; {pattern} names {len(found)} files")
    return found


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
    """Reads pieces of files, from any thread or process, and holds few of them open.

    Args:
        paths: paths of the files.
    """

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
        """Returns so many bytes of a file, or fewer where it ends.

        Raises:
            InputError: where the file cannot be read.
        """
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


def _close(held: dict[int, int]) -> None:
    while held:
        os.close(held.popitem()[1])
