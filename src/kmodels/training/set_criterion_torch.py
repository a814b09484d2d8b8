"""The cheapest assignment on torch: SciPy's, on the host."""

import numpy as np
import torch

from kmodels.core.internals_torch import transformed


def on_host(cost: torch.Tensor, valid: torch.Tensor) -> torch.Tensor | None:
    """Returns the column of each row, (B, T); None without SciPy."""
    # Tensors of torch.func, and those of shapes alone, have none that NumPy could read.
    if cost.device.type == "meta" or transformed() is not None:
        return None
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return None
    costs, there = cost.detach().to("cpu", torch.float64).numpy(), valid.cpu().numpy()
    assigned = np.full(there.shape, -1, "int32")
    for row, matrix, own in zip(assigned, costs, there, strict=True):
        rows = np.flatnonzero(own)
        if rows.size:
            matched, columns = linear_sum_assignment(matrix[rows])
            row[rows[matched]] = columns
    return torch.from_numpy(assigned).to(cost.device)
