"""torch's part of `kmodels.core.precision`."""

import torch


def set_matmul_precision(precision: str) -> None:
    """Sets torch's switch for products and cuDNN's for convolutions, which start with TF32."""
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def matmul_precision() -> str:
    """Returns the setting as torch names it, with cuDNN's."""
    convolutions = "tf32" if torch.backends.cudnn.allow_tf32 else "float32"
    return f"{torch.get_float32_matmul_precision()} (convolutions {convolutions})"


def lacks_float64() -> str | None:
    """Returns None: there is float64."""
    return None


def memory_fraction(fraction: float) -> bool:
    """Limits the caching allocator of each GPU, which torch can do at any time."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    return True
