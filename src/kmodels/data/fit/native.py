"""Native: data that Keras has an adapter for, with its waits counted."""

from collections.abc import Iterator
from typing import Any

from kmodels.core import keras_internals
from kmodels.data.fit.data_wait import DataWaitTimer
from kmodels.data.fit.feed import InstrumentedData, keeps_pipeline, passes


class Native(InstrumentedData, keras_internals.DataAdapter):
    """Counts the waits for data that Keras has an adapter for.

    Args:
        adapter: Keras'.
        faster: what to say where steps wait for it.
    """

    def __init__(self, adapter: Any, faster: str | None = None):
        InstrumentedData.__init__(self, DataWaitTimer(faster=faster))
        self.adapter = adapter

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches of Keras' adapter."""
        return self.feed(self.adapter.get_jax_iterator())

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Returns the batches of Keras' adapter."""
        return self.feed(self.adapter.get_torch_dataloader())

    def get_tf_dataset(self) -> Any:
        """Returns Keras' dataset, or passes over it here, where waits are seen.

        A clock in the graph would need a thread of TensorFlow's beside the step's.
        """
        dataset = self.adapter.get_tf_dataset()
        if keeps_pipeline(self.model):
            return dataset
        return passes(lambda: self.feed(dataset))

    def set_epoch(self, epoch: int) -> None:
        """Tells the data which epoch comes next."""
        keras_internals.set_epoch(self.adapter, epoch)

    @property
    def num_batches(self) -> int | None:
        """Returns how many batches an epoch has, or None where that is not known."""
        return self.adapter.num_batches

    def on_epoch_begin(self) -> None:
        """Passes on that an epoch begins."""
        self.adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passes on that an epoch has ended."""
        self.adapter.on_epoch_end()
