"""Layers of a ViT for rows of patches that images of several grids may share."""

from collections.abc import Mapping
from typing import Any, cast

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer
from kmodels.layers.base import Shape
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.layers import Pooling
from kmodels.ops._wide import wide
from kmodels.weights.positions import Method


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
    """Returns the row and column of each patch, and the size of its image.

    Args:
        spatial_shapes: (B, S, 2) int, rows and columns of each image of a row; 0 for none.
        length: patches of a row.

    Returns:
        Row and column of each patch (B, N, 2), and rows and columns of its image (B, N, 2), int32.
        The values of padding are arbitrary but valid.
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
        pixel_values (B, N, ...), of which only the length is used; spatial_shapes (B, S, 2) int,
        rows and columns of each image, 0 for none; pixel_attention_mask (B, N) int, 0 for masked
        patches, or None -> (B, N) int32: 1, 2, ... by image, 0 for padding.
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
        numbers = ops.where(at < ends[:, -1:], done + 1, 0)
        if pixel_attention_mask is not None:
            numbers = numbers * ops.cast(ops.cast(pixel_attention_mask, "bool"), numbers.dtype)
        return ops.cast(numbers, "int32")

    def compute_output_spec(
        self,
        pixel_values: keras.KerasTensor,
        spatial_shapes: keras.KerasTensor,
        pixel_attention_mask: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """Returns the shape and dtype of the segments."""
        return keras.KerasTensor(tuple(pixel_values.shape[:2]), "int32")


def _cubic(distance: Tensor, a: float) -> Any:
    """Returns Keys' kernel (Keys 1981, eq. 15) with parameter `a`."""
    x = keras.ops.abs(distance)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return keras.ops.where(x < 1.0, near, keras.ops.where(x < 2.0, far, 0.0))


def _triangle(distance: Tensor) -> Any:
    return keras.ops.maximum(1.0 - keras.ops.abs(distance), 0.0)


def resize_weights(place: Tensor, new: Tensor, old: int, method: Method) -> Any:
    """Returns the weights of resizing one axis; see `weights.positions.resize_matrix`.

    Args:
        place: (...) float, numbers of the samples, from 0.
        new: (...) float, samples of the resized axis.
        old: samples of the axis itself.
        method: as there.

    Returns:
        (..., old), whose last axis sums to 1.
    """
    ops = keras.ops
    place, new = ops.expand_dims(place, -1), ops.expand_dims(new, -1)
    scale = old / new
    centre = (place + 0.5) * scale
    columns = ops.arange(old, dtype=place.dtype)
    if method.endswith("_antialias"):
        distance = (columns + 0.5 - centre) / ops.maximum(scale, 1.0)
        bilinear = method == "bilinear_antialias"
        weights = _triangle(distance) if bilinear else _cubic(distance, -0.5)
        return weights / ops.sum(weights, axis=-1, keepdims=True)
    position = centre - 0.5
    if method == "bilinear":
        return _triangle(columns - ops.clip(position, 0.0, old - 1.0))
    start = ops.floor(position)
    # Samples beyond the ends are those at the ends.
    taps = [
        _cubic(position - (start + tap), -0.75)
        * ops.cast(ops.equal(columns, ops.clip(start + tap, 0.0, old - 1.0)), place.dtype)
        for tap in range(-1, 3)
    ]
    return taps[0] + taps[1] + taps[2] + taps[3]


POOLINGS = ("gap", "map")


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexPatchEmbedding(Dense):
    """Projects patches that are rows already: `Dense`, drawn first as `PatchEmbedding` is.

    Call:
        patches (B, N, patch * patch * C) -> (B, N, D).

    Weights:
        kernel (patch * patch * C, D), rows in the order (row, column, channel); bias (D,).
    """

    def __init__(self, units: int, use_bias: bool = True, **kwargs: Any):
        drawn = keras.initializers.VarianceScaling(mode="fan_in", distribution="untruncated_normal")
        super().__init__(units, use_bias=use_bias, **{"kernel_initializer": drawn, **kwargs})

    def call(self, patches: Tensor) -> Any:
        """(B, N, patch * patch * C) -> (B, N, D)."""
        # A functional model gives its inputs the dtype that its graph says.
        return super().call(keras.ops.cast(patches, self.compute_dtype))


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexTokens(Layer):
    """Adds the position of each patch, from a table that is resized to the grid of its image.

    Args:
        config: config of the backbone; its grid is that of the table.

    Call:
        patches (B, N, D), spatial_shapes (B, S, 2) int -> (B, N, D).

    Weights:
        position_embedding (1, P, D).

    Source:
        Tschannen et al. 2025, arXiv:2502.14786; Transformers' `Siglip2VisionEmbeddings`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.config = ViTConfig.of(config)

    def build(
        self, patches_shape: tuple[int | None, ...], spatial_shapes_shape: Shape | None = None
    ) -> None:
        """Makes the table."""
        shape = (1, self.config.num_positions, self.config.hidden_dim)
        normal = keras.initializers.RandomNormal(stddev=0.02)
        self.position_embedding = self.add_parameter("position_embedding", shape, normal)

    def call(self, patches: Tensor, spatial_shapes: Tensor) -> Any:
        """(B, N, D), (B, S, 2) -> (B, N, D)."""
        table: Any = self.position_embedding
        # Weights of the resizing are rounded as transformers' are: in float32 at least.
        table = keras.ops.cast(table[0], wide(patches))
        places, sizes = (
            keras.ops.cast(x, table.dtype)
            for x in places_of(spatial_shapes, keras.ops.shape(patches)[1])
        )
        ops, grid = keras.ops, self.config.grid
        method = cast(Method, self.config.position_interpolation)
        down, across = (
            resize_weights(places[..., axis], sizes[..., axis], grid[axis], method)
            for axis in (0, 1)
        )
        both = ops.expand_dims(down, -1) * ops.expand_dims(across, -2)  # (B, N, rows, columns)
        shape = ops.shape(both)
        weights = ops.reshape(both, (shape[0], shape[1], grid[0] * grid[1]))
        positions = ops.matmul(weights, table)
        return patches + keras.ops.cast(positions, patches.dtype)

    def compute_output_shape(
        self, patches_shape: tuple[int | None, ...], spatial_shapes_shape: Shape | None = None
    ) -> tuple[int | None, ...]:
        """(B, N, D)."""
        return patches_shape


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexPooling(Pooling):
    """One vector for each image of a row.

    Args:
        kind: "gap", the mean over the patches of an image, or "map", attention of a learned query
            over them, as of `Pooling`.

    Call:
        tokens (B, N, D), segment_ids (B, N) int, spatial_shapes (B, S, 2) int, of which the number
        of images counts -> (B, S, D). For an image that is not there the numbers mean nothing.

    Weights:
        those of `Pooling`.
    """

    def build(
        self,
        tokens_shape: tuple[int | None, ...],
        segment_ids_shape: Shape | None = None,
        spatial_shapes_shape: Shape | None = None,
    ) -> None:
        """Makes the attention of the "map" head."""
        super().build(tokens_shape)

    def call(  # type: ignore[override]
        self, tokens: Tensor, segment_ids: Tensor, spatial_shapes: Tensor
    ) -> Any:
        """(B, N, D) -> (B, S, D)."""
        ops, images = keras.ops, keras.ops.shape(spatial_shapes)[1]
        # Which patches belong to each image of a row: (B, N) -> (B, S, N).
        numbers = ops.reshape(ops.arange(1, images + 1, dtype="int32"), (1, -1, 1))
        seen = ops.equal(ops.expand_dims(segment_ids, 1), numbers)
        if self.kind == "gap":
            share = ops.cast(seen, tokens.dtype)
            count = ops.maximum(ops.sum(share, axis=-1, keepdims=True), 1.0)
            return ops.einsum("bsn,bnd->bsd", share, tokens) / count
        probe = ops.tile(ops.cast(self.probe, tokens.dtype), (ops.shape(tokens)[0], images, 1))
        x = self.attention(probe, tokens, attention_mask=seen)
        return x + ops.cast(self.mlp(self.mlp_norm(x)), x.dtype)

    def compute_output_shape(  # type: ignore[override]
        self,
        tokens_shape: tuple[int | None, ...],
        segment_ids_shape: Shape,
        spatial_shapes_shape: tuple[int | None, ...],
    ) -> tuple[int | None, ...]:
        """(B, S, D)."""
        return (tokens_shape[0], spatial_shapes_shape[1], tokens_shape[2])
