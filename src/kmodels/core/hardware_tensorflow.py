"""The device TensorFlow runs on."""

import tensorflow as tf


def name() -> str:
    """Returns kind and number of devices, such as "cpu x1"."""
    devices = tf.config.list_logical_devices("GPU")
    if not devices:
        return f"cpu x{len(tf.config.list_logical_devices('CPU'))}"
    physical = tf.config.list_physical_devices("GPU")[0]
    kind = tf.config.experimental.get_device_details(physical).get("device_name", "gpu")
    return f"{kind} x{len(devices)}"


def peak_bytes() -> int | None:
    """Returns most memory an accelerator held, or None on a CPU."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def keep_compiled() -> None:
    """Does nothing: TensorFlow compiles nothing unless it is asked to."""
