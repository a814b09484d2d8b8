"""Files and directories at addresses such as "gs://bucket/run", through fsspec.

Remote storage cannot rename a directory as a whole. So the files of a published directory lie in a
folder with a new name, and a small file names that folder, with size and sha256 of each file:

    gs://bucket/model/published.json
    gs://bucket/model/20260101-120000-1a2b3c4d/config.json
    gs://bucket/model/20260101-120000-1a2b3c4d/model.safetensors

It is written last, in one request, so readers get either the former directory or the new one. A cut
connection leaves only files that nothing names.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kmodels.core.errors import InputError, one_line
from kmodels.core.files import (
    atomic_write,
    is_inside,
    is_remote,
    local_path,
    remove_directory,
    stamp,
)

# "gs://bucket", and "gs:/bucket" as pathlib makes of it; one letter is a drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


class Remote(NamedTuple):
    """A file or directory of a remote storage.

    Attributes:
        system: fsspec's file system.
        path: path in the file system.
        address: the user's address, maybe with a password, which InputError hides.
    """

    system: Any
    path: str
    address: str

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self.system, f"{self.path}/{name}", f"{self.address}/{name}")


def open_address(address: str | Path) -> Remote:
    """Returns the file or directory at an address.

    Raises:
        InputError: if fsspec or its package for such addresses is missing, or if no package has
            such addresses.
    """
    text = os.fspath(address)
    text = _SCHEME.sub(lambda found: f"{found[1].lower()}://", text, count=1).rstrip("/")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise InputError(
            f"{text} needs the package fsspec: pip install 'kmodels[remote]'"
        ) from error
    try:
        system, path = url_to_fs(text)
    except ImportError as error:
        raise InputError(f"{text} needs one more package: {_line(error)}") from error
    except ValueError as error:
        raise InputError(f"{text} cannot be opened: {_line(error)}") from error
    except Exception as error:  # such as missing credentials, from any package
        raise InputError(f"{text} cannot be opened: {_said(error)}") from error
    return Remote(system, path.rstrip("/"), text)


@contextmanager
def in_one_line(action: str, address: str) -> Iterator[None]:
    """Raises InputError in place of any exception of a storage or hub in the block."""
    try:
        yield
    except InputError:
        raise
    # Each storage's package has exceptions of its own, some of them no OSError.
    except Exception as error:
        raise InputError(
            f"cannot {action} {address}: {_said(error)}; check the address, the permission and "
            "the connection"
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {_line(error)}" if str(error) else type(error).__name__


def _line(error: Exception) -> str:
    return one_line(error)[:300]


PUBLISHED = "published.json"
FORMAT = 1
VERSION = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


def publish(directory: Path, address: str | Path) -> None:
    """Writes a local directory to an address; readers get all of it at once, or nothing.

    Raises:
        InputError: if a file cannot be written; the former directory stays.
    """
    target = open_address(address)
    version = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    listed = {file.relative_to(directory).as_posix(): stamp(file) for file in files}
    text = json.dumps({"format": FORMAT, "folder": version, "files": listed}, indent=1) + "\n"
    with in_one_line("write", target.address):
        try:
            target.system.makedirs(f"{target.path}/{version}", exist_ok=True)
            for name in listed:
                file = target / version / name
                if "/" in name:
                    target.system.makedirs(file.path.rpartition("/")[0], exist_ok=True)
                _send(directory / name, file)
            target.system.pipe_file((target / PUBLISHED).path, text.encode())
        except BaseException:
            _remove_quietly(target / version)
            raise
    for other in _versions(target) - {version}:
        _remove_quietly(target / other)


def put_file(file: Path, address: str | Path) -> None:
    """Writes a local file to an address; readers get the former file or the new one.

    It is sent under another name first, since some storages keep the part that was sent before a
    connection was lost.

    Raises:
        InputError: if it cannot be written; the former file stays.
    """
    target = open_address(address)
    folder, _, name = target.path.rpartition("/")
    beside = Remote(target.system, f"{folder}/.{name}.{uuid.uuid4().hex[:8]}", target.address)
    with in_one_line("write", target.address):
        try:
            if folder:
                target.system.makedirs(folder, exist_ok=True)
            _send(file, beside)
            target.system.mv(beside.path, target.path)
        except BaseException:
            _remove_quietly(beside)
            raise


def _send(file: Path, target: Remote) -> None:
    size = file.stat().st_size
    target.system.put_file(str(file), target.path)
    # A storage may end a transfer early without an error.
    if (written := target.system.info(target.path)["size"]) != size:
        raise InputError(
            f"{target.address} has {written:,} bytes after {size:,} were written; write it again"
        )


def remove(address: str | Path) -> None:
    """Removes a published directory: first the file that names it, so no reader gets half of it."""
    target = open_address(address)
    try:
        target.system.rm_file((target / PUBLISHED).path)
    except Exception:  # from any package; it may be gone, or stay for the next time
        return
    _remove_quietly(target)


def _versions(target: Remote) -> set[str]:
    try:
        return {name for name in _names(target) if VERSION.fullmatch(name)}
    except Exception:  # from any package: left-overs only take space
        return set()


def _names(folder: Remote) -> list[str]:
    folder.system.invalidate_cache()
    paths = folder.system.ls(folder.path, detail=False)
    return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)


def _remove_quietly(target: Remote) -> None:
    try:
        target.system.rm(target.path, recursive=True)
    except Exception:  # from any package: left-overs only take space
        pass


# Copies of this process by address: what they were made of, and where they are.
_COPIES: dict[str, tuple[object, Path]] = {}
# How often a directory is read again that was replaced in the meantime.
_TRIES = 3


def local_copy(path: str | Path) -> Path:
    """Returns a local path unchanged, or a local copy of a remote file or directory.

    A copy lies in the folder for temporary files until the process ends. The same address returns
    it again as long as nothing changed there.

    Raises:
        InputError: if nothing is at the address, or it cannot be read.
    """
    return fetch(path) if is_remote(path) else local_path(path)


def fetch(address: str | Path) -> Path:
    """Returns a local copy of a remote file, or of a directory, published or plain.

    Raises:
        InputError: if nothing is at the address, it cannot be read, or its files differ from those
            that were published.
    """
    source = open_address(address)
    with in_one_line("read", source.address):
        source.system.invalidate_cache()
        for left in reversed(range(_TRIES)):
            try:
                if (described := _described(source)) is None:
                    return _fetch_plain(source)
                return _copy(source, described, source / described["folder"], described["files"])
            except FileNotFoundError:
                if not left:
                    raise
    raise AssertionError("unreachable")


def fetch_published(address: str | Path, into: Path) -> bool:
    """Copies a published directory into a local one, and compares sizes and hashes.

    Returns:
        False if no complete directory is published there.

    Raises:
        InputError: if the address cannot be read.
    """
    source = open_address(address)
    with in_one_line("read", source.address):
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
    """Returns True if a published directory holds a file of this name and content.

    Raises:
        InputError: if the address cannot be read.
    """
    source = open_address(address)
    with in_one_line("read", source.address):
        described = _described(source)
    files = {} if described is None else described["files"]
    return file.is_file() and files.get(file.name) == stamp(file)


def list_published(address: str | Path) -> list[str]:
    """Returns the sorted names of the published directories in a remote directory."""
    source = open_address(address)
    with in_one_line("read", source.address):
        try:
            names = [name for name in _names(source) if "::" not in name]
        except FileNotFoundError:
            return []
        return [name for name in names if _described(source / name) is not None]


def list_matching(pattern: str) -> list[str]:
    """Returns the sorted addresses of the files that match a pattern with "*", "?" or "[...]"."""
    source = open_address(pattern)
    with in_one_line("read", source.address):
        source.system.invalidate_cache()
        infos = source.system.glob(source.path, detail=True)
        files = [path for path, info in infos.items() if info["type"] == "file"]
        addresses = sorted(map(source.system.unstrip_protocol, files))
    # A name in a bucket must not become a chain of file systems.
    if chained := [address for address in addresses if "::" in address]:
        raise InputError(f'{chained[0]} has "::" in its name; rename the file')
    return addresses


class _DamagedError(InputError):
    """A file differs from the published one."""


def _described(source: Remote) -> dict[str, Any] | None:
    """Returns folder and files of a published directory; None if none is complete."""
    try:
        published = json.loads(source.system.cat_file((source / PUBLISHED).path))
        files = {_inside(name): dict(stamp) for name, stamp in published["files"].items()}
        if published["format"] != FORMAT or not VERSION.fullmatch(published["folder"]):
            return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {"folder": published["folder"], "files": files}


def _fetch_plain(source: Remote) -> Path:
    infos = source.system.find(source.path, detail=True)
    if not infos:
        raise InputError(f"there is no file or directory {source.address}")
    one_file = list(infos) == [source.path] and source.system.isfile(source.path)
    sizes = {path: (infos[path].get("size"), source.system.ukey(path)) for path in infos}
    if one_file:
        parent = Remote(source.system, source.path.rpartition("/")[0], source.address)
        name = source.path.rpartition("/")[2]
        return _copy(source, sizes, parent, {name: {}}) / name
    names = {_inside(path[len(source.path) :].lstrip("/")): {} for path in infos}
    return _copy(source, sizes, source, names)


def _copy(
    source: Remote, made_of: object, folder: Remote, files: dict[str, dict[str, Any]]
) -> Path:
    copy = _COPIES.get(source.address)
    if copy is not None and copy[0] == made_of and copy[1].is_dir():
        return copy[1]
    into = Path(tempfile.mkdtemp(prefix="kmodels-"))
    atexit.register(_remove_copy, into, os.getpid())
    # For messages: the name at the address, not the random one.
    into = into / (source.path.rpartition("/")[2] or "root")
    _download(folder, files, into)
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
    if not is_inside(name):
        raise InputError(f"a remote directory names {name!r}, a place outside of it")
    return name


def _remove_copy(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and no process forked from it
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def staged(directory: str | Path) -> Iterator[tuple[Path, Callable[[Path], Path]]]:
    """Yields a local directory to make, and a function that puts it at its destination.

    Args:
        directory: a local path, which is yielded unchanged, or an address, for which a temporary
            directory is yielded.

    Raises:
        InputError: if the address cannot be opened, before anything is written.
    """
    if not is_remote(directory):
        yield local_path(directory), lambda written: written
        return
    name = open_address(directory).path.rpartition("/")[2] or "root"

    def finish(written: Path) -> Path:
        publish(written, directory)
        return Path(directory)

    with tempfile.TemporaryDirectory(prefix="kmodels-") as folder:
        yield Path(folder) / name, finish


def write_file(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Replaces a file by the one that `write(temporary)` makes, or leaves it as it was.

    Returns:
        The path, or the address.

    Raises:
        InputError: if the address cannot be opened, before anything is written, or if the file
            cannot be sent there.
    """
    if not is_remote(path):
        return atomic_write(local_path(path), write)
    name = open_address(path).path.rpartition("/")[2] or "root"
    with tempfile.TemporaryDirectory(prefix="kmodels-") as folder:
        file = Path(folder) / name
        write(file)
        put_file(file, path)
    return Path(path)


# Checkpoints at an address are written, verified and read in a local directory. Each is published
# when it is complete. Before a run begins, the published ones replace those in the directory.

# Addresses of this process by their local directories.
ADDRESSES: dict[Path, str] = {}
_MANIFEST = "manifest.json"


def local_directory(directory: str | Path) -> Path:
    """Returns the local directory of the checkpoints at an address such as "gs://bucket/run".

    It lies in the user's cache, and is the same in all processes of this machine.

    Raises:
        InputError: if the address cannot be opened.
    """
    address = open_address(directory).address
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    folder = cache / "kmodels" / "checkpoints" / name
    ADDRESSES[folder] = address
    return folder


def copy_to_read(directory: str | Path) -> Path:
    """Returns a local directory, or a temporary one with the checkpoints at an address."""
    if not is_remote(directory):
        return local_path(directory)
    folder = Path(tempfile.mkdtemp(prefix="kmodels-checkpoints-"))
    ADDRESSES[folder] = open_address(directory).address
    pull(folder)
    return folder


def pull(folder: Path) -> None:
    """Makes a local directory equal to the published one.

    Checkpoints that were not published, or that are damaged there, are removed.

    Raises:
        InputError: if the storage cannot be read.
    """
    address = ADDRESSES[folder]
    published = list_published(address)
    for path in _steps(folder):
        if path.name not in published:
            remove_directory(path)
    for name in published:
        target = folder / name
        at = f"{address}/{name}"
        if target.is_dir() and holds_file(at, target / _MANIFEST):
            continue
        remove_directory(target)
        if not fetch_published(at, target):
            remove_directory(target)


def push(folder: Path, path: Path) -> None:
    """Publishes a complete checkpoint.

    Raises:
        InputError: if it cannot be written; the published checkpoints stay.
    """
    publish(path, f"{ADDRESSES[folder]}/{path.name}")


def remove_others(folder: Path, path: Path) -> None:
    """Removes published checkpoints that are older than `path` and gone from the local directory.

    Raises:
        InputError: if the storage cannot be read.
    """
    address = ADDRESSES[folder]
    known = {step.name for step in _steps(folder)}
    for name in list_published(address):
        if name < path.name and name not in known:
            remove(f"{address}/{name}")


def _steps(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
