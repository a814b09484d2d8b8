"""Writing files so that a crash or a full disk never costs what was there before."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Replaces `path` by the file that `write(temporary)` makes, or leaves it as it was.

    Args:
        path: the file to make or replace; its folder is made where it is missing.
        write: writes the whole file to the path it is given.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Gives an empty folder to fill; it takes the place of `path` when the block ends well.

    The former folder stays whole until the new one is on the disk, and comes back if the exchange
    fails half-way.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        os.chmod(temporary, 0o755)
        _exchange(temporary, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(new: Path, path: Path) -> None:
    if not path.exists():
        os.replace(new, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent)) / "old"
    os.replace(path, old)
    try:
        os.replace(new, path)
    except OSError:
        os.replace(old, path)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)
