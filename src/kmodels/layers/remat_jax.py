"""Gradient checkpointing on JAX."""

from collections.abc import Callable
from typing import Any

import jax
import keras

from kmodels.core import keras_internals
from kmodels.layers.remat import tensors_apart


def call(
    layer: keras.Layer,
    fn: Callable[..., Any],
    seeds: list[Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """See `RematBackend.call`.

    The new states of the random streams are results of the checkpointed function: a state that it
    assigned itself would be a leaked tracer.
    """
    tensors, fill = tensors_apart(args, kwargs)
    # Outside of a call, weights on a mesh are sharded: they are gathered in `run`, both times.
    with keras_internals.no_autocast(), keras_internals.call_context(None):
        values = [(variable, variable.value) for variable in layer.variables]

    def run(*tensors: jax.Array) -> tuple[Any, list[Any]]:
        again, named = fill(*tensors)
        with keras.StatelessScope(state_mapping=values) as scope:
            output = fn(*again, **named)
        return output, [scope.get_current_value(seed) for seed in seeds]

    output, states = jax.checkpoint(run)(*tensors)
    for seed, state in zip(seeds, states, strict=True):
        seed.assign(state)
    return output
