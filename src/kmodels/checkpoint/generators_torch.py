"""torch's random generator of the host, from which its data loaders draw."""

from collections.abc import Mapping

import numpy as np
import torch


def capture() -> dict[str, np.ndarray]:
    """See `GeneratorsBackend`."""
    return {"torch": np.array(torch.get_rng_state().numpy())}


def restore(states: Mapping[str, np.ndarray]) -> None:
    """See `GeneratorsBackend`."""
    if "torch" in states:
        torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))
