"""Batches for TensorFlow's step, which is called with one after the other.

With tf.data in front of it Keras compiles two functions, one inside the other, for a batch of
unknown size. Measured for a ViT-S/16 on a CPU, that takes 2 to 3 s more before the first step, 50
MiB more at the peak, and 16 ms a step for pages that its thread gives back and asks for again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kmodels.data.fit.device_put_tensorflow import placer


def keeps_pipeline(model: keras.Model) -> bool:
    """Returns whether batches go through tf.data, as under a strategy.

    A model that was made in the scope of a strategy keeps it when the scope has ended, and Keras
    asks any strategy, one of a single replica too, to distribute a `tf.data.Dataset`.
    """
    if model is None or model.steps_per_execution > 1 or tf.distribute.has_strategy():
        return True
    return model.distribute_strategy is not tf.distribute.get_strategy()


class Passes:
    """A data set that is iterated over once per epoch; batches are on the device."""

    def __init__(self, begin: Callable[[], Iterator[Any]]):
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return map(placer(), self._begin())
