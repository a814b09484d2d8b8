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


def has_tf32() -> bool:
    """Returns True if float32 products can be computed in TF32."""
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        return details.get("compute_capability", (0, 0))[0] >= 8
    return False


def is_cpu() -> bool:
    """Returns True if there is no accelerator."""
    return not tf.config.list_physical_devices("GPU")


def threads() -> int:
    """Returns the number of threads of an operation; 0 means one per CPU of the process."""
    return tf.config.threading.get_intra_op_parallelism_threads()
