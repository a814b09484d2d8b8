"""Masks of segments as arrays: images have different numbers of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.pipeline.batch import to_numpy
from kmodels.training.matching.targets import KEYS, parts_of


def padded(y: Mapping[str, Any], resize: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    """Returns masks and classes of all images, as many for each.

    Args:
        y: "mask_labels", for each image (T, H, W), and "class_labels", for each image (T,).
        resize: makes a mask (H, W) the model's size.

    Returns:
        "mask_labels", uint8 (B, S, height, width), and "class_labels", int32 (B, S), -1 where there
        is no segment. S is a power of two, so that a compiled step is made for few of them.

    Raises:
        InputError: for other keys, or numbers that differ.
    """
    masks, classes = ([to_numpy(one) for one in part] for part in parts_of(y))
    numbers = [len(one) for one in masks]
    if numbers != [len(one) for one in classes]:
        raise InputError(
            f"images have {numbers} masks and {[len(one) for one in classes]} classes; give a "
            "class for each mask"
        )
    room = 1 << (max([1, *numbers]) - 1).bit_length()
    kinds = np.full((len(masks), room), -1, "int32")
    found: list[np.ndarray] = []
    for row, held, own in zip(kinds, masks, classes, strict=True):
        row[: len(own)] = own
        found.append(np.array([resize(mask) for mask in held], "uint8"))
    shape = next((one.shape[1:] for one in found if len(one)), resize(np.zeros((1, 1), int)).shape)
    whole = np.zeros((len(masks), room, *shape), "uint8")
    for into, one in zip(whole, found, strict=True):
        if len(one):
            into[: len(one)] = one
    return dict(zip(KEYS, (whole, kinds), strict=True))
