"""Batches on JAX's devices."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

FORKS = False


def ahead() -> int:
    """Returns how many batches to prefetch: on a CPU they would take cores from the step."""
    return 0 if jax.default_backend() == "cpu" else 2


def begin_pass() -> None:
    """Does nothing."""


def placer(model: keras.Model | None, ahead: bool) -> Callable[[Any], Any]:
    """Returns the function that puts a batch where the step wants it.

    Transfers continue beside the computation. On one device they are left to the compiled step,
    unless there is a step to go beside. On a mesh the parts of each batch go to their devices.
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
    """Returns batches on the host: Keras puts them on the devices, and does not wait for them."""
    return begin(False)


def busy(output: Any) -> Callable[[], bool] | None:
    """Returns whether the device is still at the last step of `fit`; None where it is at none."""
    if output is None or output.is_deleted():
        return None
    return lambda: not output.is_ready()
