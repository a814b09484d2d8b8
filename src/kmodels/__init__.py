"""kmodels: Keras 3 models at native speed on JAX, PyTorch and TensorFlow."""

import importlib
import sys
from typing import Any

from kmodels.core.environment import check_backend as _check_backend
from kmodels.core.environment import check_keras as _check_keras
from kmodels.core.environment import choose_backend as _choose_backend
from kmodels.core.environment import report_misspelt as _report_misspelt

__version__ = "0.1.0"

_EXPORTS = {
    "InputError": "kmodels.core.errors",
    "decisions": "kmodels.core.dispatch",
    "evaluate": "kmodels.training.loop",
    "fit": "kmodels.training.loop",
    "generic_only": "kmodels.core.dispatch",
    "override": "kmodels.overrides.user",
    "predict": "kmodels.training.loop",
    "reset_decisions": "kmodels.core.dispatch",
    "set_matmul_precision": "kmodels.core.runtime",
    "train_state": "kmodels.training.train_step",
    "train_step": "kmodels.training.train_step",
}
_MODULES = (
    *("callbacks", "data", "distribution", "generation", "interop", "layers", "lora", "models"),
    *("ops", "text", "training", "transforms", "weights"),
)

__all__ = ["__version__", *_EXPORTS, *_MODULES]

_check_keras()
_report_misspelt()
_choose_backend()
if "keras" in sys.modules:  # Without it there is no table yet.
    from kmodels import registration

    registration.register(sys.modules["keras"].saving.get_custom_objects())


def __getattr__(name: str) -> Any:
    if "keras" not in sys.modules and (name in _MODULES or name in _EXPORTS):
        _check_backend()
    if name in _MODULES:
        return importlib.import_module(f"kmodels.{name}")
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'kmodels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
