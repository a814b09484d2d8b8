"""Facts about machine and versions that belong to every result."""

import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version

from kmodels.core.dispatch import backend, backend_module

_device = backend_module("kmodels.core.hardware")


def device_name() -> str:
    """What the backend runs on."""
    return backend() if _device is None else _device.name()


def peak_memory_mb() -> float:
    """Most memory used so far: the accelerator's, or the process's where there is none."""
    peak = None if _device is None else _device.peak_bytes()
    if peak is None:
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return round(peak / 2**20, 1)


def keep_compiled() -> None:
    """Keeps what JAX compiles on disk, so that the next run starts without compiling it again.

    In `JAX_COMPILATION_CACHE_DIR` where that is set, else in the user's cache folder. torch keeps
    what it compiles by itself, TensorFlow compiles nothing unless it is asked to.
    """
    keep = getattr(_device, "keep_compiled", None)
    if keep is not None:
        keep()


def versions() -> dict[str, str]:
    """Python's, and those of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in ("kmodels", "keras", "numpy", backend()):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            from kmodels import __version__

            found[package] = __version__ if package == "kmodels" else "unknown"
    return found
