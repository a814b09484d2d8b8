"""A contract for each private name of JAX in `framework_internals/internals_jax.py`."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("needs JAX", allow_module_level=True)

import jax

from kmodels.core import internals_jax


def test_devices_are_open():
    jax.devices()
    assert internals_jax.backends_are_initialized() is True


def test_alone_there_is_one_process():
    assert (internals_jax.process_id(), internals_jax.process_count()) == (0, 1)
    assert internals_jax.coordination_client() is None


def test_cudnn_is_where_the_kernels_raise_without_it():
    from jax._src.cudnn import fused_attention_stablehlo as fused

    assert internals_jax.has_cudnn() is False  # with JAX for CPUs
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        fused.check_cudnn_version()
