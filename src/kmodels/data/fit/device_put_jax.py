"""Batches on JAX's devices."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

FORKS = False


def ahead() -> int:
    """Returns how many batches to prefetch: on a CPU they would take cores from the step."""
    return 0 if jax.default_backend() == "cpu" else 2


def placer() -> Callable[[Any], Any]:
    """Returns what puts a batch where the step wants it; ask for it in the thread that trains.

    Transfers continue beside the computation. Under `keras.distribution` a batch stays on the host:
    Keras cuts it up and sends the parts, and does not wait for them either.
    """
    if keras.distribution.distribution() is not None:
        return lambda batch: batch
    device: Any = getattr(jax.config, "jax_default_device")  # noqa: B009, set at run time

    def put(part: object) -> Any:
        kind = np.asarray(part).dtype.kind if isinstance(part, np.ndarray) else "f"
        return part if part is None or kind in "OSU" else jax.device_put(part, device)

    return lambda batch: keras.tree.map_structure(put, batch)


def busy(output: Any) -> Callable[[], bool] | None:
    """Returns whether the device is still at the last step of `fit`; None where it is at none."""
    if output is None or output.is_deleted():
        return None
    return lambda: not output.is_ready()
