"""Data for every model: opening, ordering, augmenting, loading, and the data that `fit` accepts.

Keras is imported only with a loader or an adapter: worker processes import this package and must
stay free of frameworks.
"""

import importlib
from typing import Any

_EXPORTS = {
    "Augment": "images.augment",
    "ArraySource": "images.sources",
    "BoxImages": "images.boxes",
    "BoxLoader": "images.loader",
    "DataBundle": "images.sources",
    "ImageLoader": "images.loader",
    "ImageSource": "images.sources",
    "MaskArrays": "images.masks",
    "MaskLoader": "images.loader",
    "NaFlexLoader": "images.loader",
    "Resizing": "images.resizing",
    "StatefulLoader": "pipeline.position",
    "TFRecords": "records",
    "TarShards": "records",
    "ViewLoader": "images.loader",
    "as_dataset": "pipeline.kinds",
    "made_objects": "images.synthetic",
    "made_scenes": "images.synthetic",
    "open_boxes": "images.boxes",
    "open_dataset": "images.datasets",
    "open_masks": "images.masks",
    "order": "rng",
    "rendered_numbers": "images.synthetic",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"kmodels.data.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'kmodels.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
