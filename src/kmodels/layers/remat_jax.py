"""Rematerialisation on JAX."""

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
    """`fn(*args, **kwargs)`.

    The streams' new states leave the checkpointed function as results: what it assigned itself
    would be a tracer that has no meaning outside.
    """
    tensors, fill = tensors_apart(args, kwargs)
    # Outside of a call weights on a mesh come in parts: they are gathered in `run`, and again.
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
