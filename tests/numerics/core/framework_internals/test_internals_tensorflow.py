"""A contract for the private name of TensorFlow that `internals_tensorflow.py` has."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("needs TensorFlow", allow_module_level=True)

import tensorflow as tf

from kmodels.core import internals_tensorflow


def test_a_tape_records():
    assert not internals_tensorflow.may_record()
    with tf.GradientTape():
        assert internals_tensorflow.may_record()
