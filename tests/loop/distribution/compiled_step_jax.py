"""The training step of a model as XLA compiled it for a device of the mesh."""

from typing import Any

import jax
import keras

from kmodels.core import keras_internals


def compiled_step(model: Any, batch: Any) -> Any:
    """Compiles the step of a model that lies on a mesh, for batches like the given one."""
    model.optimizer.build(model.trainable_variables)
    keras_internals.symbolic_build(model, lambda: batch)
    groups = (model.trainable_variables, model.non_trainable_variables)
    groups += (model.optimizer.variables, model.metrics_variables)
    state = tuple([variable.value for variable in group] for group in groups)
    layout_of = keras.distribution.distribution().get_data_layout
    placed = jax.tree.map(
        lambda array: jax.device_put(array, layout_of(array.shape).backend_layout), batch
    )
    shardings = (None, jax.tree.map(lambda array: array.sharding, state))
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=shardings)
    return step.lower(state, placed).compile()
