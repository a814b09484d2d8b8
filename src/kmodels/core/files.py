"""Paths and archives from users, checked, and files that are written whole or not at all."""

import errno
import fcntl
import hashlib
import math
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from kmodels.core.errors import InputError

# File handles of this process by locked directory.
_LOCKS: dict[Path, int] = {}
# "gs://bucket", and "gs:/bucket" as pathlib makes of it; one letter is a drive.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# "file:///path", and "file:/path" as pathlib makes of it.
_LOCAL = re.compile(r"file:(//(localhost)?(?=/)|(?=/[^/]))", re.IGNORECASE)
# Temporary names of this module, see `_beside`; the directory that `remove_directory` hides.
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.((?P<kind>tmp|old)\.[0-9a-f]{16}(\.\w+)?|removed)")
# Bytes of a name and characters of a path that file systems take.
LONGEST_NAME, MOST_CHARACTERS = 255, 4095
# Bytes of a file that describes a model; the largest published ones, of tokens, have 40 million.
MOST_BYTES = 2**27
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _text_of(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a path is {path!r}; give a text or a pathlib.Path")
    return os.fspath(path)


def local_path(path: str | Path) -> Path:
    """Returns a user's path with the home directory filled in.

    Args:
        path: path of a local file or directory, or its "file:///path".

    Raises:
        InputError: for an address such as "gs://bucket/run", which would become a folder called
            "gs:", a path that no file can have, and a device such as /dev/zero, which has no end.
    """
    text = _text_of(path)
    if not text:
        raise InputError("a path is empty; give a file or a directory, such as . for this one")
    if local := _LOCAL.match(text):
        text = text[local.end() :]
    elif _SCHEME.match(text):
        raise InputError(
            f"{text} is an address, and kmodels reads and writes only local paths here; "
            "copy it to or from a local directory with the storage's own tool, and give that one"
        )
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise InputError(f"{text}: there is no such user; give the whole path") from None
    longest = max((len(part.encode(errors="replace")) for part in path.parts), default=0)
    if longest > LONGEST_NAME or len(text) > MOST_CHARACTERS:
        raise InputError(f"{text[:60]}... is longer than a path can be; give a shorter one")
    if _is_device(path):
        raise InputError(f"{text} is a device; give a file or a directory")
    return path


def limited(path: Path, most: int | None = MOST_BYTES) -> Path:
    """Returns the path of a file that is read as a whole; None for `most` allows any size.

    Raises:
        OSError: for a device or a pipe, which may have no end or no beginning, or a larger file.
    """
    if path.is_fifo() or path.is_char_device():
        raise OSError("it is a device or a pipe")
    if most is not None and (size := path.stat().st_size) > most:
        raise OSError(f"it has {size:,} bytes, at most {most:,} are read")
    return path


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # there is none
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode)


def check_output(
    name: str,
    path: str | Path,
    *,
    folder: bool = False,
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Checks a path before the work whose results are written to it; makes nothing.

    `inputs` are paths, addresses and texts that the work reads; None for one that is not given.

    Raises:
        InputError: for an input, a path of the other kind, one below a file, or one without
            permission.
    """
    path = local_path(path)
    read = [os.path.realpath(local_path(one)) for one in inputs if one and not is_remote(one)]
    if os.path.realpath(path) in read:
        raise InputError(f"{name} {path} is an input, which would be lost; give another path")
    first = next(one for one in (path, *path.absolute().parents) if os.path.exists(one))
    if first == path and path.is_dir() != folder:
        kinds = ("file", "directory") if folder else ("directory", "file")
        raise InputError(f"{name} {path} is a {kinds[0]}; give a {kinds[1]}")
    holder = first if folder or first != path else path.absolute().parent
    if not holder.is_dir() or not os.access(holder, os.W_OK | os.X_OK):
        raise InputError(f"{name} {path} cannot be written in {holder}; give another path")


def is_remote(path: str | Path) -> bool:
    """Returns True for an address of remote storage; "file://" is a local path."""
    text = _text_of(path)
    return _SCHEME.match(text) is not None and not text.lower().startswith("file:")


def named_file(name: str, folder: str | Path) -> str:
    """Returns the path or address of a file that data names, without opening it.

    Data may come from anybody, so a name has one of three forms: a path relative to the data's
    folder, an absolute local path, or an address with the scheme of the data's own address.

    Raises:
        InputError: for an address of another scheme, one that chains file systems by "::", or
            control characters.
    """
    # As pathlib will spell it: "./http://host" becomes "http:/host".
    plain = str(PurePosixPath(name.strip()))
    scheme, own = _SCHEME.match(plain), _SCHEME.match(os.fspath(folder))
    other = scheme and (
        name != name.strip() or scheme[0].lower() != (own[0].lower() if own else "file:/")
    )
    if other or "::" in name or _CONTROL.search(name):
        raise InputError(
            f"the data names the file {name[:200]!r}; give a path, or an address of the data's "
            'own scheme, without "::"'
        )
    if not is_remote(folder):
        return str(local_path(name) if scheme else local_path(folder) / name)
    if "::" in os.fspath(folder) and not scheme:
        raise InputError(
            f"{folder} chains file systems, where files that the data names cannot be found; copy "
            "the data to a local folder"
        )
    return name if scheme else f"{folder}/{name}"


# Characters of a path in a file. The system takes a few more.
LONGEST_PATH = 1024


def is_inside(name: object) -> bool:
    """Returns True if a name in a file is a path within that file's folder."""
    if not isinstance(name, str) or not name or _CONTROL.search(name):
        return False
    path = PurePosixPath(name)
    fits = all(len(part.encode()) <= LONGEST_NAME for part in path.parts)
    return fits and len(name) < LONGEST_PATH and not path.is_absolute() and ".." not in path.parts


def paths_below(folder: Path) -> list[tuple[str, ...]]:
    """Returns the parts of the path of each file and folder below a folder, in order.

    Links to folders are followed, except for one to a folder that the path to it passes through.
    Hidden names are left out.

    Returns:
        For each file the names below the folder; for each folder they end with "".

    Raises:
        InputError: for a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    paths: list[tuple[str, ...]] = []
    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [
            name
            for name in folders
            if not is_hidden(name) and not _goes_in_circles(Path(place, name))
        ]
        parts = Path(place).relative_to(folder).parts
        paths += [(*parts, name, "") for name in folders]
        paths += [(*parts, name) for name in files if not is_hidden(name)]
    return sorted(paths)


def _goes_in_circles(path: Path) -> bool:
    """Returns True for a link to a folder that the path passes through."""
    if not path.is_symlink():
        return False
    return path.resolve() in {above.resolve() for above in path.absolute().parents}


def is_hidden(name: str) -> bool:
    """Returns True for a name that is no part of the data, such as those that macOS adds."""
    return name.startswith((".", "__MACOSX"))


def stamp(file: Path) -> dict[str, Any]:
    """Returns size and sha256 of a file, as `{"bytes": int, "sha256": str}`."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def no_link(path: str | Path, flags: int) -> int:
    """Opens a file as `os.open` does, but never through a symbolic link: `open(opener=no_link)`.

    Raises:
        OSError: if the path is a link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, f"{path} is a symbolic link; remove it") from error
        raise


# The disk is full or read-only, or the path is not one to write to.
_NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raises `InputError` for a file or folder that the block cannot write."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        if error.filename is not None and not _is_part(Path(os.fsdecode(error.filename)), path):
            # Of another file that the block reads or writes.
            raise InputError(f"cannot open {error.filename}: {error.strerror}") from error
        raise InputError(
            f"cannot write {path}: {error.strerror}; make room or give another directory"
        ) from error


def _is_part(named: Path, path: str | Path) -> bool:
    """Returns True if `named` is the path, its temporary file, below these, or a parent."""
    named, path = named.absolute(), Path(path).absolute()
    if path.is_relative_to(named):
        return True
    first = named.relative_to(path.parent).parts[0] if named.is_relative_to(path.parent) else ""
    return first == path.name or first.startswith(f".{path.name}.")


def atomic_write(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Replaces `path` by the file that `write(temporary)` makes, or leaves it unchanged.

    The umask of the process decides the permissions. A link is replaced, not followed.

    Raises:
        InputError: if the disk is full, or the path cannot be written.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path, "tmp", path.suffix)
        os.close(no_link(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            write(temporary)
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yields an empty folder to fill; it replaces `path` if the block raises nothing.

    The former folder stays whole until the new one is on the disk, and is restored if the exchange
    fails. The umask of the process decides the permissions.

    Yields:
        The folder.

    Raises:
        InputError: if the disk is full, or the path cannot be written.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path, "tmp")
        temporary.mkdir()
        try:
            yield temporary
            for entry in (*temporary.rglob("*"), temporary):
                sync(entry)
            _exchange(temporary, path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _beside(path: Path, kind: str, suffix: str = "") -> Path:
    """Returns a new hidden name in the folder of a path; `_LEFTOVER` matches all such names."""
    return path.with_name(f".{path.name}.{kind}.{secrets.token_hex(8)}{suffix}")


def _exchange(new: Path, path: Path) -> None:
    if not path.exists():
        os.replace(new, path)
        return
    old = _beside(path, "old")
    os.replace(path, old)
    try:
        os.replace(new, path)
    except OSError:
        os.replace(old, path)
        raise
    _remove(old)


def remove_directory(path: Path) -> None:
    """Removes a directory; other processes never find a part of it under its name."""
    hidden = path.with_name(f".{path.name}.removed")
    try:
        os.replace(path, hidden)
    except OSError:
        return
    _remove(hidden)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files and directories that a killed process left in a folder.

    A directory that was moved away for its successor is restored if there is no successor.

    Args:
        folder: locked by this process: another process may still be writing otherwise.
    """
    for entry in folder.iterdir():
        if (leftover := _LEFTOVER.fullmatch(entry.name)) is None:
            continue
        target = folder / leftover["name"]
        with suppress(OSError):
            if leftover["kind"] == "old" and not os.path.lexists(target):
                os.replace(entry, target)
            else:
                _remove(entry)


def _remove(entry: Path) -> None:
    """Removes a file, a directory with its contents, or a link but not its target."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def lock(directory: Path) -> bool:
    """Locks a directory against other processes until `unlock`, or until this process ends.

    Returns:
        True if it was not locked by this process before.

    Raises:
        InputError: if another process has locked it, or it cannot be written.
    """
    key = directory.resolve()
    if key in _LOCKS:
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = no_link(directory / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise InputError(
            f"cannot write to {directory}: {error.strerror}; give another directory"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise InputError(
            f"another run is using {directory}; wait for its end or give another directory"
        ) from error
    _LOCKS[key] = handle
    return True


def unlock(directory: Path) -> None:
    """Unlocks a directory that this process has locked."""
    if (handle := _LOCKS.pop(directory.resolve(), None)) is not None:
        os.close(handle)


# Weights and images hardly shrink, so a file that unpacks to far more looks like an attack.
MOST_EXPANSION = 100
ALWAYS_ALLOWED = 2**26


def check_zip(archive: zipfile.ZipFile, path: Path) -> None:
    """Raises `InputError` for a zip file that looks malicious.

    Readers differ in the member that they take of several with one name. The sum of all members is
    compared with the size of the file, since members may also overlap.
    """
    twice = [name for name, count in Counter(archive.namelist()).items() if count > 1]
    if twice:
        raise InputError(f"{path} holds {', '.join(twice[:8])} more than once; write it again")
    paths = map(PurePosixPath, archive.namelist())
    if outside := [str(p) for p in paths if p.is_absolute() or ".." in p.parts]:
        raise InputError(f"{path} holds {outside[0]!r}, a place outside of it; write it again")
    size = sum(entry.file_size for entry in archive.infolist())
    packed = path.stat().st_size
    if size > max(MOST_EXPANSION * packed, ALWAYS_ALLOWED):
        raise InputError(
            f"{path} has {packed:,} bytes and would unpack to {size:,}; at most "
            f"{MOST_EXPANSION} times as many are unpacked: write it again without compression"
        )


# gzip, shuffle and checksums come with HDF5; others are code that it looks for on the disk.
_LAST_OWN_FILTER = 3


def hdf5_arrays(file: Any, path: Path, most: float = math.inf) -> Iterator[tuple[str, Any]]:
    """Yields every array of a file that h5py has opened.

    Yields:
        Path and dataset.

    Raises:
        InputError: for an array that is not in this file, or far larger than its part of it, or
            more groups and arrays than `most`.
    """
    import h5py

    groups, seen = [("", file)], set()
    while groups:
        prefix, group = groups.pop()
        for name in group:
            where = f"{prefix}{name}"
            if type(group.get(name, getlink=True)) is not h5py.HardLink:
                raise InputError(f"{path}: {where} points to another place; save the model again")
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in seen:
                raise InputError(f"{path}: {where} appears twice; save the model again")
            seen.add(address)
            if len(seen) > most:
                raise InputError(
                    f"{path} holds over {most} groups and arrays, far more than the model; give "
                    "the model's own file"
                )
            if isinstance(item, h5py.Group):
                groups.append((f"{where}/", item))
                continue
            if not isinstance(item, h5py.Dataset):
                raise InputError(f"{path}: {where} is not an array; save the model again")
            plan: Any = item.id.get_create_plist()
            filters = [plan.get_filter(i)[0] for i in range(plan.get_nfilters())]
            if item.external or item.is_virtual or max(filters, default=0) > _LAST_OWN_FILTER:
                raise InputError(
                    f"{path}: the values of {where} are not in the file, or not readable without "
                    "more code; save the model again"
                )
            if item.nbytes > max(MOST_EXPANSION * item.id.get_storage_size(), ALWAYS_ALLOWED):
                raise InputError(f"{path}: {where} is not stored as a whole; save the model again")
            yield where, item
