"""The error message for a device that has run out of memory."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kmodels.core.errors import InputError

if TYPE_CHECKING:
    import keras

# The names that JAX, torch and TensorFlow give it; none of their classes is imported.
_WORDS = ("resource_exhausted", "out of memory", "failed to allocate", "can't allocate memory")
_CLASSES = ("OutOfMemoryError", "ResourceExhaustedError", "MemoryError")


def is_out_of_memory(error: Exception) -> bool:
    """Returns True if a device has run out of memory, and no data worker on the host."""
    # TensorFlow raises a worker's error again as one of its own classes, with the same text.
    if isinstance(error, InputError) or "a data worker" in str(error):
        return False
    if any(kind.__name__ in _CLASSES for kind in type(error).__mro__):
        return True
    return any(word in str(error).lower() for word in _WORDS)


def out_of_memory(model: "keras.Model", batch_size: int) -> InputError:
    """Returns the error to raise instead: what is held by part, and what makes it less.

    Args:
        model: compiled.
        batch_size: rows of a step, over all devices.
    """
    trained = _mib(model.trainable_variables)
    parts = [
        f"parameters {_mib(model.weights):,.0f}",
        f"gradients {trained:,.0f}",
        f"optimizer {_mib(model.optimizer.variables):,.0f}",
    ]
    return InputError(
        f"out of memory: {', '.join(parts)} MiB, the rest is activations and logits of "
        f"{batch_size} rows; lower --batch-size and raise --accumulate, or give --remat block, "
        "--precision mixed_bfloat16 or a smaller --preset where the recipe has them; kmodels plan "
        "tells what fits"
    )


def _mib(variables: Iterable[Any]) -> float:
    sizes = (math.prod(v.shape) * _bytes(str(v.dtype)) for v in variables)
    return sum(sizes) / 2**20


def _bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
