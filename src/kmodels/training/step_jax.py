"""One step on JAX: a compiled function of values, which stay outside the variables in between."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.types import Tree

# Between two steps: weights, other variables, slots and metrics, as far as the step uses them.
Values = tuple[list[Any], ...]


class TaskStep:
    """First base of a task: Keras' own `train_step` is a function of values already."""

    def over_devices(self, weight: jax.Array) -> tuple[jax.Array, int]:
        """Returns the scalar itself: a batch is that of all devices."""
        return weight, 1


class Step:
    """Runs a compiled step, and carries the values of the variables from one call to the next.

    Each call takes over (donates) the arrays of the one before. `sync` writes them back to the
    variables; Keras' callbacks call it, as `model.jax_state_sync`, before they look at the model.

    Args:
        model: built and, to train or evaluate, compiled.
        kind: "train", "test" or "predict".
        function: of `compiled`.
    """

    def __init__(self, model: keras.Model, kind: str, function: Callable[..., Any]):
        self._model, self._kind, self._function = model, kind, function
        self._values: Values | None = None
        self._outer: Any = None

    def __enter__(self) -> Self:
        attributes = vars(self._model)
        self._outer = attributes.get("jax_state_sync")
        # Around Keras' __setattr__. A function, since a copy of the model copies bound methods.
        attributes["jax_state_sync"] = lambda: self.sync()
        return self

    def __exit__(self, *error: object) -> None:
        self.sync()
        del vars(self._model)["jax_state_sync"]
        if self._outer is not None:
            vars(self._model)["jax_state_sync"] = self._outer

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Runs a step for each batch and returns the last logs, or all outputs of predict."""
        if self._values is None:
            kinds = _variables(self._model, self._kind)
            self._values = tuple([variable.value for variable in kind] for kind in kinds)
        outputs_of_batches = []
        for batch in batches:
            outputs, self._values = self._function(self._values, batch)
            outputs_of_batches.append(outputs)
        if self._kind != "predict" or len(outputs_of_batches) == 1:
            return outputs_of_batches[-1]
        return keras.tree.map_structure(
            lambda *parts: jax.numpy.concatenate(parts), *outputs_of_batches
        )

    def sync(self) -> None:
        """Writes the values back; the next step reads the variables again."""
        values, self._values = self._values, None
        for variables, kind in zip(_variables(self._model, self._kind), values or (), strict=False):
            for variable, value in zip(variables, kind, strict=True):
                # A step that failed has taken its arrays with it.
                if value is not variable.value and not value.is_deleted():
                    variable.assign(value)

    @property
    def last_output(self) -> Any:
        """An array that the last step returned, or None."""
        return next((kind[-1] for kind in reversed(self._values or ()) if kind), None)


def compiled(model: keras.Model, kind: str) -> Callable[[Values, Any], tuple[Any, Values]]:
    """Returns a function of values and a batch that returns logs, or outputs, and new values."""
    step = getattr(model, f"{kind}_step")
    if kind == "predict":
        predict = step

        def step(values: Any, batch: Tree) -> Any:
            outputs, others = predict(values, batch)
            return outputs, (values[0], others)

    if model.run_eagerly or not model.jit_compile:
        return step
    shardings = None
    if keras.distribution.distribution() is not None:
        kinds = _variables(model, kind)
        shardings = None, tuple([v.value.sharding for v in variables] for variables in kinds)
    return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def _variables(model: keras.Model, kind: str) -> list[list[Any]]:
    """Returns the variables whose values a step takes, in the order of Keras' `train_step`."""
    kinds = [model.trainable_variables, model.non_trainable_variables]
    if kind == "train":
        kinds.append(model.optimizer.variables)
    if kind != "predict":
        kinds.append(model.metrics_variables)
    return kinds


def build_to_predict(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Makes the variables of a model that nobody has called; a compiled step cannot."""
    if not all(layer.built for layer in keras_internals.sublayers(model)):
        with keras.StatelessScope():
            model(keras.utils.unpack_x_y_sample_weight(batch())[0])


def joined(parts: Sequence[Any]) -> np.ndarray:
    """Returns the predictions of all batches as one array of NumPy."""
    return np.concatenate(parts)
