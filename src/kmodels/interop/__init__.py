"""Models, tokenizers and augmentations of the Keras family's other packages.

`kmodels.interop.keras_hub` (also called keras_nlp, its former name), `kmodels.interop.keras_cv`,
and `kmodels.interop.lm_eval` for lm-evaluation-harness; no package is imported before it is used.
"""

import importlib
from typing import Any

_MODULES = {name: name for name in ("keras_hub", "keras_cv", "lm_eval")}
_MODULES["keras_nlp"] = "keras_hub"

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kmodels.interop.{_MODULES[name]}")
    raise AttributeError(f"module 'kmodels.interop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
