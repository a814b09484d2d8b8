"""Batches for TensorFlow's devices."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import keras
import tensorflow as tf

FORKS = False


def ahead() -> int:
    """Returns the number of batches to prefetch: none on a CPU, whose cores the step needs."""
    return 2 if tf.config.list_physical_devices("GPU") else 0


def begin_pass() -> None:
    """Does nothing."""


def placer(model: keras.Model | None, ahead: bool) -> Callable[[Any], Any]:
    """Returns a function that places a batch for the step, under a strategy split by replica.

    A model that was built in the scope of a strategy keeps it after the scope.
    """
    strategy = tf.distribute.get_strategy() if model is None else model.distribute_strategy
    count = strategy.num_replicas_in_sync

    def put(part: Any) -> Any:
        if part is None or isinstance(part, tf.RaggedTensor | tf.SparseTensor):
            return part
        return part if isinstance(part, tf.distribute.DistributedValues) else tensor(part)

    def tensor(part: Any) -> Any:
        whole = tf.convert_to_tensor(part)
        if count == 1:
            return whole
        rows = -(-len(whole) // count)  # the first replicas have the larger parts

        def of_replica(context: Any) -> Any:
            first = context.replica_id_in_sync_group * rows
            return whole[first : first + rows]

        return strategy.experimental_distribute_values_from_function(of_replica)

    return lambda batch: keras.tree.map_structure(put, batch)


def for_keras(begin: Callable[[bool], Iterator[Any]]) -> Any:
    """Returns a `tf.data.Dataset`; sizes that differ in the first two batches are None."""
    first = [*islice(begin(False), 2)]

    def spec(part: Any, *more: Any) -> Any:
        if part is None:
            return tf.OptionalSpec(None)
        shapes = zip(*(one.shape[1:] for one in (part, *more)), strict=True)
        alike = [sizes[0] if len(set(sizes)) == 1 else None for sizes in shapes]
        return tf.TensorSpec([None, *alike], tf.as_dtype(tf.convert_to_tensor(part).dtype))

    signature = keras.tree.map_structure(spec, *first)
    passes = tf.data.Dataset.from_generator(lambda: begin(False), output_signature=signature)
    return passes.prefetch(tf.data.AUTOTUNE)


def busy(output: object) -> Callable[[], bool] | None:
    """Returns None: TensorFlow has no query that does not wait for the step."""
    return None
