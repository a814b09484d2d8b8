"""Inputs of `generate`: one batch or many, raw token ids or texts, with images or without."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kmodels.core.types import Data

# What models call the arrays of their images: whole ones, or patches with their places.
PIXELS = ("images", "pixel_values", "pixel_position_ids")


def is_data(inputs: Data) -> bool:
    """Returns whether these are batches that come one after another, and not one batch."""
    if isinstance(inputs, str | bytes | list | tuple | Mapping) or hasattr(inputs, "dtype"):
        return False
    return hasattr(inputs, "__iter__")


def batches(inputs: Data) -> Any:
    """Returns the batches of a data set as NumPy arrays where it can give such."""
    iterator = getattr(inputs, "as_numpy_iterator", None)
    return inputs if iterator is None else iterator()


def joined(parts: list[Any]) -> Any:
    """Returns what `generate` gave for each batch as one."""
    if parts and isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return [text for part in parts for text in ([part] if isinstance(part, str) else part)]


def is_raw(inputs: Data) -> bool:
    """Returns whether these are token ids, alone or by name."""
    if isinstance(inputs, Mapping):
        return "token_ids" in inputs
    return "int" in str(getattr(inputs, "dtype", ""))  # of any package's arrays


def is_empty(inputs: Data) -> bool:
    """Returns True for a batch without prompts."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("prompts")
    if (shape := getattr(inputs, "shape", None)) is not None:
        return len(shape) > 0 and shape[0] == 0
    return isinstance(inputs, list | tuple) and not inputs


def images_of(taken: Mapping[str, Any], is_batch: bool) -> dict[str, dict[str, np.ndarray]]:
    """Returns the images of a batch of prompts by the name of the argument, where there are any."""
    given = {name: as_numpy(taken[name]) for name in PIXELS if taken.get(name) is not None}
    images = {name: x if is_batch else x[None] for name, x in given.items()}
    return {"images": images} if any(x.shape[1] for x in images.values()) else {}


def repeated(images: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Returns the images of prompts, each so many times."""
    return {name: np.repeat(x, count, axis=0) for name, x in images.items()}


def as_numpy(x: object) -> np.ndarray:
    """Returns an array of any framework on the host."""
    return x if isinstance(x, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(x))
