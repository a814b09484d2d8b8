"""Preprocessors inside tf.data, with any backend of Keras."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmodels.core.errors import InputError
from kmodels.data.pipeline.arrays import on_host


def call(compute: Callable[..., Any], spec_of: Callable[..., Any], *data: Any) -> Any:
    """Makes one step of the graph of NumPy code: `compute` of symbolic tensors, nested or None.

    The results are tensors with the structure, shapes and dtypes that `spec_of` returns for
    `keras.KerasTensor` in place of the data.
    """
    tensors = keras.tree.map_structure(lambda x: None if x is None else _tensor(x), data)
    promised = spec_of(*keras.tree.map_structure(_spec, tensors))
    wanted = keras.tree.flatten(promised)

    # Keras' trees flatten dictionaries in another order than they map them in, on torch.
    leaves = keras.tree.flatten(tensors)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        values = iter(arrays)
        filled = [None if x is None else _joined(x, values) for x in leaves]
        parts = keras.tree.pack_sequence_as(tensors, filled)
        results = keras.tree.flatten(compute(*parts))
        return [_array(x, spec.dtype) for x, spec in zip(results, wanted, strict=True)]

    inputs = [part for x in leaves if x is not None for part in _parts(x)]
    outputs = tf.numpy_function(run, inputs, [tf.as_dtype(spec.dtype) for spec in wanted])
    for tensor, spec in zip(outputs, wanted, strict=True):
        tensor.set_shape(spec.shape)
    return keras.tree.pack_sequence_as(promised, outputs)


def _tensor(x: Any) -> Any:
    if isinstance(x, tf.RaggedTensor):
        return x
    if isinstance(x, tf.SparseTensor) or (isinstance(x, tf.Tensor) and x.shape.rank is None):
        raise InputError(
            f"a preprocessor in tf.data got a {type(x).__name__} of unknown shape; give tensors "
            "whose number of axes is known, such as single examples before batch()"
        )
    return tf.convert_to_tensor(x)


def _parts(x: Any) -> list[tf.Tensor]:
    """Returns the tensors that a tensor consists of."""
    return [x.flat_values, *x.nested_row_splits] if isinstance(x, tf.RaggedTensor) else [x]


def _joined(x: Any, values: Iterator[np.ndarray]) -> Any:
    """Returns the value of a symbolic tensor from those of its parts."""
    parts = [next(values) for _ in _parts(x)]
    if not isinstance(x, tf.RaggedTensor):
        return parts[0]
    ragged: Any = tf.RaggedTensor
    return on_host(ragged.from_nested_row_splits(parts[0], parts[1:], validate=False))


def _spec(x: tf.Tensor | None) -> Any:
    return None if x is None else keras.KerasTensor(tuple(x.shape), x.dtype.name)


def _array(x: object, dtype: str) -> np.ndarray:
    return np.asarray(x, object if dtype == "string" else dtype)
