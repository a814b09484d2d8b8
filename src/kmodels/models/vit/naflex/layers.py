"""The layers of a ViT that differ where images of several grids share a row of patches."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer
from kmodels.layers.base import Shape
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.layers import Pooling
from kmodels.models.vit.naflex.positions import resized_positions
from kmodels.models.vit.naflex.rows import places_of, seen_by_image
from kmodels.ops._wide import wide

POOLINGS = ("gap", "map")


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexPatchEmbedding(Dense):
    """Projects patches that are rows already: `Dense`, drawn first as `PatchEmbedding` is.

    Args:
        units: width D.
        use_bias: adds a bias.
        **kwargs: of `layers.Dense`.

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
        config = self.config
        method = config.position_interpolation
        found = resized_positions(table, config.grid, places, sizes, method)
        return patches + keras.ops.cast(found, patches.dtype)

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
        config: config of the backbone.

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
        seen = seen_by_image(segment_ids, images)
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
