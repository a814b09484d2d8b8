"""The arrays by which images reach a model beside token ids."""

from collections.abc import Sequence

import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.common.image_text.patch_converter import PatchConverter
from kmodels.text import Example


def picture_arrays(
    token_ids: np.ndarray,
    rows: Sequence[Sequence[Example]],
    soft_id: int,
    per_image: int,
    size: Sequence[int],
) -> dict[str, np.ndarray]:
    """Returns images, and which tokens they fill, with keras-hub's names.

    Args:
        token_ids: (B, T) int.
        rows: the examples of each row, in order.
        soft_id: id of the token that an image fills.
        per_image: number of these tokens for each image.
        size: (height, width) of the images.

    Returns:
        "images" (B, M, height, width, 3) float32, zeros behind those of a row; "vision_indices"
        (B, M * per_image) int32, the places that they fill, in order, zeros behind these;
        "vision_mask" (B, T) int32, 1 at these places. M is the largest number of images of a row,
        which may be 0.

    Raises:
        InputError: for a row that is too short for the tokens of its images.
    """
    pictures = [[one for example in row for one in example.images] for row in rows]
    most = max(map(len, pictures), default=0)
    images = np.zeros((len(rows), most, *size, 3), "float32")
    indices = np.zeros((len(rows), most * per_image), "int32")
    mask = token_ids == soft_id
    for row, found in enumerate(pictures):
        (places,) = np.nonzero(mask[row])
        if len(places) != len(found) * per_image:
            raise InputError(
                f"row {row} has {len(found)} images or crops of {per_image} tokens each, which do "
                f"not fit in {token_ids.shape[1]} tokens; give a larger sequence_length"
            )
        indices[row, : len(places)] = places
        if found:
            images[row, : len(found)] = found
    return {"images": images, "vision_indices": indices, "vision_mask": mask.astype("int32")}


def patch_arrays(
    token_ids: np.ndarray,
    rows: Sequence[Sequence[Example]],
    soft_id: int,
    converter: PatchConverter,
) -> dict[str, np.ndarray]:
    """Returns patches of images with their places, and which tokens they fill; keras-hub's names.

    Args:
        token_ids: (B, T) int.
        rows: the examples of each row, in order.
        soft_id: id of the token that a piece of an image fills.
        converter: cuts images.

    Returns:
        "pixel_values" (B, M, P, C) float32 and "pixel_position_ids" (B, M, P, 2) int32, zeros and
        -1 behind those of an image and of a row; "vision_indices" (B, M * max_soft_tokens) int32,
        the places that they fill, in order, zeros behind these; "vision_mask" (B, T) int32, 1 at
        these places. M is the largest number of images of a row, which may be 0.

    Raises:
        InputError: for a row that is too short for the tokens of its images.
    """
    pictures = [[one for example in row for one in example.images] for row in rows]
    most = max(map(len, pictures), default=0)
    pixels, places = converter.empty(len(rows), most)
    indices = np.zeros((len(rows), most * converter.max_soft_tokens), "int32")
    mask = token_ids == soft_id
    for row, found in enumerate(pictures):
        (there,) = np.nonzero(mask[row])
        if len(there) != (wanted := sum(map(converter.pieces, found))):
            raise InputError(
                f"row {row} has {len(found)} images of {wanted} tokens together, which do not fit "
                f"in {token_ids.shape[1]} tokens; give a larger sequence_length"
            )
        indices[row, : len(there)] = there
        for number, picture in enumerate(found):
            converter.cut(picture, pixels[row, number], places[row, number])
    named = {"pixel_values": pixels, "pixel_position_ids": places}
    return {**named, "vision_indices": indices, "vision_mask": mask.astype("int32")}
