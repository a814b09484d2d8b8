"""TensorFlow's part of `kmodels.doctor`."""

import tensorflow as tf


def devices() -> list[str]:
    """Logical devices."""
    return [device.name for device in tf.config.list_logical_devices()]
