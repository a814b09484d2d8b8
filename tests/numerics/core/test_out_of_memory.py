"""A device without memory left is told in one line, with the parts and the flags."""

import keras
import pytest

from kmodels.core.errors import is_out_of_memory, out_of_memory


class ResourceExhaustedError(RuntimeError):
    """As TensorFlow calls it."""


@pytest.mark.once
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (ResourceExhaustedError("OOM when allocating tensor"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("room"), False),
    ],
)
def test_it_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_line_has_parts_and_flags():
    inputs = keras.Input((1024,))
    model = keras.Model(inputs, keras.layers.Dense(256, use_bias=False)(inputs))
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    said = str(out_of_memory(model, 64))
    assert "out of memory: parameters 1, gradients 1, optimizer 2 MiB" in said
    assert "of 64 rows; lower --batch-size and raise --accumulate" in said
    assert "\n" not in said
