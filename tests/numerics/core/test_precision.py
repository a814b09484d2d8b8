"""One switch for float32 products on every backend, and the limit on GPU memory."""

import keras
import pytest

import kmodels
from kmodels.core import runtime
from kmodels.core.errors import InputError
from refusals import refused


@pytest.fixture(autouse=True)
def _restore():
    yield
    kmodels.set_matmul_precision("default")


def _framework_setting() -> object:
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.config.jax_default_matmul_precision
    if backend == "torch":
        import torch

        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    import tensorflow as tf

    return tf.config.experimental.tensor_float_32_execution_enabled()


EXPECTED = {
    "jax": {"highest": "highest", "high": "high", "default": None},
    "torch": {"highest": ("highest", False), "high": ("high", True), "default": ("highest", True)},
    "tensorflow": {"highest": False, "high": True, "default": True},
}


@pytest.mark.parametrize("name", ["highest", "high", "default"])
def test_the_switch_reaches_the_framework(name: str) -> None:
    kmodels.set_matmul_precision(name)
    assert _framework_setting() == EXPECTED[keras.backend.backend()][name]
    assert runtime.matmul_precision()


@pytest.mark.once
def test_other_values_are_refused() -> None:
    with pytest.raises(InputError, match="got 'fast'; allowed: 'highest', 'high', 'default'"):
        kmodels.set_matmul_precision("fast")


@pytest.mark.once
@pytest.mark.parametrize("fraction", [0.0, 1.5, -1.0])
def test_memory_fraction_out_of_range(fraction: float) -> None:
    refused(r"it must be in \(0, 1\]", runtime.memory_fraction, fraction)


def test_memory_fraction_too_late() -> None:
    keras.ops.ones(()) + 1
    if keras.backend.backend() == "jax":
        refused("comes too late: jax has started its devices", runtime.memory_fraction, 0.5)
    else:  # torch can set it any time; TensorFlow without a GPU has nothing to limit
        runtime.memory_fraction(0.5)
