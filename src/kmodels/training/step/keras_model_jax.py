"""The training step on JAX."""

from typing import Any

import jax
import keras

from kmodels.core import keras_internals
from kmodels.training.loop import Loop


class Model(keras_internals.OwnSpecs, Loop, keras.Model):
    """Keras' model, built for the dtypes that JAX makes of those of a batch.

    JAX holds 64-bit numbers in 32 bits unless it is told not to. Keras asks it for shapes in the
    dtypes of the batch as it comes, and from version 0.12 on JAX warns of each int64 label.
    """

    def spec_of(self, x: Any) -> keras.KerasTensor:
        """Returns the shape of an array of a batch, and the dtype that it has on JAX."""
        dtype = jax.dtypes.canonicalize_dtype(keras.backend.standardize_dtype(x.dtype))
        return keras.KerasTensor(x.shape, dtype.name)
