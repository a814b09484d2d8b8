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
