"""Batches on torch's device."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

# Torch's threads survive that a DataLoader forks its workers.
FORKS = True


def ahead() -> int:
    """Returns the number of batches to prefetch.

    None on a CPU, whose cores the step needs, and whose generator dropout uses.
    """
    return 2 if _device().type == "cuda" else 0


def begin_pass() -> None:
    """Draws a number, as the DataLoader does in which Keras wraps all data.

    Dropout uses the same generator, so a run equals one of Keras' own `fit`.
    """
    torch.empty((), dtype=torch.int64).random_()


def placer(model: keras.Model | None, ahead: bool) -> Callable[[Any], Any]:
    """Returns a function that places a batch for the step.

    It copies from pinned memory without waiting: in the CUDA stream, the copy precedes the step.
    """
    device = _device()

    def put(part: Any) -> Any:
        if part is None or (torch.is_tensor(part) and part.device == device):
            return part
        if isinstance(part, np.ndarray):
            if part.dtype.kind in "OSU":
                return part
            part = part if part.flags.c_contiguous else part.copy()  # torch has no negative strides
        with keras.device("cpu"):
            tensor: Any = keras.ops.convert_to_tensor(part)
        if device.type != "cuda":
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)

    def place(batch: Any) -> Any:
        if any(isinstance(part, dict | list | tuple) for part in batch):
            return keras.tree.map_structure(put, batch)
        return tuple(map(put, batch))  # a fifth of the time

    return place


def for_keras(begin: Callable[[bool], Iterator[Any]]) -> Iterator[Any]:
    """Returns batches as tensors on the device."""
    return begin(True)


def busy(output: object) -> Callable[[], bool] | None:
    """Returns a function that is True while a GPU is busy; None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return lambda: not event.query()


def _device() -> torch.device:
    tensor: Any = keras.ops.convert_to_tensor(0.0)  # on the device of Keras, or of the user's scope
    return tensor.device
