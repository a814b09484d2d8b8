"""The TensorFlow bodies of AdamW and SGD: its own kernels in place of many passes over memory."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kmodels.core import keras_internals, replicas_tensorflow
from kmodels.core.types import Tensor
from kmodels.training.normalization import BatchWeight, batch_weight, weighed


class _Replicated(keras_internals.OwnSteps):
    """An optimizer that synchronizes replicas only if there are several.

    Keras sums the gradients of replicas last: it would clip those of each alone, and its branches
    for accumulation cannot wait for others. This class sums them first if that matters, and the
    branches are those of all replicas together.
    """

    def apply_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, keras.Variable]]) -> Any:
        """Makes one step."""
        replica = replicas_tensorflow.inside()
        if replica is None or not self.looks_at_sums:
            return super().apply_gradients(grads_and_vars)  # type: ignore[misc]
        gradients, variables = map(list, zip(*grads_and_vars, strict=True))
        weight = batch_weight()

        def together(strategy: tf.distribute.Strategy, gradients: list[Any], total: Any) -> None:
            pairs = [
                (g, v.value) for g, v in zip(gradients, variables, strict=True) if g is not None
            ]
            sums = iter(strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs))
            whole = [
                None if g is None else strategy.experimental_local_results(next(sums))[0]
                for g in gradients
            ]
            # It runs in the thread of no replica.
            if weight is not None:
                total = BatchWeight(strategy.experimental_local_results(total)[0], weight.shards)
            with weighed(total):
                self.apply(whole, variables)

        replica.merge_call(together, args=(gradients, weight and weight.total))
        return self.iterations

    @property
    def looks_at_sums(self: Any) -> bool:
        """True if a step depends on the gradients of all replicas."""
        return bool(
            self.clipnorm
            or self.clipvalue
            or self.global_clipnorm
            or self.gradient_accumulation_steps
            or getattr(self, "skip_non_finite", False)
        )

    def update_all(
        self, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Keras' step, or the one step of all replicas."""
        if not _together():
            super().update_all(grads, variables, learning_rate)
            return
        native = [getattr(variable, "value", variable) for variable in variables]
        strategy = keras_internals.strategy_of(self)
        self.move_once(strategy, zip(grads, native, strict=True), learning_rate)

    def add_gradients(self, grads: list[Any], sums: list[Any]) -> None:
        """Keras' sums, or those of the one step of all replicas."""
        if not _together():
            super().add_gradients(grads, sums)
            return
        for gradient, total in zip(grads, sums, strict=True):
            total.assign_add(gradient)

    def sum_replicas(self, pairs: Iterable[tuple[Any, keras.Variable]]) -> Any:
        """Keras' sums over replicas, if there are several."""
        # The sum of one replica is an IdentityN, behind which updates wait for all gradients.
        if keras_internals.strategy_of(self).num_replicas_in_sync == 1:
            return pairs
        return super().sum_replicas(pairs)


def _together() -> bool:
    """Returns True in the common step of several replicas."""
    return replicas_tensorflow.count() > 1 and tf.distribute.in_cross_replica_context()


class AdamW(_Replicated, keras.optimizers.AdamW):
    """Keras' AdamW; a variable, its gradient and its two slots are read and written once."""

    def update_step(
        self, gradient: Any, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Moves one variable, which is TensorFlow's own under `tf.distribute` too."""
        narrow = variable.dtype not in (tf.float32, tf.float64)
        if self.amsgrad or isinstance(gradient, tf.IndexedSlices) or narrow:
            super().update_step(gradient, variable, learning_rate)
            return
        kind = variable.dtype
        first, second, _ = keras_internals.adam_slots(self, variable)
        step = tf.cast(self.iterations + 1, kind)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first.value.handle,
            v=second.value.handle,
            beta1_power=tf.cast(self.beta_1, kind) ** step,
            beta2_power=tf.cast(self.beta_2, kind) ** step,
            lr=tf.cast(learning_rate, kind),
            beta1=tf.cast(self.beta_1, kind),
            beta2=tf.cast(self.beta_2, kind),
            epsilon=tf.cast(self.epsilon, kind),
            grad=tf.cast(gradient, kind),
        )


class SGD(_Replicated, keras.optimizers.SGD):
    """Keras' SGD; a variable, its gradient and its slot are read and written once."""

    def update_step(
        self, gradient: Any, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Moves one variable, which is TensorFlow's own under `tf.distribute` too."""
        if isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        kind, index = variable.dtype, keras_internals.variable_index(self, variable)
        rate, gradient = tf.cast(learning_rate, kind), tf.cast(gradient, kind)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[index].value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, kind),
            use_nesterov=self.nesterov,
        )
