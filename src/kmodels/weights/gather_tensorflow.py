"""Variables of which each replica of a `tf.distribute` strategy has a copy, or an addend."""

from typing import Any

import tensorflow as tf


def in_parts(variable: Any) -> bool:
    """See `gather`: no strategy that kmodels takes cuts a variable."""
    return False


def whole(variable: Any) -> Any:
    """See `gather`: one of equal copies, or the sum of what replicas count by themselves."""
    value = variable.value
    return value.read_value() if isinstance(value, tf.distribute.DistributedValues) else value
