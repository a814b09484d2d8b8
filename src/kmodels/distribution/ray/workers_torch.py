"""Workers of Ray Train's own torch backend, which makes the process group that kmodels uses."""

from collections.abc import Mapping
from typing import Any

import torch

ONE: str | None = None
# Processes also exchange values on the host, which needs gloo.
_ON_GPUS = "cpu:gloo,cuda:nccl"
# Gloo raises RuntimeErrors with this word.
_GLOO = "gloo"


def config(resources: Mapping[str, float], seconds: float) -> Any:
    """See `WorkersBackend`."""
    from ray.train.torch import TorchConfig

    kind = _ON_GPUS if resources.get("GPU") else "gloo"
    return TorchConfig(backend=kind, timeout_s=max(int(seconds), 1))


def is_lost(error: BaseException) -> bool:
    """See `WorkersBackend`."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and _GLOO in str(error)


def leave() -> None:
    """See `WorkersBackend`; Ray takes the process group down."""
