"""JAX's part of `kmodels.doctor`."""

import jax


def devices() -> list[str]:
    """Local devices."""
    return [
        f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.local_devices()
    ]
