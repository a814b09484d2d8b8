"""Batches of one shape, for data whose size is not a multiple of the batch."""

from kmodels.data.fit.batches import IndexedBatches
from kmodels.data.fit.request import Method
from kmodels.distribution import current
from kmodels.distribution.input import fit
from kmodels.distribution.input.indexed import ShardedDataset
from kmodels.distribution.input.sharding_rule import BatchSharding


class WholeBatches(ShardedDataset):
    """Fills the last batch up with rows of no weight.

    A shorter last batch would be compiled again on JAX, and does not divide over a mesh. The other
    rows weigh a little more than 1, so that averages over the padded number of rows, which is how
    Keras averages losses, are averages over the real ones. Metrics must be `weighted_metrics`.
    Each process has its rows of every batch over a mesh.

    Args:
        loader: a `kmodels.data.ImageLoader` that does not shuffle.
    """

    def __init__(self, loader: IndexedBatches):
        plan = current()
        super().__init__(
            loader, BatchSharding() if plan is None else fit.rule(plan), Method.EVALUATE
        )
        self.loader = loader
