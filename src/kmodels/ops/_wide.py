"""Arithmetic in float32 at least, and in float64 for float64.

On torch and JAX `keras.ops` takes float64 for float32 wherever two dtypes meet: `matmul` and `mean`
return or round to float32, `multiply` rounds a Python number. TensorFlow's GELU rounds its
constants. Operators between a tensor and a number do not.
"""

from typing import Any

from keras import ops

from kmodels.core.types import Tensor


def wide(x: Tensor) -> str:
    """Returns the dtype of exact arithmetic: float32, or float64 for float64 input."""
    return "float64" if ops.dtype(x) == "float64" else "float32"


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """(..., in) @ (in, out)."""
    if ops.dtype(x) == "float64":
        return ops.einsum("...i,io->...o", x, y)
    return ops.matmul(x, y)


def products(x: Tensor, y: Tensor) -> Any:
    """(N, rows, in) @ (N, in, out), each with its own."""
    if ops.dtype(x) == "float64":
        return ops.einsum("nri,nio->nro", x, y)
    return ops.matmul(x, y)


def mean(x: Tensor) -> Any:
    """Returns the mean over the last axis, which stays with length 1."""
    if ops.dtype(x) == "float64":
        return ops.sum(x, axis=-1, keepdims=True) / x.shape[-1]
    return ops.mean(x, axis=-1, keepdims=True)
