"""The device that JAX runs on, for `kmodels bench`."""

import jax


def has_tf32() -> bool:
    """Returns whether float32 products can be computed in TF32."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    return bool(capability) and float(capability) >= 8


def is_cpu() -> bool:
    """Returns whether there is no accelerator."""
    return jax.default_backend() == "cpu"


def threads() -> int:
    """Returns the threads of operations; 0 for one per CPU of the process, which XLA takes."""
    return 0
