"""The device torch runs on."""

import torch


def name() -> str:
    """Returns kind and number of devices, such as "cpu x1"."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)} x{torch.cuda.device_count()}"
    return "cpu x1"


def peak_bytes() -> int | None:
    """Returns most memory an accelerator held, or None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def keep_compiled() -> None:
    """Does nothing: torch keeps it by itself."""


def has_tf32() -> bool:
    """Returns True if float32 products can be computed in TF32."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def is_cpu() -> bool:
    """Returns True if there is no accelerator."""
    return not torch.accelerator.is_available()


def threads() -> int:
    """Returns the number of threads of an operation."""
    return torch.get_num_threads()
