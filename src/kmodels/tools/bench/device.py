"""The seam to the device of each backend, for `kmodels bench`: `device_<backend>.py`."""

from typing import Protocol


class DeviceBackend(Protocol):
    """The device of one backend."""

    def has_tf32(self) -> bool:
        """Returns whether float32 products can be computed in TF32."""
        ...

    def is_cpu(self) -> bool:
        """Returns whether there is no accelerator."""
        ...

    def threads(self) -> int:
        """Returns the threads of operations; 0 for one per CPU that the process may use."""
        ...
