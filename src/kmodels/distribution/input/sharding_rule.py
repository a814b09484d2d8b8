"""The rows that each process feeds, by one rule for all data and all backends.

Shard k of S takes rows [kB/S, (k+1)B/S) of each global batch of B rows, in the order of one
process, so that a step sees what it would see there. Training leaves out a last batch that is not
full. Evaluation and prediction fill it up; the rows that fill weigh nothing, the others a little
more than 1, so that Keras' loss, a mean over all rows, is the mean over the real ones.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.fit import arrays
from kmodels.data.fit.batches import to_numpy
from kmodels.distribution import processes
from kmodels.distribution.mesh import Mesh, check_batch


@dataclass(frozen=True)
class BatchSharding:
    """Says which rows of each batch this process takes.

    Args:
        mesh: whose data and fsdp axes divide each global batch.
        shards: S, in how many parts the batches are fed.
        shard: k, the part of this process.
        own: the data holds the rows of this process alone.
    """

    mesh: Mesh = field(default_factory=Mesh)
    shards: int = 1
    shard: int = 0
    own: bool = False

    def rows(self, size: int) -> tuple[int, int]:
        """Returns where the rows to take of a batch begin and end.

        Args:
            size: rows of the batch as the data gives it.

        Raises:
            InputError: where the mesh does not divide the global batch.
        """
        check_batch(self.mesh, size * self.shards if self.own else size)
        if self.own:
            return 0, size
        return self.shard * size // self.shards, (self.shard + 1) * size // self.shards

    def extent(self, batches: int, samples: int, size: int) -> tuple[int, int, float]:
        """Returns how long evaluation is.

        Args:
            batches: that the data gives to this process.
            samples: in them.
            size: rows of a full batch, as the data gives it.

        Returns:
            Batches of each process, samples of all, and the weight of a sample.
        """
        if self.own:
            told = processes.all_gather_object("samples to evaluate", [batches, samples])
            copies = max(len(told) // self.shards, 1)
            batches, samples = max(one[0] for one in told), sum(one[1] for one in told) // copies
            size *= self.shards
        return batches, samples, batches * size / samples


def length(batch: tuple) -> int:
    """Returns how many rows a batch has.

    Raises:
        InputError: where its parts differ.
    """
    return arrays.length(batch)


def uneven(size: int, first: int) -> InputError:
    """Returns the error to raise for a batch of another size."""
    return InputError(
        f"a batch has {size} rows and the first {first}; give batches of one size, of which the "
        "last alone may be shorter"
    )


def filled(batch: tuple, wanted: int, real: int, weight: float | None) -> tuple:
    """Returns a batch with as many rows as in every process, and weights where some are filled.

    Args:
        batch: (x,), (x, y) or (x, y, sample_weight), at least a row.
        wanted: rows to give.
        real: how many of them are samples; the others repeat rows.
        weight: weight of a sample; 1 where no row of the epoch stands for none, None for no
            weights.

    Returns:
        The batch, with weights float32 (wanted,) where there were none.
    """
    there = len(keras.tree.flatten(batch)[0])
    if there != wanted:
        rows = np.arange(wanted) % there
        batch = _each(lambda leaf: to_numpy(leaf)[rows], batch)
    if weight is None or weight == 1.0:
        return batch
    factors = np.where(np.arange(wanted) < real, weight, 0.0).astype("float32")
    if len(batch) < 3 or batch[2] is None:
        return (*batch[:2], *(None,) * (2 - len(batch)), factors)

    def scaled(leaf: np.ndarray) -> np.ndarray:
        own = to_numpy(leaf)
        return own * factors.reshape(-1, *(1,) * (own.ndim - 1))

    return (*batch[:2], _each(scaled, batch[2]))


def digest(batch: Tree) -> str:
    """Returns a short hash of a batch, for processes to compare."""
    found = hashlib.sha256()
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            values = to_numpy(leaf) if hasattr(leaf, "shape") else np.asarray(leaf, dtype=object)
            found.update(f"{values.dtype} {values.shape}".encode())
            found.update(repr(values.tolist()).encode() if values.dtype == object else values.data)
    return found.hexdigest()[:16]


def _each(change: Callable[[Any], Any], tree: Tree) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else change(leaf), tree)
