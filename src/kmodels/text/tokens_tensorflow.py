"""Tokenizers inside a graph of TensorFlow, such as that of `tf.data.Dataset.map`."""

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from kmodels.core.errors import InputError

if TYPE_CHECKING:
    import keras


def tokenize(tokenizer: "keras.Layer", x: tf.Tensor) -> Any:
    """Returns ids of symbolic texts, a string tensor () or (B,).

    Returns a tensor (T,), or a ragged one (B, None); dense (B, T) if the tokenizer gives rows of
    one length.
    """
    x = tf.convert_to_tensor(x)
    if x.shape.rank not in (0, 1) or x.dtype != tf.string:
        raise InputError(
            f"a tokenizer in tf.data got {x.dtype.name} with {x.shape.rank} axes; give strings, "
            "single or batched once"
        )
    dtype, length = tokenizer.output_dtype, getattr(tokenizer, "sequence_length", None)
    kind = object if dtype == "string" else dtype
    if x.shape.rank == 0:
        (ids,) = tf.numpy_function(
            lambda text: [np.asarray(tokenizer.tokenize(text), kind)], [x], [tf.as_dtype(dtype)]
        )
        ids.set_shape((length,))
        return ids

    def rows(texts: np.ndarray) -> list[np.ndarray]:
        ids = tokenizer.tokenize(texts)
        flat = [token for row in ids for token in row]
        return [np.asarray(flat, kind), np.asarray([len(row) for row in ids], "int64")]

    flat, lengths = tf.numpy_function(rows, [x], [tf.as_dtype(dtype), tf.int64])
    flat.set_shape((None,))
    lengths.set_shape(x.shape)
    if length:
        return tf.ensure_shape(tf.reshape(flat, (-1, length)), (x.shape[0], length))
    ragged: Any = tf.RaggedTensor
    return ragged.from_row_lengths(flat, lengths, validate=False)


def detokenize(tokenizer: "keras.Layer", ids: tf.Tensor) -> Any:
    """Returns texts of symbolic ids, which are (T,), (B, T) or ragged (B, None)."""
    if isinstance(ids, tf.RaggedTensor):
        inputs = [ids.flat_values, ids.row_lengths()]
        shape = ids.shape[:1]
    else:
        ids = tf.convert_to_tensor(ids)
        inputs, shape = [ids], ids.shape[:-1]

    def texts(flat: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
        rows = flat if lengths is None else np.split(flat, np.cumsum(lengths)[:-1])
        return np.asarray(tokenizer.detokenize([*rows] if lengths is not None else rows), object)

    decoded = tf.numpy_function(texts, inputs, tf.string)
    decoded.set_shape(shape)
    return decoded
