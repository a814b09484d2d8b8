"""The machine that TensorFlow runs on."""

import subprocess

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
    """Returns the peak memory of an accelerator in bytes, None on a CPU."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def device_bytes() -> int | None:
    """Returns None with an accelerator, whose free memory is not reported; 0 without one."""
    return None if tf.config.list_physical_devices("GPU") else 0


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


def memory_fraction(fraction: float) -> bool:
    """Limits the logical device on each GPU; returns False once TensorFlow has its devices."""
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
    # TensorFlow reports the size of a device only after initialising it.
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [float(line) for line in lines]


def set_matmul_precision(precision: str) -> None:
    """Sets TensorFlow's one switch, TF32 or not, which is on at the start."""
    tf.config.experimental.enable_tensor_float_32_execution(precision != "highest")


def matmul_precision() -> str:
    """Returns True if TF32 is allowed."""
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    return "high (TF32 allowed)" if allowed else "highest"


def lacks_float64() -> None:
    """Returns None: there is float64."""


def keep_compiled() -> None:
    """Does nothing: TensorFlow compiles nothing unless it is asked to."""


def trim_after_compiling() -> None:
    """Does nothing: TensorFlow reports no compilations."""


def runs_traced() -> bool:
    """Returns True: a step runs without Python once it is traced."""
    return True


def tracing() -> bool:
    """Returns True if TensorFlow is tracing a function."""
    return tf.inside_function()
