"""Batches on JAX's devices."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

FORKS = False


def ahead() -> int:
    """Returns the number of batches to prefetch: none on a CPU, whose cores the step needs."""
    return 0 if jax.default_backend() == "cpu" else 2


def begin_pass() -> None:
    """Does nothing."""


def placer(model: keras.Model | None, ahead: bool) -> Callable[[Any], Any]:
    """Returns a function that places a batch for the step.

    On one device the compiled step transfers the batch, unless batches are prefetched. On a mesh
    the parts of each batch go to their devices. Transfers run while the device computes.
    """
    distribution = keras.distribution.distribution()
    device: Any = getattr(jax.config, "jax_default_device")  # noqa: B009, set at run time

    def put(part: Any) -> Any:
        if part is None or (isinstance(part, np.ndarray) and part.dtype.kind in "OSU"):
            return part
        if distribution is None:
            return jax.device_put(part, device)
        layout = distribution.get_data_layout(part.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, part)

    if distribution is None and not ahead:
        return lambda batch: batch
    return lambda batch: keras.tree.map_structure(put, batch)


def for_keras(begin: Callable[[bool], Iterator[Any]]) -> Iterator[Any]:
    """Returns batches on the host: Keras transfers them without waiting."""
    return begin(False)


def busy(output: Any) -> Callable[[], bool] | None:
    """Returns a function that is True while the device is busy; None if there was no step."""
    if output is None or output.is_deleted():
        return None
    return lambda: not output.is_ready()
