"""The device JAX runs on."""

import os
from pathlib import Path

import jax

CACHE = "jax_compilation_cache_dir"


def name() -> str:
    """Returns kind and number of devices, such as "cpu x1"."""
    devices = jax.devices()
    return f"{devices[0].device_kind} x{len(devices)}"


def peak_bytes() -> int | None:
    """Returns most memory an accelerator held, or None on a CPU."""
    statistics = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    return None if not statistics else statistics.get("peak_bytes_in_use")


def keep_compiled() -> None:
    """Sets JAX's compilation cache, unless the environment or the user has set one."""
    if getattr(jax.config, CACHE) is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update(CACHE, str(home / "kmodels" / "jax"))


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
