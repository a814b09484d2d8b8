"""torch's generator on the host, from which its data loaders draw."""

from collections.abc import Mapping

import numpy as np
import torch


def capture() -> dict[str, np.ndarray]:
    """Returns its state."""
    return {"torch": np.array(torch.get_rng_state().numpy())}


def restore(states: Mapping[str, np.ndarray]) -> None:
    """Puts it back, where it was saved."""
    if "torch" in states:
        torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))
