"""Transforms of functions made of `keras.ops`: one program on JAX, PyTorch and TensorFlow.

Transforms have the names and arguments of JAX, loops those of `keras.ops`. They use the functions
of the backend: `jax.*`, `torch.func` and `make_fx`, TensorFlow's tapes, accumulators,
`vectorized_map` and `tf.function`. They nest: `jit(vmap(grad(f)))`, `jvp(grad(f), ...)`.

Functions must be pure: they depend on their arguments only, and have no side effects. Call models
by `model.stateless_call(weights, states, x)`. Arguments and results are tensors or trees of them,
in lists, tuples and dictionaries; NumPy arrays and variables are converted to tensors.

If a backend cannot transform its override of an op, the op uses its generic path inside the
transform: on torch in derivatives and `vmap`, on JAX in `jvp` and `hessian`, on TensorFlow in
`vmap` and `hessian`.
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
