"""The part of JAX in `kmodels parity --op`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def gradients(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[jax.Array]
) -> tuple[Any, Sequence[Any]]:
    """See `OpParityBackend.gradients`; compiled, as in a step."""
    everything = tuple(range(len(tensors)))
    gradients_of_all, rest = jax.jit(jax.grad(function, everything, has_aux=True))(*tensors)
    return rest, gradients_of_all
