"""A contract for each private name of JAX in `framework_internals/internals_jax.py`."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("needs JAX", allow_module_level=True)

import jax

from kmodels.core.framework_internals import internals_jax


def test_devices_are_open():
    jax.devices()
    assert internals_jax.backends_are_initialized() is True


def test_alone_there_is_one_process():
    assert (internals_jax.process_id(), internals_jax.process_count()) == (0, 1)
    assert internals_jax.coordination_client() is None
