"""Files and directories of remote storage, copied to the local disk to be read."""

import atexit
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import is_inside, is_remote, local_path
from kmodels.core.remote.address import Remote, open_address, telling
from kmodels.core.remote.publish import FORMAT, PUBLISHED, VERSION, stamp

# Copies of this process by address: what they were made of, and where they are.
_COPIES: dict[str, tuple[object, Path]] = {}
# How often a directory is read again that was replaced in the meantime.
_TRIES = 3


def local_copy(path: str | Path) -> Path:
    """Returns a local path as it is, and of a remote file or directory a copy to read.

    A copy lies in the folder for temporary files until the process ends; the same address gives it
    again as long as nothing changed there.

    Args:
        path: local, or an address such as "gs://bucket/model".

    Raises:
        InputError: where nothing is at the address, or it cannot be read.
    """
    return fetch(path) if is_remote(path) else local_path(path)


def fetch(address: str | Path) -> Path:
    """Returns a local copy of a remote file, or of a directory, published or plain.

    Args:
        address: address of it.

    Raises:
        InputError: where nothing is there, it cannot be read, or is not what was published.
    """
    source = open_address(address)
    with telling("read", source.address):
        source.system.invalidate_cache()
        for last in range(_TRIES, 0, -1):
            described = _described(source)
            try:
                if described is not None:
                    return _copy(source, described, described["folder"], described["files"])
                return _fetch_plain(source)
            except FileNotFoundError:
                if last == 1:
                    raise
    raise AssertionError("unreachable")


def fetch_published(address: str | Path, into: Path) -> bool:
    """Copies a published directory into a local one, and compares sizes and hashes.

    Args:
        address: address of the remote directory.
        into: the local one; its files are replaced.

    Returns:
        False where nothing whole is published there.

    Raises:
        InputError: where it cannot be read.
    """
    source = open_address(address)
    with telling("read", source.address):
        source.system.invalidate_cache()
        described = _described(source)
        if described is None:
            return False
        try:
            _download(source / described["folder"], described["files"], into)
        except (FileNotFoundError, _DamagedError):
            return False
    return True


def holds_file(address: str | Path, file: Path) -> bool:
    """Returns whether a published directory holds a file of this name and content.

    Args:
        address: address of the remote directory.
        file: local.

    Raises:
        InputError: where it cannot be read.
    """
    source = open_address(address)
    with telling("read", source.address):
        described = _described(source)
    files = {} if described is None else described["files"]
    return file.is_file() and files.get(file.name) == stamp(file)


def list_published(address: str | Path) -> list[str]:
    """Returns the names of the published directories in a remote directory, in order."""
    source = open_address(address)
    with telling("read", source.address):
        source.system.invalidate_cache()
        try:
            found = source.system.ls(source.path, detail=False)
        except FileNotFoundError:
            return []
        names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)
        names = [name for name in names if "::" not in name]
        return [name for name in names if _described(source / name) is not None]


def list_matching(pattern: str) -> list[str]:
    """Returns the addresses of the files that a pattern with "*", "?" or "[...]" fits, in order."""
    source = open_address(pattern)
    with telling("read", source.address):
        source.system.invalidate_cache()
        found = source.system.glob(source.path, detail=True)
        files = [path for path, info in found.items() if info["type"] == "file"]
        addresses = sorted(map(source.system.unstrip_protocol, files))
    # A name in a bucket must not become a chain of file systems.
    if chained := [address for address in addresses if "::" in address]:
        raise InputError(f'{chained[0]} has "::" in its name; rename the file')
    return addresses


class _DamagedError(InputError):
    """A file is not what was published."""


def _described(source: Remote) -> dict[str, Any] | None:
    """Returns the list of a published directory's files; None where nothing is whole."""
    try:
        found = json.loads(source.system.cat_file((source / PUBLISHED).path))
        files = {_inside(name): dict(stamp) for name, stamp in found["files"].items()}
        if found["format"] != FORMAT or not VERSION.fullmatch(found["folder"]):
            return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {"folder": found["folder"], "files": files}


def _fetch_plain(source: Remote) -> Path:
    found = source.system.find(source.path, detail=True)
    if not found:
        raise InputError(f"there is no file or directory {source.address}")
    one_file = list(found) == [source.path] and source.system.isfile(source.path)
    sizes = {path: (found[path].get("size"), source.system.ukey(path)) for path in found}
    if one_file:
        parent = Remote(source.system, source.path.rpartition("/")[0], source.address)
        name = source.path.rpartition("/")[2]
        return _copy(source, sizes, "", {name: {}}, parent) / name
    names = {_inside(path[len(source.path) :].lstrip("/")): {} for path in found}
    return _copy(source, sizes, "", names)


def _copy(
    source: Remote,
    made_of: object,
    folder: str,
    files: dict[str, dict[str, Any]],
    parent: Remote | None = None,
) -> Path:
    held = _COPIES.get(source.address)
    if held is not None and held[0] == made_of and held[1].is_dir():
        return held[1]
    into = Path(tempfile.mkdtemp(prefix="kmodels-"))
    atexit.register(_remove, into, os.getpid())
    # The last name says more in messages than one drawn by chance.
    into = into / (source.path.rpartition("/")[2] or "root")
    start = source if parent is None else parent
    _download(start / folder if folder else start, files, into)
    _COPIES[source.address] = made_of, into
    return into


def _download(source: Remote, files: dict[str, dict[str, Any]], into: Path) -> None:
    for name, expected in files.items():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source.system.get_file((source / name).path, str(target))
        if expected and stamp(target) != expected:
            raise _DamagedError(
                f"{(source / name).address} is not what was published (size or sha256); write it "
                "again"
            )


def _inside(name: str) -> str:
    """Returns the name of a file, if it leads to no place outside of its directory."""
    if not is_inside(name):
        raise InputError(f"a remote directory names {name!r}, a place outside of it")
    return name


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and no process forked from it
        shutil.rmtree(folder, ignore_errors=True)
