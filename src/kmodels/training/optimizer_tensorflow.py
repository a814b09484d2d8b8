"""The TensorFlow bodies of AdamW and SGD: its own kernels in place of many passes over memory."""

from typing import Any

import keras
import tensorflow as tf


class _Alone:
    """An optimizer that waits for other replicas only where there are some."""

    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        # With one replica the sum is an IdentityN, behind which updates wait for all gradients.
        if self._distribution_strategy.num_replicas_in_sync == 1:
            return grads_and_vars
        return super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]


class AdamW(_Alone, keras.optimizers.AdamW):
    """Keras' AdamW; a variable, its gradient and its two slots are read and written once."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves one variable, which is TensorFlow's own under `tf.distribute` too."""
        narrow = variable.dtype not in (tf.float32, tf.float64)
        if self.amsgrad or isinstance(gradient, tf.IndexedSlices) or narrow:
            super().update_step(gradient, variable, learning_rate)
            return
        kind, index = variable.dtype, self._get_variable_index(variable)
        step = tf.cast(self.iterations + 1, kind)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=tf.cast(self.beta_1, kind) ** step,
            beta2_power=tf.cast(self.beta_2, kind) ** step,
            lr=tf.cast(learning_rate, kind),
            beta1=tf.cast(self.beta_1, kind),
            beta2=tf.cast(self.beta_2, kind),
            epsilon=tf.cast(self.epsilon, kind),
            grad=tf.cast(gradient, kind),
        )


class SGD(_Alone, keras.optimizers.SGD):
    """Keras' SGD; a variable, its gradient and its slot are read and written once."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves one variable, which is TensorFlow's own under `tf.distribute` too."""
        if isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        kind = variable.dtype
        rate, gradient = tf.cast(learning_rate, kind), tf.cast(gradient, kind)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[self._get_variable_index(variable)].value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, kind),
            use_nesterov=self.nesterov,
        )
