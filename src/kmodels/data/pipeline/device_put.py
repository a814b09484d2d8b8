"""The seam between a batch and its device: `device_put_<backend>.py`."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from kmodels.core.dispatch import backend_module


class DevicePutBackend(Protocol):
    """Batches on the devices of one backend."""

    @property
    def FORKS(self) -> bool:
        """Is whether a forked worker of a loader is safe beside the backend's threads."""
        ...

    def ahead(self) -> int:
        """Returns how many batches pay to be made ahead."""
        ...

    def begin_pass(self) -> None:
        """Is called where a pass over the data begins."""
        ...

    def placer(self, model: keras.Model | None, ahead: bool) -> Callable[[Any], Any]:
        """Returns the function that puts a batch where the step wants it.

        Args:
            model: whose step it is, if that is known.
            ahead: whether batches are placed while a step before them runs.
        """
        ...

    def for_keras(self, begin: Callable[[bool], Iterator[Any]]) -> Any:
        """Returns the batches as Keras' own `fit` takes them.

        Args:
            begin: begins a pass over batches, on the devices if it is given True.
        """
        ...

    def busy(self, output: Any) -> Callable[[], bool] | None:
        """Returns a function that is True while the device is at its last step; None if unknown.

        Args:
            output: an array that this step returned, or None.
        """
        ...


device_put = backend_module("kmodels.data.pipeline.device_put", DevicePutBackend)
