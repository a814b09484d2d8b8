"""Batches of one shape, for data whose size is not a multiple of the batch."""

from kmodels.data.pipeline.indexed import IndexedBatches, Numbered
from kmodels.data.pipeline.pipeline import Pipeline
from kmodels.data.pipeline.request import Method
from kmodels.data.pipeline.shard import BatchSharding, Shard
from kmodels.distribution import current


class WholeBatches(Pipeline):
    """Fills the last batch up with rows of no weight.

    A shorter last batch would be compiled again on JAX, and does not divide over a mesh. The other
    rows weigh a little more than 1, so that averages over the padded number of rows, which is how
    Keras averages losses, are averages over the real ones. Metrics must be `weighted_metrics`.
    Each process has its rows of every batch over a mesh.

    Args:
        loader: a `kmodels.data.ImageLoader` that does not shuffle.

    Attributes:
        samples: images of all processes.
    """

    def __init__(self, loader: IndexedBatches):
        plan = current()
        rule = BatchSharding() if plan is None else plan.rule()
        shard = Shard(Numbered(loader), rule, Method.EVALUATE, None)
        super().__init__(shard.source, shard=shard)
        self.loader = loader
