"""Protocol of `device_put_<backend>.py`, which places batches on devices."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from kmodels.core.dispatch import backend_module


class DevicePutBackend(Protocol):
    """Batches on the devices of one backend."""

    @property
    def FORKS(self) -> bool:
        """True if a loader may fork workers in spite of the backend's threads."""
        ...

    def ahead(self) -> int:
        """Returns the number of batches to prefetch by default."""
        ...

    def begin_pass(self) -> None:
        """Called at the beginning of a pass over the data."""
        ...

    def placer(self, model: keras.Model | None, ahead: bool) -> Callable[[Any], Any]:
        """Returns a function that places a batch for the step.

        The model of the step may be unknown. With `ahead`, batches are placed while the step before
        runs.
        """
        ...

    def for_keras(self, begin: Callable[[bool], Iterator[Any]]) -> Any:
        """Returns the batches as Keras' own `fit` takes them.

        `begin` begins a pass over batches; True places them on the devices.
        """
        ...

    def busy(self, output: Any) -> Callable[[], bool] | None:
        """Returns a function that is True while the device is busy; None if unknown.

        `output` is an array that its last step returned, or None.
        """
        ...


device_put = backend_module("kmodels.data.pipeline.device_put", DevicePutBackend)
