"""Memory that is free within the process goes back to the system."""

import ctypes


def malloc_trim() -> None:
    """Asks the C library for it where that is glibc, which keeps what small pieces took."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # another C library
