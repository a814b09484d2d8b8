"""The places of a ViT's tokens in the image, by which a rotary embedding turns."""

import math
from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Layer
from kmodels.models.vit.config import ViTConfig


@keras.saving.register_keras_serializable(package="kmodels")
class PatchCoordinates(Layer):
    """Places of all tokens in radians, moved and scaled at random in training (DINOv3).

    One draw serves all images of a step and all blocks. Class token and registers stand at (0, 0),
    where nothing turns.

    Args:
        config: config of the backbone.

    Call:
        images (B, height, width, C), which are not read -> (T, 2), float32, or float64 where the
        layer computes in it.

    Source:
        Simeoni et al. 2025, section 3.2; transformers' `augment_patches_center_coordinates`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.config = ViTConfig.of(config)
        held = self.config
        self.ranges = (held.pos_embed_shift, held.pos_embed_jitter, held.pos_embed_rescale)
        self.seed_generator = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the random stream."""
        moves = any(value is not None for value in self.ranges)
        self.seed_generator = self.add_seed(float(moves))

    def call(self, images: Tensor, training: bool = False) -> Any:
        """Returns the places (T, 2): those along the first axis that the type names, the second."""
        ops, config, dtype = keras.ops, self.config, self._dtype
        rows, columns = config.grid
        down, along = self._line(0), self._line(1)
        down = ops.reshape(ops.repeat(ops.expand_dims(down, 1), columns, axis=1), (-1,))
        along = ops.reshape(ops.repeat(ops.expand_dims(along, 0), rows, axis=0), (-1,))
        is_centered = config.rope_type == "dinov3"
        found = ops.stack([down, along] if is_centered else [along, down], axis=-1)
        if training and self.seed_generator is not None:
            found = self._moved(found)
        if is_centered:
            found = found * (2 * math.pi)
        if not config.num_prefix_tokens:
            return found
        still = ops.zeros((config.num_prefix_tokens, 2), dtype)
        return ops.concatenate([still, found], axis=0)

    @property
    def _dtype(self) -> str:
        return "float64" if self.compute_dtype == "float64" else "float32"

    def _line(self, axis: int) -> Any:
        """Returns the places along one side."""
        number = self.config.grid[axis]
        steps = keras.ops.arange(number, dtype=self._dtype)
        if self.config.rope_type == "dinov3":
            return (steps + 0.5) * (2.0 / number) - 1.0
        steps = steps + self.config.rope_grid_offset
        wanted = self.config.ref_feat_shape
        return steps if wanted is None else steps / number * wanted[axis]

    def _moved(self, places: Tensor) -> Any:
        shift, jitter, rescale = self.ranges

        def draw(shape: tuple[int, ...], reach: float) -> Any:
            drawn = keras.random.uniform(shape, -reach, reach, self._dtype, self.seed_generator)
            return drawn

        if shift is not None:
            places = places + draw((1, 2), shift)
        if jitter is not None:
            places = places * keras.ops.exp(draw((1, 2), math.log(jitter)))
        if rescale is not None:
            places = places * keras.ops.exp(draw((1, 1), math.log(rescale)))
        return places

    def compute_output_spec(self, images: keras.KerasTensor, training: bool = False) -> Any:
        """Returns shape and dtype of what `call` gives."""
        rows, columns = self.config.grid
        shape = (rows * columns + self.config.num_prefix_tokens, 2)
        return keras.KerasTensor(shape, self._dtype)
