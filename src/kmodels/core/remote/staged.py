"""A local directory or file to write, whatever the one that was asked for."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kmodels.core.files import atomic_write, is_remote, local_path
from kmodels.core.remote.address import open_address
from kmodels.core.remote.publish import publish, put_file


@contextmanager
def staged(directory: str | Path) -> Iterator[tuple[Path, Callable[[Path], Path]]]:
    """Gives a local directory to make, and a function that puts it where it was wanted.

    Args:
        directory: local, which is given as it is, or an address, which gives a temporary one.

    Raises:
        InputError: where the address cannot be opened, before anything is written.
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

    Args:
        path: path of the file, local or an address.
        write: writes the whole file to the local path that it is given, of the same suffix.

    Returns:
        The path, or the address.

    Raises:
        InputError: where the address cannot be opened, before anything is written, or the file
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
