"""Variables of which each replica of a `tf.distribute` strategy has a copy, or an addend."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    import keras


def in_parts(variable: "keras.Variable") -> bool:
    """See `gather`: no strategy that kmodels takes cuts a variable."""
    return False


def whole(variable: "keras.Variable") -> Any:
    """See `gather`: one of equal copies, or the sum of what replicas count by themselves."""
    value = variable.value
    return value.read_value() if isinstance(value, tf.distribute.DistributedValues) else value
