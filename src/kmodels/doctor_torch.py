"""torch's part of `kmodels.doctor`."""

import torch


def devices() -> list[str]:
    """GPUs if there are any, and the CPU with its threads."""
    count = torch.cuda.device_count()
    gpus = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count)]
    return [*gpus, f"cpu ({torch.get_num_threads()} threads)"]
