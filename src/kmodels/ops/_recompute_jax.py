"""Work in blocks on JAX: loops over blocks of equal size, whose bodies are rematerialised.

Unrolled blocks would not do: on a CPU XLA starts each as early as it can, and holds them all.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax import numpy as jnp

if TYPE_CHECKING:
    from kmodels.ops._attention_blockwise import Block

# Blocks share a loop if the widest sees at most this many times the keys of the narrowest.
SPREAD = 1.25


def blockwise(
    function: Callable[..., Any],
    blocks: Sequence["Block"],
    tensors: tuple[Any, Any, Any],
    others: Any,
) -> Any:
    """See `RecomputeBackend.blockwise`."""
    outputs = []
    for group in groups(blocks):
        size, width = group[0].size, max(block.width for block in group)
        # The last key stays; more in front, which the function hides, make widths equal.
        places = [(x.start, max(x.low + x.width - width, 0)) for x in group]

        def body(place: jax.Array, size: int = size, width: int = width) -> Any:
            run = jax.checkpoint(function, static_argnums=(2, 3))
            return run(place[0], place[1], size, width, *tensors, others)

        found = lax.map(body, jnp.asarray(places, "int32"))
        found = jnp.moveaxis(found, 0, 1)
        batch, count, rows, *rest = found.shape
        outputs.append(found.reshape(batch, count * rows, *rest))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def groups(blocks: Sequence["Block"]) -> list[list["Block"]]:
    """Returns the blocks in runs of one size and nearly one width."""
    found = [[blocks[0]]]
    for before, block in pairwise(blocks):
        widths = [x.width for x in (*found[-1], block)]
        if block.size == before.size and max(widths) <= SPREAD * min(widths):
            found[-1].append(block)
        else:
            found.append([block])
    return found
