"""The device that torch runs on, for `kmodels bench`."""

import torch


def has_tf32() -> bool:
    """Returns whether float32 products can be computed in TF32."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def is_cpu() -> bool:
    """Returns whether there is no accelerator."""
    return not torch.accelerator.is_available()


def threads() -> int:
    """Returns the threads of operations."""
    return torch.get_num_threads()
