"""Keras' model, with the training step that the running backend needs."""

from typing import TYPE_CHECKING, Protocol

import keras

from kmodels.core.dispatch import backend_module
from kmodels.training.loop import Loop


class KerasModelBackend(Protocol):
    """A base for tasks on one backend."""

    @property
    def Model(self) -> type[keras.Model]:
        """Is a `keras.Model` whose steps are those of kmodels on this backend."""
        ...


_native = backend_module("kmodels.training.step.keras_model", KerasModelBackend, optional=True)
if TYPE_CHECKING or _native is None:

    class Model(Loop, keras.Model):
        """Keras' model in the loop of kmodels."""

else:
    Model = _native.Model
