"""One pass of EoMT, the blocks of a ViT of which the last carry queries, and its layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from kmodels import ops
from kmodels.core import seeds
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer, LayerNorm
from kmodels.models.vit.model import ViTBackbone

# How fast the share of masked queries falls, in the original's schedule.
POWER = 0.9
# The activation of the heads if the backbone has SwiGLU, as in transformers.
SILU = "silu"


def uniform() -> keras.initializers.Initializer:
    """Returns torch's initializer of linear layers and convolutions."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")


def activated(x: Tensor, approximate: bool | str) -> Any:
    """Returns GELU, with `approximate` as in `ops.gelu`; "silu" is SiLU."""
    return keras.ops.silu(x) if approximate == SILU else ops.gelu(x, approximate=approximate)


@keras.saving.register_keras_serializable(package="kmodels")
class Queries(Layer):
    """Prepends learned queries to the tokens.

    Call:
        tokens (B, T, D) -> (B, Q + T, D).

    Weights:
        embedding (Q, D).
    """

    def __init__(self, num_queries: int, **kwargs: Any):
        super().__init__(**kwargs)
        check_whole("num_queries", num_queries)
        self.num_queries = num_queries

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the queries."""
        self.embedding = self.add_parameter(
            "embedding",
            (self.num_queries, input_shape[-1] or 1),
            keras.initializers.RandomNormal(stddev=1.0),
        )

    def repeated(self, tokens: Tensor) -> Any:
        """Returns the queries for each row of tokens: (B, T, D) -> (B, Q, D)."""
        own = keras.ops.cast(keras.ops.expand_dims(self.embedding, 0), tokens.dtype)
        return keras.ops.tile(own, (keras.ops.shape(tokens)[0], 1, 1))

    def call(self, tokens: Tensor) -> Any:
        """(B, T, D) -> (B, Q + T, D)."""
        return keras.ops.concatenate([self.repeated(tokens), tokens], axis=1)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """(B, Q + T, D)."""
        batch, length, width = input_shape
        return (batch, None if length is None else length + self.num_queries, width)


@keras.saving.register_keras_serializable(package="kmodels")
class MaskProbabilities(Layer):
    """The share of the queries that attend only to their own mask, for each block with queries.

    Args:
        num_blocks: number of those blocks, K.
        annealing_steps: steps of the training, over which the shares fall from 1 to 0, one block
            after the other: the first begins after 1 / (K + 2) of them, takes as many, and so on,
            so that the last part of the training is without masks. None leaves the shares alone.

    Call:
        anything, which is not read -> float32 (K,); in training, each call is a step.

    Weights:
        attn_mask_probs (K,), which is not trained; step (), int32, with `annealing_steps`.

    Source:
        Kerssies et al. 2025, section 3.3 (arXiv:2503.19108).
    """

    def __init__(self, num_blocks: int, annealing_steps: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        check_whole("num_blocks", num_blocks)
        if annealing_steps is not None:
            check_whole("annealing_steps", annealing_steps)
        self.num_blocks = num_blocks
        self.annealing_steps = annealing_steps

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the shares, which are 1 at first."""
        self.attn_mask_probs = self.add_parameter(
            "attn_mask_probs", (self.num_blocks,), "ones", trainable=False, dtype="float32"
        )
        if self.annealing_steps is not None:
            self.step = self.add_parameter("step", (), "zeros", trainable=False, dtype="int32")

    def call(self, x: Tensor, training: bool = False) -> Any:
        """Returns the shares (K,)."""
        if training and self.annealing_steps is not None:
            self.attn_mask_probs.assign(self.after(self.step))
            self.step.assign(self.step + 1)
        return keras.ops.convert_to_tensor(self.attn_mask_probs, dtype="float32")

    def after(self, step: Tensor | int) -> Any:
        """Returns the shares after some steps, float32 (K,)."""
        part = (self.annealing_steps or 1) / (self.num_blocks + 2)
        begin = keras.ops.arange(1, self.num_blocks + 1, dtype="float32")
        done = keras.ops.cast(step, "float32") / part - begin
        return (1.0 - keras.ops.clip(done, 0.0, 1.0)) ** POWER

    def compute_output_spec(self, x: Tensor, training: bool = False) -> Any:
        """Returns shape and dtype of the shares."""
        return keras.KerasTensor((self.num_blocks,), "float32")


@keras.saving.register_keras_serializable(package="kmodels")
class QueryMasking(Layer):
    """Attention mask by which queries attend only to the patches of their predicted mask.

    Queries also attend to each other and to the prefix tokens; all other tokens attend to
    everything. In training a query is left unmasked with probability 1 minus the block's share;
    otherwise a block with a share of 0 masks no query, and the other blocks mask all.

    Args:
        index: number of the block among those with queries.
        prefix: tokens between queries and patches.
        seed: random seed; None for the layer's own stream.

    Call:
        logits (B, Q, h, w) of the masks on the grid of the patches, shares (K,) ->
        bool (B, T, T), T = Q + prefix + h * w.
    """

    def __init__(self, index: int, prefix: int, seed: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.index = index
        self.prefix = prefix
        self.seed = seed

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes the random stream."""
        self.seed_generator = self.add_seed(1.0, self.seed)

    def call(self, logits: Tensor, shares: Tensor, training: bool = False) -> Any:
        """(B, Q, h, w), (K,) -> (B, T, T)."""
        batch = keras.ops.shape(logits)[0]
        queries, height, width = logits.shape[1:]
        patches = height * width
        share = shares[self.index]
        seen = keras.ops.reshape(logits, (batch, queries, patches)) > 0
        if training:
            drawn = seeds.uniform((batch, queries, 1), self.seed_generator)
            free = drawn >= keras.ops.cast(share, "float32")
        else:
            free = share <= 0
        seen = keras.ops.logical_or(seen, free)
        others = self.prefix + patches
        top = keras.ops.ones((batch, queries, queries + self.prefix), dtype="bool")
        rest = keras.ops.ones((batch, others, queries + others), dtype="bool")
        return keras.ops.concatenate([keras.ops.concatenate([top, seen], axis=2), rest], axis=1)

    def compute_output_spec(self, logits: Tensor, shares: Tensor, training: bool = False) -> Any:
        """Returns the shape and dtype of the mask."""
        batch, queries, height, width = logits.shape
        length = queries + self.prefix + height * width
        return keras.KerasTensor((batch, length, length), "bool")


@keras.saving.register_keras_serializable(package="kmodels")
class Upscale(Layer):
    """Doubles the sides of a map: a transposed convolution, GELU, a depthwise one, and a norm.

    Args:
        approximate: as in `ops.gelu`, or "silu" for SiLU.

    Call:
        (B, h, w, D) -> (B, 2 h, 2 w, D).

    Weights:
        kernel (D, 4 D), for the pixels of each 2x2 in the order (row, column), and bias (D,);
        depthwise_kernel (3, 3, D, 1); norm.
    """

    def __init__(self, approximate: bool | str = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.approximate = approximate
        self.norm = LayerNorm(1e-6, name="norm", dtype=self.dtype_policy)

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes kernels and norm."""
        width = input_shape[-1] or 1
        # Each pixel of the result has one pixel in front of it, and each channel nine.
        self.kernel = self.add_parameter("kernel", (width, 4 * width), uniform())
        self.bias = self.add_parameter("bias", (width,), "zeros")
        self.depthwise_kernel = self.add_parameter(
            "depthwise_kernel", (3, 3, width, 1), keras.initializers.RandomUniform(-1 / 3, 1 / 3)
        )
        self.norm.build((None, width))

    def call(self, x: Tensor) -> Any:
        """(B, h, w, D) -> (B, 2 h, 2 w, D)."""
        height, width, channels = x.shape[1:]
        dtype = x.dtype
        y = ops.dense(x, keras.ops.cast(self.kernel, dtype))
        y = keras.ops.reshape(y, (-1, height, width, 2, 2, channels))
        y = keras.ops.transpose(y, (0, 1, 3, 2, 4, 5))
        y = keras.ops.reshape(y, (-1, 2 * height, 2 * width, channels))
        y = activated(y + keras.ops.cast(self.bias, dtype), self.approximate)
        kernel = keras.ops.cast(self.depthwise_kernel, dtype)
        y = keras.ops.depthwise_conv(y, kernel, padding="same", data_format="channels_last")
        return self.norm(y)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """(B, 2 h, 2 w, D)."""
        batch, height, width, channels = input_shape
        return (batch, height and 2 * height, width and 2 * width, channels)


@keras.saving.register_keras_serializable(package="kmodels")
class MaskHead(Layer):
    """Three dense layers with GELU between them.

    Args:
        approximate: as in `ops.gelu`, or "silu" for SiLU.

    Call:
        (B, Q, D) -> (B, Q, D).

    Weights:
        dense_0, dense_1, dense_2: kernel (D, D) and bias (D,).
    """

    def __init__(self, approximate: bool | str = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.approximate = approximate

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes the dense layers."""
        width = input_shape[-1] or 1
        for i in range(3):
            layer = Dense(
                width, kernel_initializer=uniform(), name=f"dense_{i}", dtype=self.dtype_policy
            )
            setattr(self, f"dense_{i}", layer)
            layer.build((None, width))

    def call(self, x: Tensor) -> Any:
        """(B, Q, D) -> (B, Q, D)."""
        x = activated(self.dense_0(x), self.approximate)
        x = activated(self.dense_1(x), self.approximate)
        return self.dense_2(x)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Any:
        """Returns the input's shape."""
        return input_shape


@dataclass(frozen=True)
class Prediction:
    """The predictions of all queries behind a block.

    Args:
        masks: logits (B, Q, h, w), float32.
        classes: logits (B, Q, num_classes + 1), float32.
    """

    masks: Any
    classes: Any


class MaskTransformer:
    """The layers of an EoMT, and how images go through them.

    Args:
        num_blocks: blocks that carry them, the last of the backbone.
        num_upscale_blocks: how often the sides of the grid of patches are doubled.
        annealing_steps: see `MaskProbabilities`.
        policy: policy of the layers that are not the backbone's.

    Raises:
        InputError: for a backbone that has no token for each patch, or too few blocks.
    """

    def __init__(
        self,
        backbone: ViTBackbone,
        num_classes: int,
        num_queries: int,
        num_blocks: int,
        num_upscale_blocks: int,
        annealing_steps: int | None,
        policy: keras.DTypePolicy,
    ):
        config = backbone.config
        check_whole("num_blocks", num_blocks)
        if num_blocks > config.num_layers:
            raise InputError(
                f"num_blocks is {num_blocks}, and the backbone has {config.num_layers} blocks; "
                "give as many or fewer"
            )
        if config.patch_drop_rate or config.token_merging:
            raise InputError(
                "the backbone leaves out patches or merges tokens, of which masks would have no "
                "pixels; leave patch_drop_rate and token_merging at 0"
            )
        if (
            not config.final_norm
            or len(backbone.output.shape) != 3
            or backbone.steps[-1].name != ("final_norm")
        ):
            raise InputError(
                f"{type(backbone).__name__} has no norm behind its last block, by which queries "
                "and patches are read; give a ViTBackbone with final_norm=True"
            )
        gated = config.use_swiglu_ffn and config.rope_theta is not None
        # transformers has one activation for the gates of a DINOv3 and the heads.
        gelu = SILU if gated else config.approximate_gelu
        self.backbone = backbone
        self.num_queries = num_queries
        self.dtype = policy.compute_dtype
        self.first = config.num_layers - num_blocks
        self.scale = 2**num_upscale_blocks
        self.queries = Queries(num_queries, name="queries", dtype=backbone.dtype_policy)
        self.probabilities = MaskProbabilities(
            num_blocks, annealing_steps, name="mask_probabilities", dtype="float32"
        )
        self.maskings = [
            QueryMasking(i, config.num_prefix_tokens, name=f"query_masking_{i}", dtype="float32")
            for i in range(num_blocks)
        ]
        self.upscales = [
            Upscale(gelu, name=f"upscale_{i}", dtype=policy) for i in range(num_upscale_blocks)
        ]
        self.mask_head = MaskHead(gelu, name="mask_head", dtype=policy)
        self.class_head = Dense(
            num_classes + 1, kernel_initializer=uniform(), name="class_logits", dtype=policy
        )

    def __call__(self, images: Tensor, masked: Sequence[bool], **mode: bool) -> list[Prediction]:
        """Returns predictions in front of each masked block, and that behind the last one.

        Args:
            images: (B, height, width, C).
            masked: of each block with queries, whether they see only their masks in it.
            **mode: `training`, or nothing.
        """
        backbone, x, predictions = self.backbone, images, []
        shares = self.probabilities(images, **mode)
        info = backbone.info(images, **mode)
        norm = backbone.steps[-1]
        for step in backbone.steps:
            if step not in backbone.blocks:
                x = step(x, **mode)
                continue
            number = backbone.blocks.index(step) - self.first
            if number == 0:
                x = self.queries(x)
                if info.coordinates is not None:  # queries are at (0, 0): they are not rotated
                    still = keras.ops.zeros((self.num_queries, 2), dtype=info.coordinates.dtype)
                    coordinates = keras.ops.concatenate([still, info.coordinates], axis=0)
                    info = info._replace(coordinates=coordinates)
            if number >= 0 and masked[number]:
                prediction, grid = self._predict(norm(x, **mode))
                predictions.append(prediction)
                seen = self.maskings[number](grid, shares, **mode)
                x = step(x, info=info._replace(attention_mask=seen), **mode)
            else:
                x = step(x, info=info, **mode)
        return [*predictions, self._predict(x)[0]]

    def _predict(self, tokens: Tensor) -> tuple[Prediction, Any]:
        """Returns the prediction from normed tokens, and its masks on the grid of the patches."""
        ops, config = keras.ops, self.backbone.config
        tokens = ops.cast(tokens, self.dtype)
        queries = tokens[:, : self.num_queries]
        patches = tokens[:, self.num_queries + config.num_prefix_tokens :]
        features = ops.reshape(patches, (-1, *config.grid, config.hidden_dim))
        for upscale in self.upscales:
            features = upscale(features)
        wide = "float64" if self.dtype == "float64" else "float32"
        masks = ops.einsum("bqd,bhwd->bqhw", self.mask_head(queries), features)
        masks = ops.cast(masks, wide)
        classes = ops.cast(self.class_head(queries), wide)
        return Prediction(masks, classes), self._on_grid(masks)

    def _on_grid(self, masks: Tensor) -> Any:
        """Returns masks in the size of the grid, bilinear without smoothing.

        Of an even number of pixels the two in the middle count.
        """
        if self.scale == 1:
            return masks
        ops, (rows, columns) = keras.ops, self.backbone.config.grid
        x = ops.reshape(masks, (-1, self.num_queries, rows, self.scale, columns, self.scale))
        low, high = self.scale // 2 - 1, self.scale // 2 + 1
        return ops.mean(x[:, :, :, low:high, :, low:high], axis=(3, 5))


def class_scores(prediction: Prediction, size: tuple[int, int]) -> Any:
    """Returns the score of each class at each pixel: sum over queries of class x mask probability.

    Args:
        prediction: of a batch.
        size: (height, width) of the images.

    Returns:
        float32 (B, height, width, num_classes).

    Source:
        Cheng et al. 2021, section 3.4 (arXiv:2107.06278).
    """
    ops = keras.ops
    masks = ops.transpose(prediction.masks, (0, 2, 3, 1))
    if tuple(masks.shape[1:3]) != size:
        masks = ops.image.resize(masks, size, "bilinear", data_format="channels_last")
    shares = ops.softmax(prediction.classes, axis=-1)[..., :-1]
    return ops.einsum("bhwq,bqk->bhwk", ops.sigmoid(masks), shares)
