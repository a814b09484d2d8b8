"""Memory that is free within the process goes back to the system."""

import ctypes
from typing import Protocol

from kmodels.core.dispatch import backend_module


class MallocBackend(Protocol):
    """The seam of a backend that returns its compiler's memory to the system."""

    def watch(self) -> None:
        """Trims the heap after each long compilation from now on."""
        ...


def watch() -> None:
    """Trims the heap after each long compilation from now on, where the backend reports them."""
    native = backend_module("kmodels.core.malloc", MallocBackend, optional=True)
    if native is not None:
        native.watch()


def malloc_trim() -> None:
    """Asks the C library for it where that is glibc, which keeps what small pieces took."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # another C library
