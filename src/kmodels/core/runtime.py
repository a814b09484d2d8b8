"""The machine that the backend runs on: its devices, memory, precision and compiled code."""

import ctypes
import resource
import sys
from pathlib import Path
from typing import Literal, Protocol, get_args

import keras
import numpy as np

from kmodels.core.dispatch import backend, backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike

MatmulPrecision = Literal["highest", "high", "default"]


class RuntimeBackend(Protocol):
    """The devices, switches and compiler of one backend."""

    def name(self) -> str:
        """Returns kind and number of devices, such as "cpu x1"."""
        ...

    def peak_bytes(self) -> int | None:
        """Returns the peak memory of an accelerator in bytes, None on a CPU."""
        ...

    def device_bytes(self) -> int | None:
        """Returns the free bytes of the accelerator; None if unknown, 0 without one."""
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

    def memory_fraction(self, fraction: float) -> bool:
        """Limits the share of each GPU's memory; returns False if it is too late for that."""
        ...

    def set_matmul_precision(self, precision: str) -> None:
        """Sets how float32 products and convolutions are computed: one of `MatmulPrecision`."""
        ...

    def matmul_precision(self) -> str:
        """Returns the setting in the backend's own words."""
        ...

    def lacks_float64(self) -> str | None:
        """Returns the reason why float64 becomes float32, with the remedy (a clause), or None."""
        ...

    def keep_compiled(self) -> None:
        """Caches compiled programs on disk, unless the user has set a cache."""
        ...

    def trim_after_compiling(self) -> None:
        """Calls `malloc_trim` after each long compilation from now on."""
        ...

    def runs_traced(self) -> bool:
        """Returns True if a step runs without Python once it is traced."""
        ...

    def tracing(self) -> bool:
        """Returns True if a function is being traced, so that arrays have no values."""
        ...


native = backend_module("kmodels.core.runtime", RuntimeBackend)


def device_name() -> str:
    """Returns kind and number of the backend's devices, such as "cpu x1"."""
    return native.name()


def peak_memory_mb() -> float:
    """Returns the peak memory in MiB: of the accelerator, or of the process on a CPU."""
    peak = native.peak_bytes()
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


def available_bytes() -> int | None:
    """Returns the free bytes of the device, on a CPU those of the host; None if unknown."""
    free = native.device_bytes()
    return host_bytes() if free == 0 else free


def width_of(dtype: str) -> int:
    """Returns the bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def memory_fraction(fraction: float) -> None:
    """Limits the share of each GPU's memory that this process takes; without a GPU it does nothing.

    Call it before anything runs on a device.

    Args:
        fraction: share of the memory, in (0, 1].

    Raises:
        InputError: if the fraction is out of range, or if the framework has its devices already.
    """
    if not 0.0 < fraction <= 1.0:
        raise InputError(f"memory_fraction got {fraction}; it must be in (0, 1].")
    if not native.memory_fraction(fraction):
        raise InputError(
            f"memory_fraction({fraction}) comes too late: {backend()} has started its devices; "
            "call it before making a tensor or a model."
        )


def malloc_trim() -> None:
    """Returns free memory of the process to the system, if the C library is glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass  # another C library


def set_matmul_precision(precision: MatmulPrecision) -> None:
    """Sets how float32 matrix products and convolutions are computed, on every backend alike.

    Call it before a model is built: a step that is compiled already keeps its precision. Products
    on a CPU are always exact.

    Args:
        precision: `"highest"` for float32 throughout, `"high"` to allow TF32 (10 bits of mantissa,
            several times faster on NVIDIA GPUs since Ampere), `"default"` for the framework's
            default.

    Raises:
        InputError: for any other value.
    """
    if precision not in get_args(MatmulPrecision):
        allowed = ", ".join(map(repr, get_args(MatmulPrecision)))
        raise InputError(f"set_matmul_precision got {precision!r}; allowed: {allowed}.")
    native.set_matmul_precision(precision)


def matmul_precision() -> str:
    """Returns the precision of float32 matrix products in the framework's own words."""
    return native.matmul_precision()


def check_policy(policy: DTypeLike) -> None:
    """Checks a dtype policy before a model is made with it.

    Args:
        policy: as Keras takes it; None is the global one.

    Raises:
        InputError: if Keras has no such policy, or if the policy or Keras' `floatx` is float64 and
            the backend would use float32.
    """
    try:
        wanted = keras.dtype_policies.get(policy)
    except (TypeError, ValueError):
        raise InputError(
            f"the dtype is {policy!r}; give float32, bfloat16, mixed_bfloat16 or another policy of "
            "Keras"
        ) from None
    for name, dtype in (("dtype", wanted.compute_dtype), ("floatx", keras.config.floatx())):
        if dtype == "float64" and (reason := native.lacks_float64()):
            raise InputError(f"{name} is float64, and {reason}; or choose {name} float32")


def check_channels_last() -> None:
    """Raises `InputError` if Keras' `image_data_format` is not "channels_last".

    Every model and loader of images calls it: a batch that is read in the wrong order may have a
    shape that raises no error.
    """
    if keras.config.image_data_format() != "channels_last":
        raise InputError(
            "Keras' image_data_format is 'channels_first'; images are (height, width, channels) "
            "here: call keras.config.set_image_data_format('channels_last')"
        )
