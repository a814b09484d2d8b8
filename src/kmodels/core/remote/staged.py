"""A local directory to write, whatever the one that was asked for."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kmodels.core.files import local_path
from kmodels.core.remote.address import is_remote, open_address
from kmodels.core.remote.publish import publish


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
