"""First bases of models that take part in the steps of Keras' own trainers.

Each method of a base does what Keras does there, and is called where Keras would do it: a subclass
overrides it and calls `super()`.
"""

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    _Model = keras.Model
else:
    _Model = object


class OwnLoss(_Model):
    """A model that changes the loss of a step after Keras has computed it."""

    def loss_of_step(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of a batch, a scalar; the arguments are those of `compute_loss`."""
        return super()._compute_loss(x, y, y_pred, sample_weight, training)  # type: ignore[misc]

    def _compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.loss_of_step(x, y, y_pred, sample_weight, training)


class OwnBuild(_Model):
    """A model that makes slots, averages and lazy layers itself, in front of its first step."""

    def build_step(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds for a batch, or for the first one of Keras' iterator of an epoch."""
        super()._symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        self.build_step(iterator, data_batch)


class OwnFirstBatch(_Model):
    """A model that chooses what is built, and for which batch, where Keras would rather not."""

    def build_where_needed(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds what the first step needs; arguments as in `OwnBuild.build_step`."""
        super()._maybe_symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        self.build_where_needed(iterator, data_batch)


class OwnCompile(_Model):
    """A model that may call its own `compile` when it is first trained or evaluated."""

    def before_use(self) -> None:
        """Called before Keras looks whether `compile` was called."""

    def _assert_compile_called(self, method_name: str | None = None) -> None:
        self.before_use()
        super()._assert_compile_called(method_name)  # type: ignore[misc]


class NoTrainableWarning:
    """A model whose steps follow what is made trainable, without another `compile`."""

    def _warn_if_trainable_state_changed(self) -> None:
        """Does nothing: Keras would say that the change waits for `compile`."""


class NoKerasDDP:
    """A model whose gradients are reduced by its own step."""

    def _initialize_ddp(self) -> None:
        """Does nothing: Keras 3.16 would reduce what is reduced already."""
