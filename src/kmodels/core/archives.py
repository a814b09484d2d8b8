"""Zip archives from elsewhere, looked over before anything in them is unpacked."""

import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

from kmodels.core.errors import InputError

# Weights and images hardly shrink: what unpacks to far more is there to use up memory and time.
MOST_EXPANSION = 100
ALWAYS_ALLOWED = 2**26


def check_zip(archive: zipfile.ZipFile, path: Path) -> None:
    """Raises `InputError` for an archive that no program meant well wrote.

    Members of one name mean different things to different readers, and names that lead out of a
    folder are for those that unpack there. The sum of all members is compared with the size of the
    file, since members may also overlap.

    Args:
        archive: opened.
        path: path of the file.
    """
    twice = [name for name, count in Counter(archive.namelist()).items() if count > 1]
    if twice:
        raise InputError(f"{path} holds {', '.join(twice[:8])} more than once; write it again")
    if outside := [name for name in archive.namelist() if _leads_out(name)]:
        raise InputError(f"{path} holds {outside[0]!r}, a place outside of it; write it again")
    size = sum(entry.file_size for entry in archive.infolist())
    held = path.stat().st_size
    if size > max(MOST_EXPANSION * held, ALWAYS_ALLOWED):
        raise InputError(
            f"{path} has {held:,} bytes and would unpack to {size:,}; at most "
            f"{MOST_EXPANSION} times as many are unpacked: write it again without compression"
        )


def _leads_out(name: str) -> bool:
    place = PurePosixPath(name)
    return place.is_absolute() or ".." in place.parts
