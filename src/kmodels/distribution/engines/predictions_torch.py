"""Predictions of several torch processes: each gets all of them."""

from typing import Any

import keras
import numpy as np
import torch

from kmodels.core import processes
from kmodels.core.types import Tree


def begin(model: keras.Model) -> None:
    """Does nothing: each process predicts its own rows."""


def of_all(outputs: Tree, rows: int, shards: int) -> Any:
    """Returns the outputs of all, in the order of the data.

    Args:
        outputs: arrays whose rows are those of this process, nested.
        rows: rows of a batch that each process feeds.
        shards: how many processes feed other rows.
    """
    if shards == 1:
        return outputs
    found: list[Any] = [None] * processes.count()
    torch.distributed.all_gather_object(found, outputs)
    # Processes that feed the same rows stand next to each other.
    found = found[:: len(found) // shards]

    def woven(*leaves: np.ndarray) -> np.ndarray:
        cut = [leaf.reshape(-1, rows, *leaf.shape[1:]) for leaf in leaves]
        return np.stack(cut, axis=1).reshape(-1, *leaves[0].shape[1:])

    return keras.tree.map_structure(woven, *found)
