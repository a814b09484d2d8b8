"""Patches that are left out at random, in training."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Layer
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.fewer_tokens.rows import rows


@keras.saving.register_keras_serializable(package="kmodels")
class PatchDropout(Layer):
    """Leaves patches of each image out at random, in training; what stays keeps its order.

    Class token, distillation token and registers always stay. So many patches stay as in timm:
    `max(1, int(P * (1 - patch_drop_rate)))`, for each image others.

    Args:
        config: config of the backbone.

    Call:
        tokens (B, prefix + P, D) -> the same, or in training (B, prefix + kept, D); with the
        `coordinates` (T, 2) of a rotary embedding a pair of that and (B, prefix + kept, 2).

    Source:
        Liu et al. 2022, arXiv:2208.07220; Li et al. 2022, arXiv:2212.00794; timm's `PatchDropout`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.config = ViTConfig.of(config)
        self.seed_generator = None
        if self.config.rope_theta is not None:
            self.keep_keywords()

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the random stream."""
        self.seed_generator = self.add_seed(self.config.patch_drop_rate)

    def call(
        self, tokens: Tensor, training: bool = False, coordinates: Tensor | None = None
    ) -> Any:
        """Returns the tokens that stay, and where they stand if that was told."""
        if not training or self.seed_generator is None:
            return tokens if coordinates is None else (tokens, coordinates)
        ops, prefix = keras.ops, self.config.num_prefix_tokens
        batch, patches = ops.shape(tokens)[0], tokens.shape[1] - prefix
        kept = max(1, int(patches * (1.0 - self.config.patch_drop_rate)))
        drawn = keras.random.uniform((batch, patches), dtype="float32", seed=self.seed_generator)
        index = ops.sort(ops.argsort(drawn, axis=-1)[:, :kept], axis=-1) + prefix
        stays = ops.broadcast_to(ops.arange(prefix, dtype=index.dtype), (batch, prefix))
        index = ops.concatenate([stays, index], axis=1)
        found = rows(tokens, index)
        return found if coordinates is None else (found, ops.take(coordinates, index, axis=0))

    def compute_output_spec(
        self,
        tokens: keras.KerasTensor,
        training: bool = False,
        coordinates: keras.KerasTensor | None = None,
    ) -> Any:
        """Returns shapes and dtypes outside of training."""
        found = keras.KerasTensor(tokens.shape, self.compute_dtype)
        if coordinates is None:
            return found
        return found, keras.KerasTensor(coordinates.shape, coordinates.dtype)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the input's shape, which is that outside of training."""
        return input_shape
