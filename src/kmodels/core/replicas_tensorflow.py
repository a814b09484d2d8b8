"""Variables, random numbers and batch sizes of the replicas of a `tf.distribute` strategy."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmodels.core import keras_internals
from kmodels.core.types import Tree

# Odd and large: far from the number of calls, which Keras adds to the seed.
_STRIDE = 0x9E3779B1


def count() -> int:
    """Returns how many compute a part of each batch; 1 without a strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def inside() -> Any:
    """Returns the context of the replica that is being traced; None outside, or of one alone.

    Replicas share its `all_reduce` and `merge_call`.
    """
    return tf.distribute.get_replica_context() if count() > 1 else None


def share(rows: tf.Tensor) -> Any:
    """Returns this replica's rows over the rows that each would have, a float32 scalar.

    1 except for a batch that does not divide.

    Args:
        rows: that it has, an int scalar.
    """
    mine = tf.cast(rows, tf.float32)
    return mine * count() / inside().all_reduce(tf.distribute.ReduceOp.SUM, mine)


def draw_apart(active: bool) -> None:
    """Sets whether each replica draws its own random numbers from the seeds that all share.

    Seeds are state of the model, saved and compared like weights, so which replica draws counts
    when it draws.
    """
    keras_internals.change_draws(_apart if active else None)


def _apart(state: tf.Tensor) -> Any:
    if (replica := inside()) is None:
        return state
    offset = tf.cast(replica.replica_id_in_sync_group, tf.int64) * _STRIDE % (1 << 31)
    return state + tf.cast(tf.stack([offset, tf.zeros((), tf.int64)]), state.dtype)


def build(
    model: keras.Model,
    make: Callable[[Callable[[], Tree]], None],
    first: Callable[[], Tree],
    at_once: bool,
) -> None:
    """Calls `make` in the scope of the model's strategy, with the batch of one replica.

    Without a strategy the trace of the first step makes the same, so nothing is called unless
    `at_once` is set.
    """
    strategy = model.distribute_strategy
    scoped = tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy()
    if not scoped and not at_once:
        return

    def part_of_one() -> Any:
        # A mean of the replicas' batches, as Keras takes it, would not do for masks.
        local = strategy.experimental_local_results
        return keras.tree.map_structure(lambda x: local(x)[0], first())

    with strategy.scope():
        make(part_of_one)
