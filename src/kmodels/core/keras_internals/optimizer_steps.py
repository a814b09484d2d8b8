"""First bases of optimizers that take part in the steps of Keras' own.

Each method of a base does what Keras does there, and is called where Keras would do it: a subclass
overrides it and calls `super()`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from kmodels.core.types import Tensor


class OwnDecay(keras.optimizers.Optimizer):
    """An optimizer that decays the weights in its own step; Keras' decay before it does nothing."""

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Does nothing: each step decays with the variable's own learning rate."""


class ParallelSteps:
    """The parts of a step over all variables at once, on the backend that has one."""

    def apply_all(self: Any, grads: list[Any], variables: Sequence[keras.Variable]) -> None:
        """Moves all variables by clipped gradients, with accumulation and averages."""
        super()._backend_apply_gradients(grads, variables)  # type: ignore[misc]

    def clip_all(self: Any, grads: list[Any]) -> Any:
        """Returns the gradients clipped as `clipnorm`, `global_clipnorm` or `clipvalue` says."""
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def move_all(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Moves variables by the optimizer's formula."""
        super()._parallel_update_step(grads, variables, learning_rate)  # type: ignore[misc]

    def average_all(self: Any, variables: Sequence[keras.Variable]) -> None:
        """Moves the averages of the weights towards the weights."""
        super()._update_model_variables_moving_average(variables)  # type: ignore[misc]

    def _backend_apply_gradients(
        self, grads: list[Any], trainable_variables: Sequence[keras.Variable]
    ) -> None:
        self.apply_all(grads, trainable_variables)

    def _clip_gradients(self, grads: list[Any]) -> Any:
        return self.clip_all(grads)

    def _parallel_update_step(
        self, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        self.move_all(grads, variables, learning_rate)

    def _update_model_variables_moving_average(
        self, trainable_variables: Sequence[keras.Variable]
    ) -> None:
        self.average_all(trainable_variables)


class ReplicatedSteps:
    """The parts of a step in which replicas wait for each other, on the backend that has them."""

    def move_replicas(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Moves variables, as one of the replicas."""
        super()._backend_update_step(grads, variables, learning_rate)  # type: ignore[misc]

    def move_once(
        self: Any,
        strategy: object,
        pairs: Iterable[tuple[Any, keras.Variable]],
        learning_rate: Tensor,
    ) -> None:
        """Moves variables, for all replicas of a strategy; pairs of (gradient, variable)."""
        self._distributed_tf_update_step(strategy, pairs, learning_rate)

    def add_gradients(self: Any, grads: list[Any], sums: list[Any]) -> None:
        """Adds the gradients of a batch to what is accumulated."""
        super()._backend_increment_gradient_accumulators(grads, sums)  # type: ignore[misc]

    def sum_replicas(self: Any, pairs: Iterable[tuple[Any, keras.Variable]]) -> Any:
        """Returns pairs of (gradient, variable) with the sums over the replicas."""
        return super()._all_reduce_sum_gradients(pairs)  # type: ignore[misc]

    def _backend_update_step(
        self, grads: list[Any], trainable_variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        self.move_replicas(grads, trainable_variables, learning_rate)

    def _backend_increment_gradient_accumulators(
        self, grads: list[Any], acc_grads: list[Any]
    ) -> None:
        self.add_gradients(grads, acc_grads)

    def _all_reduce_sum_gradients(
        self, grads_and_vars: Iterable[tuple[Any, keras.Variable]]
    ) -> Any:
        return self.sum_replicas(grads_and_vars)
