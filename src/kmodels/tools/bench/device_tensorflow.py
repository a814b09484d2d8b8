"""The device that TensorFlow runs on, for `kmodels bench`."""

import tensorflow as tf


def has_tf32() -> bool:
    """Returns whether float32 products can be computed in TF32."""
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        return details.get("compute_capability", (0, 0))[0] >= 8
    return False


def is_cpu() -> bool:
    """Returns whether there is no accelerator."""
    return not tf.config.list_physical_devices("GPU")


def threads() -> int:
    """Returns the threads of operations; 0 for one per CPU that the process may use."""
    return tf.config.threading.get_intra_op_parallelism_threads()
