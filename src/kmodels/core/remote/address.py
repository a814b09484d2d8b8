"""Addresses of remote storage, and the file systems that fsspec has for them."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kmodels.core.errors import InputError

# "gs://bucket", and "gs:/bucket" as pathlib makes of it; one letter is a drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


class Remote(NamedTuple):
    """A file or directory of a remote storage.

    Attributes:
        system: fsspec's file system.
        path: within that.
        address: as the user gave it, maybe with a password: messages have it by `shown`.
    """

    system: Any
    path: str
    address: str

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self.system, f"{self.path}/{name}", f"{self.address}/{name}")


def open_address(address: str | Path) -> Remote:
    """Returns the file or directory at an address.

    Args:
        address: such as "gs://bucket/run", "s3://bucket/run" or "memory://run".

    Raises:
        InputError: where fsspec or the package that it needs for such addresses is missing, or
            there are no such addresses.
    """
    given = os.fspath(address)
    given = _SCHEME.sub(lambda found: f"{found[1].lower()}://", given, count=1).rstrip("/")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise InputError(
            f"{given} needs the package fsspec: pip install 'kmodels[remote]'"
        ) from error
    try:
        system, path = url_to_fs(given)
    except ImportError as error:
        raise InputError(f"{given} needs one more package: {_line(error)}") from error
    except ValueError as error:
        raise InputError(f"{given} cannot be opened: {_line(error)}") from error
    except Exception as error:  # such as missing credentials, of whichever package
        raise InputError(f"{given} cannot be opened: {_said(error)}") from error
    return Remote(system, path.rstrip("/"), given)


@contextmanager
def telling(action: str, address: str) -> Iterator[None]:
    """Makes one line of whatever a storage raises in the block.

    Args:
        action: "read", "write" or such.
        address: address of what is read or written.

    Raises:
        InputError: in place of any other exception.
    """
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
    return " ".join(str(error).split())[:300]
