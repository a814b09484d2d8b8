"""A variable that lies in parts over `fsdp` and is whole where a layer uses it.

Left alone, XLA has a choice when rows and weights are cut over the same devices, and mostly it
takes the wrong one: it gives each device all rows and a part of the width, so that activations
are summed over devices instead of weights gathered (in a small Gemma every activation was the
global batch's, and a step took five times the memory). Each read inside a layer therefore says that
the weight is whole there and its gradient in parts: an all-gather on the way forward, a
reduce-scatter on the way back (on a CPU an all-reduce, cut up), and batches that stay where they
are (Rajbhandari et al. 2020, section 5.3).
"""

from typing import Any

import jax
import keras
from jax.core import Tracer
from jax.custom_derivatives import linear_call
from jax.sharding import NamedSharding, PartitionSpec

from kmodels.core import keras_internals
from kmodels.layers.shard_granularity import in_use

constrain: Any = jax.lax.with_sharding_constraint


class Gathered(keras.Variable):
    """A `keras.Variable` with a layout; `value` is whole while a traced layer reads it.

    It has its compute dtype by then, so that bfloat16 goes over the wire.
    """

    @property
    def value(self) -> Any:
        """The value, gathered where a layer is traced."""
        found = super().value
        used = in_use() or keras_internals.current_call_context() is not None
        if not used or not isinstance(found, Tracer):
            return found
        parts = keras_internals.layout_of(self).backend_layout
        inner = (None if axis == "fsdp" else axis for axis in parts.spec)
        whole = NamedSharding(parts.mesh, PartitionSpec(*inner))
        return linear_call(
            lambda _, x: constrain(x, whole), lambda _, g: constrain(g, parts), (), found
        )
