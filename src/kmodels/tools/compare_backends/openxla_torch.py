"""The training step of the torch backend as one program of XLA, by torchax.

Keras' own step ends at `loss.backward()`, which torchax' tensors do not have: they hold values of
JAX, which differentiates them. The forward pass of the model, its loss and the optimizer's rule are
therefore traced on those tensors, and JAX makes the gradient in between.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch
import torchax  # pyright: ignore[reportMissingImports], of an environment of its own
from torchax import interop, tensor, view  # pyright: ignore[reportMissingImports]

# The device that torchax' tensors report.
DEVICE = "jax"
# Their memory is not torch's, so they report being abstract, and Keras would treat them as shapes
# without values.
for _kind in (tensor.Tensor, view.View):
    _kind.is_meta = property(lambda self: False)


def train(model: keras.Model, data: Iterable[Any], count: Callable[[Any], None]) -> None:
    """Trains a compiled model; its variables are left as they were."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    groups = (model.trainable_variables, optimizer.variables, model.non_trainable_variables)
    environment = torchax.default_env()
    state = environment.to_xla([[v.value.detach() for v in group] for group in groups])
    # The state is written over, as in every other step.
    step = interop.jax_jit(_step(model, groups), {"donate_argnums": 0})
    with environment:
        for batch in data:
            values = keras.tree.map_structure(torch.from_numpy, batch)
            state, loss = step(state, *environment.to_xla(values))
            count(loss.numpy())


def _step(model: keras.Model, groups: tuple[list, list, list]) -> Callable[..., Any]:
    """(state, x, y, weights) to the state after a step and the loss."""
    weights, slots, others = groups
    optimizer = model.optimizer

    def forward(
        values: list,
        rest: list,
        x: torch.Tensor,
        y: torch.Tensor,
        sample_weight: torch.Tensor | None = None,
    ) -> Any:
        mapping = [*zip(weights, values, strict=True), *zip(others, rest, strict=True)]
        with keras.device(DEVICE), keras.StatelessScope(state_mapping=mapping) as scope:
            outputs = model(x, training=True)
            arguments = {"x": x, "y": y, "y_pred": outputs, "sample_weight": sample_weight}
            loss = model.compute_loss(**arguments, training=True)
        return loss, _after(scope, others)

    gradient = interop.jax_value_and_grad(forward, {"has_aux": True})

    def step(state: list, *batch: torch.Tensor) -> Any:
        values, own, rest = state
        (loss, rest), gradients = gradient(values, rest, *batch)
        mapping = [*zip(weights, values, strict=True), *zip(slots, own, strict=True)]
        with keras.device(DEVICE), keras.StatelessScope(state_mapping=mapping) as scope:
            rate = keras.ops.cast(optimizer.learning_rate, "float32")
            for change, variable in zip(gradients, weights, strict=True):
                optimizer.update_step(change, variable, rate)
            optimizer.iterations.assign_add(1)
        return [_after(scope, weights), _after(scope, slots), rest], loss

    return step


def _after(scope: keras.StatelessScope, variables: list) -> list:
    """Returns their values at the end of a scope."""
    return [scope.get_current_value(variable) for variable in variables]
