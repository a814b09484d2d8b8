"""Models, tokenizers and augmentations of the Keras family's other packages.

`kmodels.interop.keras_hub` (also called keras_nlp, its former name) and `kmodels.interop.keras_cv`;
neither package is imported before it is used. `import kmodels.interop.lm_eval` needs lm-eval.
"""

import importlib
from typing import Any

_MODULES = {"keras_hub": "keras_hub", "keras_nlp": "keras_hub", "keras_cv": "keras_cv"}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kmodels.interop.{_MODULES[name]}")
    raise AttributeError(f"module 'kmodels.interop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
