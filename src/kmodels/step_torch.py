"""The training step on torch."""

from typing import Any

import keras


class Model(keras.Model):
    """Keras' model; a step begins without the gradients of the one before.

    Keras' step lets go of them between forward and backward pass, so that they take memory just
    when the activations are all there. Between two steps they are to be seen, as in Keras.
    """

    def train_step(self, data: Any) -> Any:
        """Keras' step."""
        self.zero_grad()
        return super().train_step(data)
