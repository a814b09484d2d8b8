"""Transforms of functions made of `keras.ops`: one program on JAX, PyTorch and TensorFlow.

Names and arguments of the transforms are JAX's, those of the loops `keras.ops`'. They go by what
the running backend has: `jax.*`, `torch.func` and `make_fx`, TensorFlow's tapes, accumulators,
`vectorized_map` and `tf.function`. They nest: `jit(vmap(grad(f)))`, `jvp(grad(f), ...)`.

Functions are pure: what comes in are arguments, what goes out is returned. A model takes part by
`model.stateless_call(weights, states, x)`. Arguments and results are tensors or trees of them, in
lists, tuples and dictionaries; NumPy arrays and variables are taken as tensors.

Where a backend cannot transform the body that an op of this package has for it, the op takes its
generic path inside the transform, by itself: on torch in derivatives and `vmap`, on JAX in `jvp`
and `hessian`, on TensorFlow in `vmap` and `hessian`.
"""

from kmodels.transforms.control import cond, fori_loop, scan, while_loop
from kmodels.transforms.derivatives import grad, hessian, jvp, value_and_grad, vjp
from kmodels.transforms.mapping import vmap
from kmodels.transforms.staging import Trace, jit, remat, trace

__all__ = [
    "Trace",
    "cond",
    "fori_loop",
    "grad",
    "hessian",
    "jit",
    "jvp",
    "remat",
    "scan",
    "trace",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
