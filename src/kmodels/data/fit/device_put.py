"""The seam between a batch and its device: `device_put_<backend>.py`."""

from collections.abc import Callable
from typing import Any, Protocol

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

    def placer(self) -> Callable[[Any], Any]:
        """Returns what puts a batch where the step wants it; called in the thread that trains."""
        ...

    def busy(self, output: Any) -> Callable[[], bool] | None:
        """Returns a function that is True while the device is at its last step; None if unknown.

        Args:
            output: an array that this step returned, or None.
        """
        ...


device_put = backend_module("kmodels.data.fit.device_put", DevicePutBackend)
