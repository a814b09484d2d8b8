"""TensorFlow's part of `kmodels.core.precision`."""

import subprocess

import tensorflow as tf


def set_matmul_precision(precision: str) -> None:
    """TensorFlow has one switch, TF32 or not, and starts with it on."""
    tf.config.experimental.enable_tensor_float_32_execution(precision != "highest")


def matmul_precision() -> str:
    """Returns whether TF32 is allowed."""
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    return "high (TF32 allowed)" if allowed else "highest"


def lacks_float64() -> str | None:
    """Returns None: there is float64."""
    return None


def memory_fraction(fraction: float) -> bool:
    """Limits the logical device on each GPU; returns whether TensorFlow still can."""
    devices = tf.config.list_physical_devices("GPU")
    sizes = _gpu_memory_mb() if devices else []
    try:
        for device, size in zip(devices, sizes, strict=False):
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=int(size * fraction))
            tf.config.set_logical_device_configuration(device, [limit])
    except RuntimeError:  # raised once the devices are initialised
        return False
    return True


def _gpu_memory_mb() -> list[float]:
    # TensorFlow tells a device's size only after it has initialised it.
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [float(line) for line in lines]
