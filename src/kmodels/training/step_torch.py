"""One step on torch: it moves the variables themselves."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import keras
import numpy as np
import torch

from kmodels.core import keras_internals, runtime_torch
from kmodels.core.types import Tree
from kmodels.data.pipeline.arrays import rows
from kmodels.layers import block_compile


class TaskStep(keras.Model if TYPE_CHECKING else object):
    """Base of a task: its training step, for one process or several.

    Attributes:
        parallel: set by `Plan.prepare` if several processes train the model, see
            `kmodels.distribution.engines.ddp_torch`.
    """

    parallel: Any = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Keras' `compile`; from then on numbers go to CUDA without a wait."""
        runtime_torch.send_without_waiting()
        super().compile(*args, **kwargs)
        if self.parallel is not None:
            self.parallel.compiled(self)

    def make_train_function(self, force: bool = False) -> Any:
        """Prepares the next steps.

        Raises:
            InputError: if compiled blocks were changed in an unsupported way, or cannot be trained
                in several processes.
        """
        if block_compile.compiled(self):
            block_compile.check(self)
        self.zero_grad()  # also of variables that are frozen by now
        if self.parallel is not None and (force or getattr(self, "train_function", None) is None):
            self.parallel.begin(self)
        return super().make_train_function(force)

    @property
    def weights(self) -> list[Any]:
        """All weights in Keras' order; every step asks for them twice."""
        return keras_internals.weights_below(self)

    @property
    def losses(self) -> list[Any]:
        """Keras' list of `add_loss` values and regularizers, which most models lack."""
        return super().losses if keras_internals.has_losses(self) else []

    def get_metrics_result(self) -> Any:
        """Returns the results over the rows of all processes."""
        if self.parallel is None:
            return super().get_metrics_result()
        return self.parallel.results(self.metrics)

    def over_devices(self, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns the sum of a scalar over the processes, and the number of processes."""
        return (weight, 1) if self.parallel is None else self.parallel.over_devices(weight)

    def train_step(self, data: Tree) -> Any:
        """Moves the weights by one batch and returns the logs.

        The gradients stay until the next step, as in Keras. The next step frees them before its
        forward pass, since later they would take memory in addition to all activations.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_weights
        weights = [keras_internals.value_of(variable, cast=False) for variable in variables]
        for weight in weights:
            weight.grad = None

        y_pred = keras_internals.predictions(self, x, training=True)
        loss = keras_internals.loss_of(self, x, y, y_pred, sample_weight, training=True)
        if weights:
            if self.parallel is not None:
                loss = self.parallel.joined(loss, variables, self.optimizer)
            self.optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                self.optimizer.apply([weight.grad for weight in weights], variables)
        else:
            warnings.warn("the model has no trainable weights", stacklevel=2)

        keras_internals.loss_tracker(self).update_state(loss.detach(), sample_weight=rows(x))
        return self.compute_metrics(x, y, y_pred, sample_weight)


class Step:
    """Runs a step, with the model in the mode of torch that it needs.

    Args:
        model: to train or evaluate, compiled.
        kind: "train", "test" or "predict".
        function: of `compiled`.
    """

    last_output = None

    def __init__(self, model: keras.Model, kind: str, function: Callable[..., Any]):
        self._model, self._kind, self._function = model, kind, function

    def __enter__(self) -> Self:
        self._model.train(self._kind == "train")
        return self

    def __exit__(self, *error: object) -> None:
        self._model.eval()

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Runs a step for the only batch and returns its logs, or its outputs."""
        return self._function(batches[0])


def compiled(model: keras.Model, kind: str) -> Callable[[Any], Any]:
    """Returns a function of a batch that returns logs, or outputs."""
    step = getattr(model, f"{kind}_step")
    if kind != "train":
        step = _without_gradients(step)
    return torch.compile(step) if model.jit_compile else step


def _without_gradients(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(batch: Tree) -> Any:
        with torch.no_grad():
            return step(batch)

    return run


def build_to_predict(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Does nothing: the first step creates missing variables."""


def joined(parts: Sequence[Any]) -> np.ndarray:
    """Returns the predictions of all batches as one array of NumPy."""
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])
