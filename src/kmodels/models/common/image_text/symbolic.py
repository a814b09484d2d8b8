"""Images in a graph of TensorFlow, inside `tf.data.Dataset.map`."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.text.records import PICTURES
from kmodels.text.texts import in_graph


def check_graph(x: Data, crops: bool) -> None:
    """Raises `InputError` for symbolic images whose number is not known before they are read.

    Args:
        x: what a preprocessor takes.
        crops: whether images may get crops, whose number depends on their shape.
    """
    images = list(_images(x).values())
    if not any(in_graph(leaf) for leaf in images):
        return
    if crops:
        raise InputError(
            "images with do_pan_and_scan cannot be preprocessed inside tf.data's map; give fit the "
            "records, or an iterable of batches"
        )


def without_images(x: Data) -> tuple[Any, int | None]:
    """Returns symbolic texts without their images, and how many images each of them has.

    The number is None for ragged images, which are as many as the row with the most of them has.

    Args:
        x: texts, or columns of texts and images, as `keras.KerasTensor`.

    Raises:
        InputError: for images without texts, or of another number of axes.
    """
    images = _images(x)
    if not isinstance(x, Mapping) or not images:
        return x, 0
    texts = {name: value for name, value in x.items() if name not in images}
    if not texts:
        raise InputError("a preprocessor in tf.data got images without texts; give prompts too")
    axes = len(keras.tree.flatten(texts)[0].shape)
    count: int | None = 0
    for name, spec in images.items():
        shape = (1, *spec.shape[axes:])[-4:]
        if len(shape) != 4 or len(spec.shape) > axes + 4:
            raise InputError(
                f"{name!r} has shape {tuple(spec.shape)} in tf.data; give (height, width, 3) or "
                "(images, height, width, 3) for each text"
            )
        count = None if count is None or shape[0] is None else count + shape[0]
    return texts, count


def _images(x: Data) -> dict[str, Any]:
    """Returns the columns of images of what a preprocessor takes."""
    held = x if isinstance(x, Mapping) else {}
    return {name: held[name] for name in PICTURES if held.get(name) is not None}
