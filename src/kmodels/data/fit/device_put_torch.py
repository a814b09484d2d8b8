"""Batches on torch's device."""

from collections.abc import Callable
from typing import Any

import keras
import torch

# A forked worker of a DataLoader is safe beside torch's threads.
FORKS = True


def ahead() -> int:
    """Returns how many batches to prefetch.

    On a CPU they would take its cores from the step, and draw from the generator that dropout draws
    from.
    """
    return 2 if _device().type == "cuda" else 0


def placer() -> Callable[[Any], Any]:
    """Returns what puts a batch where the step wants it; ask for it in the thread that trains.

    From pinned memory, so that nobody waits for the copy: it has its place before the step that
    uses it in the stream.
    """
    device = _device()

    def put(part: object) -> Any:
        if part is None or (torch.is_tensor(part) and part.device == device):
            return part
        with keras.device("cpu"):
            tensor: Any = keras.ops.convert_to_tensor(part)
        if device.type != "cuda":
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)

    return lambda batch: keras.tree.map_structure(put, batch)


def busy(output: object) -> Callable[[], bool] | None:
    """Returns whether the device is still at what it was given; None where it computes at once."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return lambda: not event.query()


def _device() -> torch.device:
    tensor: Any = keras.ops.convert_to_tensor(0.0)  # Keras' choice, and the user's scope
    return tensor.device
