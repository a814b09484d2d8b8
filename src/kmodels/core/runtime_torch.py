"""The machine that torch runs on."""

import torch


def name() -> str:
    """Returns kind and number of devices, such as "cpu x1"."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)} x{torch.cuda.device_count()}"
    return "cpu x1"


def peak_bytes() -> int | None:
    """Returns the peak memory of an accelerator in bytes, None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


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
