"""Layers of a ViT: patch embedding, tokens with positions, pooling, and patch coordinates."""

import math
from collections.abc import Mapping
from typing import Any

import keras

from kmodels import ops
from kmodels.core import seeds, traced
from kmodels.core.runtime import check_channels_last
from kmodels.core.types import InitializerLike, Tensor
from kmodels.layers import MLP, Attention, Layer, LayerNorm
from kmodels.layers.dense import WithKernel
from kmodels.models.vit.config import ViTConfig

# Number of leading tokens that these poolings read; the others read all tokens.
KEPT = {"token": 1, "distilled": 2}


def _normal() -> keras.initializers.Initializer:
    return keras.initializers.RandomNormal(stddev=0.02)


@keras.saving.register_keras_serializable(package="kmodels")
class PatchEmbedding(traced.Noted, WithKernel):
    """Cuts an image into patches and projects each (Dosovitskiy et al. 2021, eq. 1).

    Args:
        patch_size: side of a patch in pixels.
        units: width D.
        use_bias: adds a bias.
        kernel_initializer: as Keras takes it; None for a normal distribution of variance 1 / rows,
            as in the original.
        **kwargs: further initializers, regularizers and constraints, as in `layers.Dense`, and
            arguments of `keras.layers.Layer`.

    Call:
        images (B, height, width, C) -> (B, P, D), patches row by row.

    Weights:
        kernel (patch * patch * C, D), rows in the order (row, column, channel); bias (D,).

    Raises:
        InputError: if Keras' `image_data_format` is "channels_first".
    """

    def __init__(
        self,
        patch_size: int,
        units: int,
        use_bias: bool = True,
        kernel_initializer: InitializerLike = None,
        **kwargs: Any,
    ):
        if kernel_initializer is None:
            kernel_initializer = keras.initializers.VarianceScaling(
                mode="fan_in", distribution="untruncated_normal"
            )
        super().__init__(kernel_initializer=kernel_initializer, **kwargs)
        check_channels_last()
        self.supports_masking = False
        self.patch_size = patch_size
        self.units = units
        self.use_bias = use_bias
        self.bias = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the kernel for the number of channels."""
        rows = self.patch_size**2 * (input_shape[-1] or 1)
        self.kernel = self.add_parameter("kernel", (rows, self.units), self.kernel_initializer)
        if self.use_bias:
            self.bias = self.add_parameter("bias", (self.units,), self.bias_initializer)

    def call(self, images: Tensor) -> Any:
        """(B, height, width, C) -> (B, P, D)."""
        # A functional model gives its inputs the dtype that its graph says.
        if keras.backend.standardize_dtype(images.dtype) != self.compute_dtype:
            images = keras.ops.cast(images, self.compute_dtype)
        return ops.patch_embedding(images, self.kernel, self.bias, patch_size=self.patch_size)

    def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int | None, ...]:
        """(B, P, D)."""
        patches = (input_shape[1] // self.patch_size) * (input_shape[2] // self.patch_size)
        return (input_shape[0], patches, self.units)


@keras.saving.register_keras_serializable(package="kmodels")
class Tokens(Layer):
    """Prepends class token and registers to the patches and adds the position embedding.

    Order of the result: class token, distillation token, registers, patches. If the position
    embedding has no rows for the first two, it is added to the patches alone (timm's
    `no_embed_class`); registers never get one.

    Call:
        patches (B, P, D) -> (B, prefix + P, D).

    Weights:
        class_token (1, 1, D), distillation_token (1, 1, D), register_tokens (1, R, D),
        position_embedding (1, P, D) or with rows in front for the first two, if there is one;
        mask_token (1, 1, D), which is not trained.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.config = ViTConfig.of(config)
        self.num_special_positions = self.config.num_special_positions

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the tokens and the position embedding."""
        config, width = self.config, self.config.hidden_dim
        if config.use_class_token:
            self.class_token = self.add_parameter("class_token", (1, 1, width), "zeros")
        if config.use_distillation_token:
            self.distillation_token = self.add_parameter(
                "distillation_token", (1, 1, width), "zeros"
            )
        if config.use_mask_token:
            self.mask_token = self.add_parameter(
                "mask_token", (1, 1, width), "zeros", trainable=False
            )
        if config.num_register_tokens:
            self.register_tokens = self.add_parameter(
                "register_tokens", (1, config.num_register_tokens, width), _normal()
            )
        if config.use_position_embedding:
            self.position_embedding = self.add_parameter(
                "position_embedding", (1, config.num_positions, width), _normal()
            )

    def call(self, patches: Tensor) -> Any:
        """(B, P, D) -> (B, prefix + P, D)."""
        config = self.config
        position: Any = self.position_embedding if config.use_position_embedding else None
        batch = keras.ops.shape(patches)[0]
        prefix = []
        if config.use_class_token:
            prefix.append(self.class_token)
        if config.use_distillation_token:
            prefix.append(self.distillation_token)
        if rows := self.num_special_positions:
            prefix = [token + position[:, i : i + 1] for i, token in enumerate(prefix)]
            position = position[:, rows:]
        if config.num_register_tokens:
            prefix.append(self.register_tokens)
        if position is not None:
            patches = patches + position
        if not prefix:
            return patches
        shape = (batch, 1, 1)
        prefix = [keras.ops.tile(keras.ops.cast(x, patches.dtype), shape) for x in prefix]
        return keras.ops.concatenate([*prefix, patches], axis=1)

    def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int | None, ...]:
        """(B, prefix + P, D)."""
        return (input_shape[0], input_shape[1] + self.config.num_prefix_tokens, input_shape[2])


@keras.saving.register_keras_serializable(package="kmodels")
class Pooling(Layer):
    """Pools the tokens to one vector.

    Args:
        kind: "token", the class token; "gap", the mean over the patches; "max", their maximum;
            "avgmax", the mean of these two; "token_gap", class token and mean, concatenated;
            "distilled", the mean of class and distillation token; "map", attention of a
            learned query over the patches, or with `pool_include_prefix` over all tokens, then a
            residual MLP (Zhai et al. 2022, section 3.4).

    Call:
        tokens (B, prefix + P, D) -> (B, D), or (B, 2 D) with "token_gap". "token" and "distilled"
        read only as many leading tokens as `KEPT` says.

    Weights:
        none, or with "map": probe (1, 1, D), attention, mlp_norm, mlp.
    """

    def __init__(self, kind: str, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.kind = kind
        self.config = ViTConfig.of(config)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the attention of the "map" head."""
        if self.kind != "map":
            return
        config, policy, width = self.config, self.dtype_policy, self.config.hidden_dim
        self.probe = self.add_parameter("probe", (1, 1, width), _normal())
        heads = config.pooling_num_heads or config.num_heads
        self.attention = Attention(heads, name="attention", dtype=policy)
        self.attention.build((None, 1, width))
        self.mlp_norm = LayerNorm(config.layer_norm_epsilon, name="mlp_norm", dtype=policy)
        self.mlp_norm.build((None, 1, width))
        self.mlp = MLP(
            config.pooling_mlp_dim or config.mlp_dim,
            approximate=config.approximate_gelu,
            name="mlp",
            dtype=policy,
        )
        self.mlp.build((None, 1, width))

    def call(self, tokens: Tensor) -> Any:
        """(B, prefix + P, D) -> (B, D), or (B, 2 D) with "token_gap"."""
        if self.kind == "token":
            return tokens[:, 0]
        if self.kind == "distilled":
            return (tokens[:, 0] + tokens[:, 1]) / 2
        patches = tokens[:, self.config.num_prefix_tokens :]
        if self.kind == "gap":
            return keras.ops.mean(patches, axis=1)
        if self.kind == "max":
            return keras.ops.max(patches, axis=1)
        if self.kind == "avgmax":
            return (keras.ops.max(patches, axis=1) + keras.ops.mean(patches, axis=1)) / 2
        if self.kind == "token_gap":
            return keras.ops.concatenate([tokens[:, 0], keras.ops.mean(patches, axis=1)], axis=-1)
        x = self.attention(*self.query_and_seen(tokens))  # (B, 1, D)
        return (x + keras.ops.cast(self.mlp(self.mlp_norm(x)), x.dtype))[:, 0]

    def query_and_seen(self, tokens: Tensor) -> tuple[Any, Any]:
        """Returns the query (B, 1, D) of the "map" head, and the tokens (B, S, D) that it reads."""
        probe = keras.ops.cast(self.probe, tokens.dtype)
        first = 0 if self.config.pool_include_prefix else self.config.num_prefix_tokens
        seen = tokens[:, first:]
        return keras.ops.tile(probe, (keras.ops.shape(tokens)[0], 1, 1)), seen

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """(B, D), or (B, 2 D) with "token_gap"."""
        width = self.config.hidden_dim
        return (input_shape[0], 2 * width if self.kind == "token_gap" else width)


@keras.saving.register_keras_serializable(package="kmodels")
class PatchCoordinates(Layer):
    """Coordinates of all tokens in radians, shifted and scaled at random in training (DINOv3).

    One draw is used for all images of a step and all blocks. Class token and registers are at
    (0, 0), so they are not rotated.

    Call:
        images (B, height, width, C), which are not read -> (T, 2), float32, or float64 if the
        layer computes in float64.

    Source:
        Simeoni et al. 2025, section 3.2; transformers' `augment_patches_center_coordinates`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.config = ViTConfig.of(config)
        names = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
        self.ranges = tuple(getattr(self.config, name) for name in names)
        self.seed_generator = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the random stream."""
        moves = any(value is not None for value in self.ranges)
        self.seed_generator = self.add_seed(float(moves))

    def call(self, images: Tensor, training: bool = False) -> Any:
        """Returns the coordinates (T, 2), in the axis order of `rope_type`."""
        ops, config, dtype = keras.ops, self.config, self._dtype
        rows, columns = config.grid
        down, along = self._line(0), self._line(1)
        down = ops.reshape(ops.repeat(ops.expand_dims(down, 1), columns, axis=1), (-1,))
        along = ops.reshape(ops.repeat(ops.expand_dims(along, 0), rows, axis=0), (-1,))
        order = [along, down] if config.rope_type == "cat" else [down, along]
        coordinates = ops.stack(order, axis=-1)
        if training and self.seed_generator is not None:
            coordinates = self._moved(coordinates)
        if config.rope_type == "dinov3":
            coordinates = coordinates * (2 * math.pi)
        if not config.num_prefix_tokens:
            return coordinates
        still = ops.zeros((config.num_prefix_tokens, 2), dtype)
        return ops.concatenate([still, coordinates], axis=0)

    @property
    def _dtype(self) -> str:
        return "float64" if self.compute_dtype == "float64" else "float32"

    def _line(self, axis: int) -> Any:
        """Returns the coordinates along one axis."""
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
            return seeds.uniform(shape, self.seed_generator, -reach, reach, self._dtype)

        if shift is not None:
            places = places + draw((1, 2), shift)
        if jitter is not None:
            places = places * keras.ops.exp(draw((1, 2), math.log(jitter)))
        if rescale is not None:
            places = places * keras.ops.exp(draw((1, 1), math.log(rescale)))
        return places

    def compute_output_spec(self, images: keras.KerasTensor, training: bool = False) -> Any:
        """Returns the shape and dtype of the coordinates."""
        rows, columns = self.config.grid
        shape = (rows * columns + self.config.num_prefix_tokens, 2)
        return keras.KerasTensor(shape, self._dtype)
