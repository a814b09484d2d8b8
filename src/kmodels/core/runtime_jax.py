"""The machine that JAX runs on."""

import os
from pathlib import Path

import jax
from jax import monitoring
from jax.core import Tracer

from kmodels.core import internals_jax, runtime

CACHE = "jax_compilation_cache_dir"
COMPILED = "/jax/core/compile/backend_compile_duration"
# Seconds of compiling below which there is little memory to return.
LONG = 1.0


def name() -> str:
    """Returns kind and number of devices, such as "cpu x1"."""
    devices = jax.devices()
    return f"{devices[0].device_kind} x{len(devices)}"


def peak_bytes() -> int | None:
    """Returns the peak memory of an accelerator in bytes, None on a CPU."""
    statistics = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    return None if not statistics else statistics.get("peak_bytes_in_use")


def device_bytes() -> int | None:
    """Returns the free bytes of the accelerator; None if unknown, 0 without one."""
    if jax.default_backend() == "cpu":
        return 0
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def has_tf32() -> bool:
    """Returns True if float32 products can be computed in TF32."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    return bool(capability) and float(capability) >= 8


def is_cpu() -> bool:
    """Returns True if there is no accelerator."""
    return jax.default_backend() == "cpu"


def threads() -> int:
    """Returns 0: XLA uses one thread per CPU of the process."""
    return 0


def memory_fraction(fraction: float) -> bool:
    """Sets the variable that XLA's client reads at its start; returns False if it has started."""
    if internals_jax.backends_are_initialized():
        return False
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(fraction)
    return True


def set_matmul_precision(precision: str) -> None:
    """Sets `jax_default_matmul_precision`; `None` is JAX's default."""
    jax.config.update("jax_default_matmul_precision", None if precision == "default" else precision)


def matmul_precision() -> str:
    """Returns the setting as JAX names it."""
    return getattr(jax.config, "jax_default_matmul_precision") or "default"  # noqa: B009


def lacks_float64() -> str | None:
    """Returns the reason why float64 becomes float32, with the remedy (a clause), or None."""
    if getattr(jax.config, "jax_enable_x64"):  # noqa: B009
        return None
    return "JAX has float32 alone until jax.config.update('jax_enable_x64', True) is called"


def keep_compiled() -> None:
    """Sets JAX's compilation cache, unless the environment or the user has set one."""
    if getattr(jax.config, CACHE) is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update(CACHE, str(home / "kmodels" / "jax"))


def trim_after_compiling() -> None:
    """Returns the memory of XLA's compiler to the system before a compiled program runs."""
    monitoring.register_event_duration_secs_listener(_compiled)


def _compiled(event: str, duration_secs: float, **_: object) -> None:
    if event == COMPILED and duration_secs > LONG:
        runtime.malloc_trim()


def runs_traced() -> bool:
    """Returns True: a step runs without Python once it is traced."""
    return True


def tracing() -> bool:
    """Returns True if JAX is tracing a function."""
    return isinstance(jax.numpy.zeros(()), Tracer)
