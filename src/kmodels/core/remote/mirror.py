"""Checkpoints at an address of remote storage: a local directory of them that is kept equal.

Checkpoints are written, verified and read in the local one. Each checkpoint is published when it is
whole. Before a run begins, the published ones replace those in the directory.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from kmodels.core.files import is_remote, local_path, remove_directory
from kmodels.core.remote.address import open_address
from kmodels.core.remote.fetch import fetch_published, holds_file, list_published
from kmodels.core.remote.publish import publish, remove

# Addresses by the local directories that stand for them, in this process.
ADDRESSES: dict[Path, str] = {}
_MANIFEST = "manifest.json"


def local_directory(directory: str | Path) -> Path:
    """Returns the local directory of checkpoints that stands for an address.

    Args:
        directory: such as "gs://bucket/run". What stands for it lies in the user's cache, and is
            the same in all processes of this machine.

    Raises:
        InputError: where the address cannot be opened.
    """
    address = open_address(directory).address
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(address.encode()).hexdigest()[:16]
    return _stand_for(cache / "kmodels" / "checkpoints" / name, address)


def copy_to_read(directory: str | Path) -> Path:
    """Returns the directory, or of an address a temporary one with what is published there."""
    if not is_remote(directory):
        return local_path(directory)
    folder = Path(tempfile.mkdtemp(prefix="kmodels-checkpoints-"))
    pull(_stand_for(folder, open_address(directory).address))
    return folder


def pull(folder: Path) -> None:
    """Makes a local directory equal to what is published.

    Checkpoints that were not published, or that are damaged there, are not in it afterwards.

    Args:
        folder: folder of `ADDRESSES`, held by this run.

    Raises:
        InputError: where the storage cannot be read.
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
    """Publishes a checkpoint that is whole.

    Args:
        folder: folder of `ADDRESSES`.
        path: path of the new one in it.

    Raises:
        InputError: where it cannot be written; those that are published stay.
    """
    publish(path, f"{ADDRESSES[folder]}/{path.name}")


def remove_others(folder: Path, path: Path) -> None:
    """Removes published checkpoints that are older than one and no longer in the local directory.

    Args:
        folder: folder of `ADDRESSES`.
        path: path of the newest one.

    Raises:
        InputError: where the storage cannot be read.
    """
    address = ADDRESSES[folder]
    kept = {step.name for step in _steps(folder)}
    for name in list_published(address):
        if name < path.name and name not in kept:
            remove(f"{address}/{name}")


def _stand_for(folder: Path, address: str) -> Path:
    ADDRESSES[folder] = address.rstrip("/")
    return folder


def _steps(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
