"""The machine that torch runs on, and numbers that go between host and CUDA without a wait.

Keras makes a tensor of each number that it computes with: a learning rate, a number of rows, the 1
that is added to a counter. torch copies such a number from pageable memory, and waits until the
device has done all earlier work. A kernel that fills a tensor has the number among its arguments,
and a copy from pinned memory is ordered in the stream.

Reading an integer such as a seed or a count of batches waits as well. After one read the host keeps
count itself, unless somebody else writes into the tensor: torch counts changes in place, and a
value that replaces it is another tensor. Then the tensor is read again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kmodels.core import internals_torch, keras_internals
from kmodels.core.types import Tensor

# Elements up to which a list or an array goes through pinned memory, as shapes and states do.
FEW = 1024
_KINDS = frozenset({bool, int, float})


def name() -> str:
    """Returns kind and number of devices, such as "cpu x1"."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)} x{torch.cuda.device_count()}"
    return "cpu x1"


def peak_bytes() -> int | None:
    """Returns the peak memory of an accelerator in bytes, None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def device_bytes() -> int | None:
    """Returns the free bytes of the accelerator; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    # torch's allocator keeps freed memory for later tensors.
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + kept


def has_tf32() -> bool:
    """Returns True if float32 products can be computed in TF32."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def is_cpu() -> bool:
    """Returns True if there is no accelerator."""
    return not torch.accelerator.is_available()


def threads() -> int:
    """Returns the number of threads of an operation."""
    return torch.get_num_threads()


def memory_fraction(fraction: float) -> bool:
    """Limits the caching allocator of each GPU, which torch can do at any time."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    return True


def set_matmul_precision(precision: str) -> None:
    """Sets torch's switch for products and cuDNN's for convolutions, which start with TF32."""
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def matmul_precision() -> str:
    """Returns the setting as torch names it, with cuDNN's."""
    convolutions = "tf32" if torch.backends.cudnn.allow_tf32 else "float32"
    return f"{torch.get_float32_matmul_precision()} (convolutions {convolutions})"


def lacks_float64() -> None:
    """Returns None: there is float64."""


def keep_compiled() -> None:
    """Does nothing: torch caches compiled code by itself."""


def trim_after_compiling() -> None:
    """Does nothing: torch's compiler leaves little memory behind."""


def runs_traced() -> bool:
    """Returns False: Python runs each step, and `torch.compile` guards attributes itself."""
    return False


def tracing() -> bool:
    """Returns False: see `runs_traced`."""
    return False


# === Numbers of the host ===


def on_cuda() -> bool:
    """Returns True if Keras puts tensors on CUDA in this thread."""
    return torch.device(keras_internals.device()).type == "cuda"


def send_without_waiting() -> None:
    """Makes Keras send numbers without waiting in this process, if its device is CUDA."""
    # A ViT's step (AdamW, clip_norm, accuracy) sends eight numbers, seven of them within Keras'
    # losses, metrics and variables: without a change of its converter each would stop the host.
    if on_cuda():
        keras_internals.change_conversion(sent)


def sent(make: Callable[..., Any], x: Any, dtype: object = None) -> torch.Tensor | None:
    """Returns a tensor on the device, or None to leave the conversion to Keras.

    Args:
        make: Keras' function that makes a tensor.
        x: its value.
        dtype: its dtype, or None.
    """
    if torch.compiler.is_compiling() or internals_torch.in_trace():
        return None
    kind = type(x)
    few = kind in _KINDS or (kind is np.ndarray and x.size <= FEW) or _is_short(x)
    if not few or not on_cuda():
        return None
    host = on_host(make, x, dtype)
    device = keras_internals.device()
    if kind in _KINDS:
        return torch.full((), x, dtype=host.dtype, device=device)
    return pinned(host, torch.device(device))


def on_host(make: Callable[..., Any], x: object, dtype: object) -> torch.Tensor:
    """Returns Keras' tensor of a value on the CPU."""
    with keras.device("cpu"):
        return make(x, dtype)


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy on a device; the copy is ordered in the device's stream."""
    return host.pin_memory().to(device, non_blocking=True)


def put(array: np.ndarray | Tensor, device: torch.device) -> torch.Tensor:
    """Returns an array of the host on a device, without waiting for a running step."""
    tensor = torch.as_tensor(array)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return pinned(tensor, device)


def _is_short(x: object) -> bool:
    # Lists that Keras tracks are of another class, as those of a metric are.
    return isinstance(x, list | tuple) and len(x) <= FEW and all(type(n) in _KINDS for n in x)


# === Numbers of the device that the host has counted ===


class _Known(NamedTuple):
    """The integers of a tensor, and its count of changes at that time."""

    version: int
    numbers: tuple[int, ...]


# By tensor: copies of a model and values in a `StatelessScope` have other tensors.
_known = WeakTensorKeyDictionary()


def known(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the integers of a tensor if they were noted and it has not changed since."""
    entry = _known.get(tensor)
    if entry is None or entry.version != internals_torch.version_of(tensor):
        return None
    return entry.numbers


def note(tensor: torch.Tensor, numbers: Sequence[int]) -> None:
    """Notes the current integers of a tensor, for `known`."""
    version = internals_torch.version_of(tensor)
    if version >= 0:  # changes of a tensor of inference mode are not counted
        _known[tensor] = _Known(version, tuple(numbers))


def count(variable: keras.Variable) -> int:
    """Returns an integer variable; waits for the device only if its number is not known."""
    value = keras_internals.value_of(variable, cast=False)
    if (numbers := known(value)) is None:
        numbers = (int(value),)
        note(value, numbers)
    return numbers[0]
