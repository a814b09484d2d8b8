"""Which image each patch of a row belongs to, and where in it the patch stands."""

from typing import Any

import keras

from kmodels.core.types import Tensor


def _bounds(spatial_shapes: Tensor, length: int | Tensor) -> tuple[Any, Any, Any]:
    """Returns the end of each image (B, S), the patches (B, S), and images done (B, N), int32."""
    ops = keras.ops
    shapes = ops.cast(spatial_shapes, "int32")
    counts = shapes[..., 0] * shapes[..., 1]
    ends = ops.cast(ops.cumsum(counts, axis=1), "int32")
    at = ops.reshape(ops.arange(length, dtype="int32"), (1, -1, 1))
    done = ops.sum(ops.cast(at >= ops.expand_dims(ends, 1), "int32"), axis=-1)
    return ends, counts, ops.cast(done, "int32")


def places_of(spatial_shapes: Tensor, length: int | Tensor) -> tuple[Any, Any]:
    """Returns where each patch stands, and how large its image is.

    Args:
        spatial_shapes: (B, S, 2) int, rows and columns of each image of a row; 0 for none.
        length: patches of a row.

    Returns:
        Row and column of each patch (B, N, 2), and rows and columns of its image (B, N, 2), int32.
        Padding has numbers that mean nothing, of a place inside the last image or an empty one.
    """
    ops = keras.ops
    ends, counts, done = _bounds(spatial_shapes, length)
    image = ops.minimum(done, ops.shape(spatial_shapes)[1] - 1)
    shapes = ops.cast(spatial_shapes, "int32")
    rows, columns, start = (
        ops.take_along_axis(x, image, axis=1)
        for x in (shapes[..., 0], shapes[..., 1], ends - counts)
    )
    rows, columns = ops.maximum(rows, 1), ops.maximum(columns, 1)
    index = ops.expand_dims(ops.arange(length, dtype="int32"), 0) - start
    # Places outside the image would have no position, of which 0 / 0 is made.
    index = ops.clip(index, 0, rows * columns - 1)
    places = ops.stack([index // columns, index % columns], axis=-1)
    return places, ops.stack([rows, columns], axis=-1)


@keras.saving.register_keras_serializable(package="kmodels")
class ImageSegments(keras.Operation):
    """Numbers of the images that share a row, patch by patch.

    Call:
        pixel_values (B, N, ...), of which the length counts; spatial_shapes (B, S, 2) int, rows
        and columns of each image, 0 for none; pixel_attention_mask (B, N) int, 0 for patches that
        nothing is to see, or None -> (B, N) int32: 1, 2, ... by image, 0 for padding.
    """

    def call(
        self,
        pixel_values: Tensor,
        spatial_shapes: Tensor,
        pixel_attention_mask: Tensor | None = None,
    ) -> Any:
        """(B, N, ...), (B, S, 2) -> (B, N)."""
        ops = keras.ops
        length = ops.shape(pixel_values)[1]
        ends, _, done = _bounds(spatial_shapes, length)
        at = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
        found = ops.where(at < ends[:, -1:], done + 1, 0)
        if pixel_attention_mask is not None:
            found = found * ops.cast(ops.cast(pixel_attention_mask, "bool"), found.dtype)
        return ops.cast(found, "int32")

    def compute_output_spec(
        self,
        pixel_values: keras.KerasTensor,
        spatial_shapes: keras.KerasTensor,
        pixel_attention_mask: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """Returns shape and dtype of what `call` gives."""
        return keras.KerasTensor(tuple(pixel_values.shape[:2]), "int32")


def seen_by_image(segment_ids: Tensor, images: int | Tensor) -> Any:
    """Returns which patches belong to each image of a row: (B, N) -> (B, S, N) bool."""
    numbers = keras.ops.reshape(keras.ops.arange(1, images + 1, dtype="int32"), (1, -1, 1))
    return keras.ops.equal(keras.ops.expand_dims(segment_ids, 1), numbers)
