"""A whole tower as a layer, whose variables are named below it."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Layer
from kmodels.layers.base import Shape
from kmodels.models.clip import CLIPTextEncoder
from kmodels.models.siglip import SigLIPTextEncoder
from kmodels.models.vit import (
    CLIPVisionEncoder,
    SigLIPNaFlexVisionEncoder,
    SigLIPVisionEncoder,
)
from kmodels.models.vit.naflex.model import MASK, SHAPES, VALUES


@keras.saving.register_keras_serializable(package="kmodels")
class VisionTower(Layer):
    """Images to one vector each.

    Args:
        fields: fields of a `ViTConfig`.
        pools: whether the tower pools by attention, as SigLIP's; CLIP's class token counts else.
        **kwargs: of `keras.layers.Layer`.

    Call:
        images (B, height, width, C), preprocessed floats -> (B, D).

    Weights:
        those of the tower.
    """

    def __init__(self, fields: Mapping[str, Any], pools: bool, **kwargs: Any):
        super().__init__(**kwargs)
        self.fields = dict(fields)
        self.pools = pools

    def build(self, input_shape: Shape) -> None:
        """Makes the tower, whose variables are named below this layer."""
        kind = SigLIPVisionEncoder if self.pools else CLIPVisionEncoder
        self.tower = kind(**self.fields, name="tower", dtype=self.dtype_policy)

    def call(self, images: Tensor, training: bool = False) -> Any:
        """(B, height, width, C) -> (B, D)."""
        if self.pools:
            return self.tower({"images": images}, training=training)
        return self.tower({"images": images}, training=training, keep=1)[:, 0]

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, D)."""
        return (input_shape[0], self.fields["hidden_dim"])


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexVisionTower(Layer):
    """Patches of images of any aspect ratio to one vector each.

    Args:
        fields: fields of a `ViTConfig`.
        **kwargs: of `keras.layers.Layer`.

    Call:
        pixel_values (B, N, patch * patch * C), preprocessed floats, spatial_shapes (B, 2) int,
        pixel_attention_mask (B, N) int or None -> (B, D).

    Weights:
        those of the tower.
    """

    def __init__(self, fields: Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.fields = dict(fields)

    def build(self, pixel_values_shape: Shape, spatial_shapes_shape: Shape | None = None) -> None:
        """Makes the tower, whose variables are named below this layer."""
        kind = SigLIPNaFlexVisionEncoder
        self.tower = kind(**self.fields, name="tower", dtype=self.dtype_policy)

    def call(
        self,
        pixel_values: Tensor,
        spatial_shapes: Tensor,
        pixel_attention_mask: Tensor | None = None,
        training: bool = False,
    ) -> Any:
        """(B, N, patch * patch * C) -> (B, D)."""
        inputs = {VALUES: pixel_values, SHAPES: spatial_shapes, MASK: pixel_attention_mask}
        return self.tower(inputs, training=training)

    def compute_output_shape(
        self, pixel_values_shape: Shape, spatial_shapes_shape: Shape | None = None
    ) -> Shape:
        """(B, D)."""
        return (pixel_values_shape[0], self.fields["hidden_dim"])


@keras.saving.register_keras_serializable(package="kmodels")
class TextTower(Layer):
    """Texts to one vector each.

    Args:
        fields: fields of a `SigLIPTextConfig`, or a `CLIPTextConfig`.
        pools: whether the tower pools, as SigLIP's; a text counts at its end token else.
        **kwargs: of `keras.layers.Layer`.

    Call:
        token_ids (B, T) int, padding_mask (B, T) int or None -> (B, D).

    Weights:
        those of the tower.
    """

    def __init__(self, fields: Mapping[str, Any], pools: bool, **kwargs: Any):
        super().__init__(**kwargs)
        self.fields = dict(fields)
        self.pools = pools

    def build(self, input_shape: Shape) -> None:
        """Makes the tower, whose variables are named below this layer."""
        kind = SigLIPTextEncoder if self.pools else CLIPTextEncoder
        self.tower = kind(**self.fields, name="tower", dtype=self.dtype_policy)

    def call(
        self, token_ids: Tensor, padding_mask: Tensor | None = None, training: bool = False
    ) -> Any:
        """(B, T) -> (B, D)."""
        inputs = {"token_ids": token_ids, "padding_mask": padding_mask}
        hidden = self.tower(inputs, training=training)
        if isinstance(hidden, dict):
            hidden = hidden["sequence_output"]
        return self.tower.pool(hidden, token_ids)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, D)."""
        return (input_shape[0], self.fields["projection_dim" if self.pools else "hidden_dim"])
