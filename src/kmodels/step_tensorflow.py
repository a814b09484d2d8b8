"""The training step on TensorFlow."""

from typing import Any

import keras

from kmodels import heap


class Model(keras.Model):
    """Keras' model; what tracing and optimizing the step's graph took is given back.

    Graphs are many small pieces, and the heap keeps their room: 55 MiB for a ViT-S/16, which the
    second step and the ones after would need beside it.
    """

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' step."""
        made = self.train_function
        super().make_train_function(force)
        if self.train_function is not made:
            self.train_function = _trimmed(self.train_function)
        return self.train_function


def _trimmed(function: Any) -> Any:
    """The function; the heap is trimmed after its first call, which traces it."""
    traced = False

    def call(iterator: Any) -> Any:
        nonlocal traced
        logs = function(iterator)
        if not traced:
            traced = True
            heap.trim()
        return logs

    return call
