"""Work in blocks on JAX: loops over blocks of equal size, whose bodies are rematerialised.

Unrolled blocks would not do: on a CPU XLA starts each as early as it can, and holds them all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._attention_blockwise import Block, loops


def blockwise(
    function: Callable[..., Any],
    blocks: Sequence[Block],
    tensors: tuple[Any, Any, Any],
    others: Any,
) -> Any:
    """See `RecomputeBackend.blockwise`."""
    outputs = []
    for loop in loops(blocks):

        def body(place: jax.Array, size: int = loop.size, width: int = loop.width) -> Any:
            run = jax.checkpoint(function, static_argnums=(2, 3))
            return run(place[0], place[1], size, width, *tensors, others)

        found = lax.map(body, jnp.asarray(loop.places, "int32"))
        found = jnp.moveaxis(found, 0, 1)
        batch, count, rows, *rest = found.shape
        outputs.append(found.reshape(batch, count * rows, *rest))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)
