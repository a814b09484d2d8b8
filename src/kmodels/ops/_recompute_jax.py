"""Blocks and rows whose backward pass recomputes them, on JAX.

XLA on a CPU would start unrolled blocks as early as it can, and hold them all. With one loop per
width, each loop would have sums of the gradients of all keys, and XLA would hold those of all loops
at once.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._recompute import Block, loops


def blockwise(
    function: Callable[..., Any],
    blocks: Sequence[Block],
    tensors: tuple[Any, Any, Any],
    others: Any,
) -> Any:
    """See `RecomputeBackend.blockwise`; a block takes the branch of its width."""
    outputs = []
    for size, group in groupby(loops(blocks), lambda loop: loop.size):
        same = list(group)

        def branch(width: int, size: int = size) -> Callable[..., Any]:
            return lambda start, low: function(start, low, size, width, *tensors, others)

        branches = [branch(loop.width) for loop in same]
        places = [(number, *at) for number, loop in enumerate(same) for at in loop.places]

        @jax.checkpoint
        def body(place: jax.Array, branches: list[Callable[..., Any]] = branches) -> Any:
            return lax.switch(place[0], branches, place[1], place[2])

        computed = jnp.moveaxis(lax.map(body, jnp.asarray(places, "int32")), 0, 1)
        batch, count, rows, *rest = computed.shape
        outputs.append(computed.reshape(batch, count * rows, *rest))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def by_rows(function: Callable[..., Any], parts: Sequence[Any], others: Sequence[Any]) -> Any:
    """See `RecomputeBackend.by_rows`."""
    return lax.map(jax.checkpoint(lambda part: function(*part, *others)), tuple(parts))
