"""Directories written to remote storage, which has no renaming that is whole or nothing.

The files of a directory lie in a folder of a new name, and a small file names that folder, with
size and sha256 of each file in it:

    gs://bucket/model/published.json
    gs://bucket/model/20260101-120000-1a2b3c4d/config.json
    gs://bucket/model/20260101-120000-1a2b3c4d/model.safetensors

It is written last, by one request, so that readers see the former directory or the new one; what a
cut connection leaves behind is named by nothing.
"""

import hashlib
import json
import re
import time
import uuid
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.remote.address import Remote, open_address, telling

PUBLISHED = "published.json"
FORMAT = 1
VERSION = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


def publish(directory: Path, address: str | Path) -> None:
    """Writes a local directory to an address; readers see all of it at once, or nothing.

    Args:
        directory: with the files.
        address: address of the remote directory, which is made or replaced.

    Raises:
        InputError: where something cannot be written; what was published before stays.
    """
    target = open_address(address)
    version = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    listed = {file.relative_to(directory).as_posix(): stamp(file) for file in files}
    text = json.dumps({"format": FORMAT, "folder": version, "files": listed}, indent=1) + "\n"
    with telling("write", target.address):
        try:
            target.system.makedirs(f"{target.path}/{version}", exist_ok=True)
            for name, expected in listed.items():
                file = target / version / name
                if "/" in name:
                    target.system.makedirs(file.path.rpartition("/")[0], exist_ok=True)
                target.system.put_file(str(directory / name), file.path)
                # A storage may end a transfer early without an error.
                if (size := target.system.info(file.path)["size"]) != expected["bytes"]:
                    raise InputError(
                        f"{file.address} has {size:,} bytes after {expected['bytes']:,} were "
                        "written; write it again"
                    )
            target.system.pipe_file((target / PUBLISHED).path, text.encode())
        except BaseException:
            _remove_quietly(target / version)
            raise
    for other in _versions(target) - {version}:
        _remove_quietly(target / other)


def put_file(file: Path, address: str | Path) -> None:
    """Writes a local file to an address; readers see the former one or the new one.

    It is sent under another name first, since not every storage drops what a lost connection cut.

    Args:
        file: to send.
        address: address of the remote file, which is made or replaced.

    Raises:
        InputError: where it cannot be written; what was there before stays.
    """
    target = open_address(address)
    folder, _, name = target.path.rpartition("/")
    beside = Remote(target.system, f"{folder}/.{name}.{uuid.uuid4().hex[:8]}", target.address)
    size = file.stat().st_size
    with telling("write", target.address):
        try:
            if folder:
                target.system.makedirs(folder, exist_ok=True)
            target.system.put_file(str(file), beside.path)
            if (written := target.system.info(beside.path)["size"]) != size:
                raise InputError(
                    f"{target.address} has {written:,} bytes after {size:,} were written; write it "
                    "again"
                )
            target.system.mv(beside.path, target.path)
        except BaseException:
            _remove_quietly(beside)
            raise


def remove(address: str | Path) -> None:
    """Removes a published directory: what names it first, so that nobody meets half of it."""
    target = open_address(address)
    try:
        target.system.rm_file((target / PUBLISHED).path)
    except Exception:  # of whichever package; it may be gone, or stay for the next time
        return
    _remove_quietly(target)


def stamp(file: Path) -> dict[str, Any]:
    """Returns size and sha256 of a local file."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _versions(target: Remote) -> set[str]:
    try:
        target.system.invalidate_cache()
        found = target.system.ls(target.path, detail=False)
    except Exception:  # of whichever package: left-overs take room and no more
        return set()
    names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
    return {name for name in names if VERSION.fullmatch(name)}


def _remove_quietly(target: Remote) -> None:
    try:
        target.system.rm(target.path, recursive=True)
    except Exception:  # of whichever package: left-overs take room and no more
        pass
