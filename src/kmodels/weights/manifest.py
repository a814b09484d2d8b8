"""A list of files with their hashes, so that a flipped bit is found instead of loaded."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kmodels.core.errors import InputError
from kmodels.core.schema import read_json

NAME = "manifest.json"


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path) -> None:
    """Writes the hashes of all files that lie in a directory."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name != NAME)
    entries = {file.name: {"sha256": _hash(file), "bytes": file.stat().st_size} for file in files}
    (directory / NAME).write_text(json.dumps({"files": entries}, indent=2) + "\n")


def verify_manifest(
    directory: Path,
    needed: Sequence[str] = (),
    only: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
) -> None:
    """Compares each file with its hash.

    Args:
        directory: with a manifest.
        needed: files that it must list.
        only: files to compare; all by default.
        leave_out: files not to compare.

    Raises:
        InputError: names every file that is missing or was changed.
    """
    if not (directory / NAME).is_file():
        raise InputError(f"{directory} lacks {NAME}, so its files cannot be verified; copy it too")
    entries = read_json(directory / NAME).get("files")
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"{directory / NAME} lists no files; copy the directory again")
    problems = [f"{name} is not in {NAME}" for name in needed if name not in entries]
    for name, entry in entries.items():
        if name in leave_out or (only is not None and name not in only):
            continue
        file = directory / Path(name).name
        entry = entry if isinstance(entry, dict) else {}
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != entry.get("bytes"):
            problems.append(f"{name} has {file.stat().st_size} bytes, not {entry.get('bytes')}")
        elif _hash(file) != entry.get("sha256"):
            problems.append(f"the content of {name} was changed")
    if problems:
        raise InputError(
            f"{directory} is damaged: {'; '.join(problems)}; copy it again, "
            "or use an older checkpoint"
        )
