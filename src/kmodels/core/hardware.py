"""Facts about the machine that belong to every result."""

import resource
import sys
from pathlib import Path
from typing import Protocol

from kmodels.core.dispatch import backend, backend_module


class HardwareBackend(Protocol):
    """The device that one backend runs on."""

    def name(self) -> str:
        """Returns kind and number of devices, such as "cpu x1"."""
        ...

    def peak_bytes(self) -> int | None:
        """Returns the most memory that an accelerator held, None on a CPU."""
        ...

    def keep_compiled(self) -> None:
        """Keeps on disk what the backend compiles, unless the user said where or that it should."""
        ...

    def has_tf32(self) -> bool:
        """Returns True if float32 products can be computed in TF32."""
        ...

    def is_cpu(self) -> bool:
        """Returns True if there is no accelerator."""
        ...

    def threads(self) -> int:
        """Returns the number of threads of an operation; 0 means one per CPU of the process."""
        ...


_device = backend_module("kmodels.core.hardware", HardwareBackend, optional=True)


def device_name() -> str:
    """Returns what the backend runs on."""
    return backend() if _device is None else _device.name()


def peak_memory_mb() -> float:
    """Returns most memory used so far: the accelerator's, or the process's where there is none."""
    peak = None if _device is None else _device.peak_bytes()
    if peak is None:
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return round(peak / 2**20, 1)


def host_bytes() -> int | None:
    """Returns the free bytes of the host and its control group; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    free = [int(text.split("MemAvailable:")[1].split()[0]) * 1024]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or one without a limit
    return max(min(free), 0)


def keep_compiled() -> None:
    """Keeps what JAX compiles on disk, so that the next run starts without compiling it again.

    They lie in `JAX_COMPILATION_CACHE_DIR` if that is set, else in the user's cache folder. torch
    keeps what it compiles by itself, TensorFlow compiles nothing unless it is asked to.
    """
    if _device is not None:
        _device.keep_compiled()
