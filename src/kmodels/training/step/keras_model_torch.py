"""The training step on torch."""

from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.host import numbers_torch
from kmodels.core.types import Tree
from kmodels.layers import block_compile
from kmodels.training.loop import Loop


class Parallel:
    """First base of a model whose steps may be those of one process of several.

    Attributes:
        parallel: what `Plan.prepare` sets where several processes train it together, see
            `kmodels.distribution.engines.ddp_torch`.
    """

    parallel: Any = None

    def compile(self, *args: object, **kwargs: object) -> None:
        """Keras' `compile`; from then on Keras' steps send numbers to CUDA without a wait."""
        numbers_torch.send_without_waiting()
        super().compile(*args, **kwargs)  # type: ignore[misc]
        if self.parallel is not None:
            self.parallel.compiled(self)

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' step; what was compiled is looked at before the first one."""
        if self.parallel is not None and (force or getattr(self, "train_function", None) is None):
            self.parallel.begin(self)
        return super().make_train_function(force)  # type: ignore[misc]

    def get_metrics_result(self) -> Any:
        """Returns the results over the rows of all processes."""
        if self.parallel is None:
            return super().get_metrics_result()  # type: ignore[misc]
        return self.parallel.results(self.metrics)  # type: ignore[attr-defined]


class Model(keras_internals.OwnLoss, Parallel, Loop, keras.Model):
    """Keras' model; a step begins without the gradients of the one before.

    Keras' step lets go of them between forward and backward pass, so that they take memory just
    when the activations are all there. They are visible between two steps, as in Keras.
    """

    def make_train_function(self, force: bool = False) -> Any:
        """Returns Keras' step, after a look at the blocks that are compiled.

        Raises:
            InputError: where something was done since to compiled blocks that they cannot follow.
        """
        if block_compile.compiled(self):
            block_compile.check(self)
        return super().make_train_function(force)

    def train_step(self, data: Tree) -> Any:
        """Keras' step."""
        self.zero_grad()
        return super().train_step(data)

    def loss_of_step(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Tree = None,
        sample_weight: Tree = None,
        training: bool = True,
    ) -> Any:
        """Keras' loss, whose backward pass is that of all processes."""
        loss = super().loss_of_step(x, y, y_pred, sample_weight, training)
        if self.parallel is None or not training:
            return loss
        return self.parallel.joined(loss, self.trainable_variables, self.optimizer)
