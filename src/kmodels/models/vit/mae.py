"""Pretraining of a ViT as a masked autoencoder (MAE)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals, seeds
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import DTypeLike, Tensor, Tree
from kmodels.layers import Dense, Layer, LayerNorm
from kmodels.layers.base import Shape
from kmodels.layers.placement import of_family
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.fewer_tokens import rows
from kmodels.models.vit.model import Block, ViTBackbone
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor
from kmodels.task import Compiled, Task, setting
from kmodels.training.losses import InsideStep, StepsWithOwnLoss

# === Layers ===


def sines(grid: tuple[int, int], width: int, prefix: int = 0) -> np.ndarray:
    """Returns sine-cosine position embeddings of the patches.

    Args:
        grid: (rows, columns) of patches.
        width: width of the tokens, a multiple of four.
        prefix: tokens in front of the patches, whose rows are zeros.

    Returns:
        float32 (prefix + rows * columns, width): sines of the column, its cosines, sines of the
        row, its cosines, in the order of MAE's published weights.

    Raises:
        InputError: for a width that four does not divide.
    """
    if width % 4:
        raise InputError(f"a width of {width} has no fixed positions; give a multiple of 4")
    frequencies = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    row, column = (axis.reshape(-1, 1) * frequencies for axis in np.indices(grid))
    parts = [np.sin(column), np.cos(column), np.sin(row), np.cos(row)]
    return np.pad(np.concatenate(parts, axis=1), ((prefix, 0), (0, 0))).astype("float32")


def draw_sines(grid: tuple[int, int], prefix: int, shape: Sequence[int], dtype: Any = None) -> Any:
    """Returns `sines` as the first value of a variable (1, prefix + rows * columns, width)."""
    return keras.ops.convert_to_tensor(
        sines(grid, shape[-1], prefix)[None], dtype=dtype or keras.config.floatx()
    )


@keras.saving.register_keras_serializable(package="kmodels")
class PatchMasking(Layer):
    """Keeps the tokens of the visible patches, in a random order.

    Args:
        num_patches: patches of an image.
        num_seen: number of visible patches.
        prefix: number of leading tokens, which are kept.

    Call:
        tokens (B, prefix + P, D) -> tokens (B, prefix + K, D), of the patches with the smallest
        `noise`, float (B, P); and their order, int32 (B, P): for each patch its place by noise.
        Without noise both are those of one order that is the same for all images and on every
        backend.
    """

    def __init__(self, num_patches: int, num_seen: int, prefix: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = False
        self.num_patches = num_patches
        self.num_seen = num_seen
        self.prefix = prefix
        drawn = np.random.Generator(np.random.Philox(0)).permutation(num_patches)
        self.usual_order = drawn.astype("int32")[None]

    def call(self, tokens: Tensor, noise: Tensor | None = None) -> Any:
        """(B, prefix + P, D) -> (B, prefix + K, D), (B, P)."""
        ops, prefix = keras.ops, self.prefix
        order = self.order(noise)
        if noise is None:
            order = ops.tile(order, (ops.shape(tokens)[0], 1))
        visible = ops.argsort(order, axis=1)[:, : self.num_seen]
        seen = rows(tokens[:, prefix:], visible)
        if prefix:
            seen = ops.concatenate([tokens[:, :prefix], seen], axis=1)
        return seen, order

    def order(self, noise: Tensor | None = None) -> Any:
        """Returns for each patch its place by noise, int32 (B, P), or without noise (1, P)."""
        if noise is None:
            return keras.ops.convert_to_tensor(self.usual_order)
        ranks = keras.ops.argsort(keras.ops.argsort(noise, axis=1), axis=1)
        return keras.ops.cast(ranks, "int32")

    def hidden(self, noise: Tensor | None = None) -> Any:
        """Returns 1 for each masked patch and 0 for visible ones, float32; shape as `order`."""
        return keras.ops.cast(self.order(noise) >= self.num_seen, "float32")

    def compute_output_spec(self, tokens: Tensor, noise: Tensor | None = None) -> Any:
        """Returns the specs of both."""
        batch, _, width = tokens.shape
        shape = (batch, self.prefix + self.num_seen, width)
        order = keras.KerasTensor((batch, self.num_patches), "int32")
        return keras.KerasTensor(shape, self.compute_dtype), order

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Any:
        """(B, prefix + K, D), (B, P)."""
        batch, _, width = input_shape
        return (batch, self.prefix + self.num_seen, width), (batch, self.num_patches)


@keras.saving.register_keras_serializable(package="kmodels")
class MAEDecoder(Layer):
    """Replaces each masked patch by a learned token, and predicts the pixels of all patches.

    Args:
        config: sizes of the decoder; images, patches, and the tokens in front of the patches as of
            the encoder.

    Call:
        tokens (B, prefix + K, E), as the encoder gives them for the seen patches; order int32
        (B, P), the index of each patch among the visible patches followed by the masked ones, or
        None if all are visible and in order -> (B, P, patch * patch * C), pixels in the order
        (row, column, channel).

    Weights:
        embed, mask_token (1, 1, D), block_<i>, norm, prediction; position_embedding
        (1, prefix + P, D), which is not trained.

    Source:
        He et al. 2022 (arXiv:2111.06377), section 3. Parity: transformers'
        `ViTMAEForPreTraining`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        policy = self.dtype_policy
        self.supports_masking = False
        self.config = config = ViTConfig.of(config)
        self.embed = Dense(config.hidden_dim, name="embed", dtype=policy)
        self.blocks = [
            Block(config, name=f"block_{i}", dtype=policy) for i in range(config.num_layers)
        ]
        self.norm = LayerNorm(config.layer_norm_epsilon, name="norm", dtype=policy)
        pixels = config.patch_size**2 * config.image_shape[2]
        self.prediction = Dense(pixels, name="prediction", dtype=policy)

    def build(self, input_shape: Shape) -> None:
        """Builds every part for the width of the encoder."""
        config = self.config
        shape = (1, 1, config.hidden_dim)
        normal = keras.initializers.RandomNormal(stddev=0.02)
        self.mask_token = self.add_parameter("mask_token", shape, normal)
        prefix, (height, width) = config.num_prefix_tokens, config.grid
        self.position_embedding = self.add_parameter(
            "position_embedding",
            (1, prefix + height * width, config.hidden_dim),
            partial(draw_sines, config.grid, prefix),
            trainable=False,
        )
        self.embed.build(input_shape)
        inner = (*input_shape[:-1], config.hidden_dim)
        for part in (*self.blocks, self.norm, self.prediction):
            part.build(inner)

    def call(self, tokens: Tensor, order: Tensor | None = None, training: bool = False) -> Any:
        """(B, prefix + K, E) -> (B, P, patch * patch * C)."""
        ops, prefix = keras.ops, self.config.num_prefix_tokens
        x = self.embed(tokens)
        if order is not None:
            seen = x[:, prefix:]
            # Under autocast the token has the dtype of the layer.
            hidden = ops.cast(self.mask_token, x.dtype)
            number = order.shape[1] - seen.shape[1]
            hidden = ops.tile(hidden, (ops.shape(x)[0], number, 1))
            patches = rows(ops.concatenate([seen, hidden], axis=1), order)
            x = ops.concatenate([x[:, :prefix], patches], axis=1)
        x = x + ops.cast(self.position_embedding, x.dtype)
        for block in self.blocks:
            x = block(x, training=training)
        return self.prediction(self.norm(x)[:, prefix:])

    def compute_output_shape(self, tokens_shape: Shape, order_shape: Shape | None = None) -> Shape:
        """(B, P, patch * patch * C)."""
        height, width = self.config.grid
        return (tokens_shape[0], height * width, self.prediction.units)


# === The task ===


def _statistics(pixels: Tensor) -> tuple[Any, Any]:
    """Returns mean and deviation of each patch, by the unbiased variance that torch computes."""
    ops = keras.ops
    mean = ops.mean(pixels, axis=-1, keepdims=True)
    number = max(pixels.shape[-1] - 1, 1)
    variance = ops.sum(ops.square(pixels - mean), axis=-1, keepdims=True) / number
    return mean, ops.sqrt(variance + 1e-6)


@keras.saving.register_keras_serializable(package="kmodels")
class ViTMAEForPreTraining(StepsWithOwnLoss, Task):
    """A masked autoencoder: most patches of each image are masked, and it predicts their pixels.

    The encoder computes only the visible patches, a quarter by default, and the decoder is narrow.
    Train it on images without labels, then fine-tune its backbone:

        mae = ViTMAEForPreTraining.from_preset("vit_small_patch16_224", norm_pix_loss=True)
        mae.compile(kmodels.training.AdamW(1.5e-4, beta_2=0.95))
        mae.fit(images, batch_size=64, epochs=100)
        mae.save_to_preset("pretrained")
        ViTImageClassifier.from_preset("pretrained", num_classes=10)

    Args:
        backbone: a `ViTBackbone`, the encoder.
        preprocessor: turns raw images into inputs of the backbone, or None.
        decoder_hidden_size: width of the decoder.
        decoder_num_hidden_layers: blocks of the decoder.
        decoder_num_attention_heads: attention heads of the decoder.
        decoder_intermediate_size: width of its MLPs.
        mask_ratio: share of the patches that are masked.
        norm_pix_loss: the loss compares with pixels that are normalised within each patch.
        fixed_positions: initializes the backbone's position embedding with sines and cosines, and
            does not train it, as in MAE; a table that is read from a file is kept. False trains the
            backbone's own table.
        seed: seed of the masks in training; None for the model's own under
            `keras.utils.set_random_seed`.
        head_dtype: policy of the decoder; by default that of the backbone.
        name: name of the model.
        **kwargs: of `keras.Model`.

    Call:
        images (B, height, width, C), preprocessed floats -> (B, P, patch * patch * C), pixels in
        the order (row, column, channel). In each image the patches with the largest `noise`,
        float (B, P), are hidden; without it the same ones in every image, in training too:
        `pretraining_loss` draws it.

    Raises:
        InputError: for sizes that do not fit together, a backbone whose patches turn by their
            places or that gives no tokens, or a share that hides all patches.

    Source:
        He et al. 2022 (arXiv:2111.06377). Parity: transformers' `ViTMAEForPreTraining`.
    """

    backbone_class = ViTBackbone
    preprocessor_class = ViTImageClassifierPreprocessor

    norm_pix_loss = setting("norm_pix_loss", "True if pixels are normalized within each patch.")

    @of_family
    def __init__(
        self,
        backbone: ViTBackbone,
        preprocessor: ViTImageClassifierPreprocessor | None = None,
        decoder_hidden_size: int = 512,
        decoder_num_hidden_layers: int = 8,
        decoder_num_attention_heads: int = 16,
        decoder_intermediate_size: int = 2048,
        mask_ratio: float = 0.75,
        norm_pix_loss: bool = False,
        fixed_positions: bool = True,
        seed: int | None = None,
        head_dtype: DTypeLike = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        config = backbone.config
        patches = config.grid[0] * config.grid[1]
        if not 0 <= mask_ratio < 1 or not int(patches * (1 - mask_ratio)):
            raise InputError(
                f"mask_ratio is {mask_ratio} of {patches} patches; give 0 or more, and leave at "
                "least one to be seen"
            )
        if backbone.coordinates is not None:
            raise InputError(
                "MAE does not support rotary position embeddings (rope_theta is set); use a "
                "backbone with learned positions"
            )
        if config.patch_drop_rate or config.token_merging:
            raise InputError(
                "the backbone leaves out patches or merges tokens, and MAE hides patches by "
                "itself; leave patch_drop_rate and token_merging at 0"
            )
        if backbone.output.shape[1:] != (patches + config.num_prefix_tokens, config.hidden_dim):
            raise InputError(
                f"{type(backbone).__name__} gives no token for each patch; give a ViTBackbone"
            )
        sizes = {
            "decoder_hidden_size": decoder_hidden_size,
            "decoder_num_hidden_layers": decoder_num_hidden_layers,
            "decoder_num_attention_heads": decoder_num_attention_heads,
            "decoder_intermediate_size": decoder_intermediate_size,
        }
        for key, value in sizes.items():
            check_whole(key, value)
        policy = keras.dtype_policies.get(head_dtype or backbone.dtype_policy)
        decoder = MAEDecoder(
            ViTConfig(
                image_shape=config.image_shape,
                patch_size=config.patch_size,
                num_layers=decoder_num_hidden_layers,
                num_heads=decoder_num_attention_heads,
                hidden_dim=decoder_hidden_size,
                mlp_dim=decoder_intermediate_size,
                dropout_rate=config.dropout_rate,
                attention_dropout=config.attention_dropout,
                layer_norm_epsilon=config.layer_norm_epsilon,
                approximate_gelu=config.approximate_gelu,
                use_class_token=config.use_class_token,
                use_distillation_token=config.use_distillation_token,
                num_register_tokens=config.num_register_tokens,
            ),
            name="decoder",
            dtype=policy,
        )
        seen = int(patches * (1 - mask_ratio))
        masking = PatchMasking(
            patches, seen, config.num_prefix_tokens, name="masking", dtype=backbone.dtype_policy
        )
        masking.keep_keywords()  # noise that was rounded would have ties

        def reconstruct(images: Tensor, noise: Tensor | None = None, **mode: Any) -> Any:
            x, order = images, None
            for step in backbone.steps:
                if step is backbone.blocks[0]:
                    # Positions are added; from here on the encoder computes visible patches only.
                    x, order = masking(x) if noise is None else masking(x, noise=noise)
                x = step(x, **mode)
            # The loss needs float32 at least.
            return keras.ops.cast(decoder(x, order=order, **mode), dtype)

        # === Graph ===
        dtype = "float64" if policy.compute_dtype == "float64" else "float32"
        images = backbone.inputs[0]
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=images,
            outputs=reconstruct(images),
            name=name,
            **kwargs,
        )

        # === Config ===
        self.masking, self.decoder = masking, decoder
        self.reconstruct = reconstruct
        self.num_patches, self.num_seen = patches, seen
        self.mask_ratio = mask_ratio
        self.seed_generator = decoder.add_seed(1.0, seed)
        self.settings = {
            **sizes,
            "mask_ratio": mask_ratio,
            "norm_pix_loss": norm_pix_loss,
            "fixed_positions": fixed_positions,
            "seed": seed,
        }
        self.head_dtype = policy
        self._step = InsideStep(chosen=True)
        if (table := self.fixed) is not None:
            drawn = partial(draw_sines, config.grid, config.num_special_positions)
            keras_internals.begin_with(table, drawn)

    @property
    def fixed(self) -> Any:
        """The position embedding of the backbone if it is not trained here, else None."""
        there = vars(self).get("settings", {}).get("fixed_positions")
        if not there or not self.backbone.config.use_position_embedding:
            return None
        return self.backbone.get_layer("tokens").position_embedding

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables that are trained; in the backbone itself the positions are as others."""
        return [v for v in super().trainable_variables if v is not self.fixed]

    @property
    def non_trainable_variables(self) -> list[Any]:
        """All other variables."""
        return self._with_fixed(super().non_trainable_variables)

    @property
    def trainable_weights(self) -> list[Any]:
        """The weights that are trained."""
        return [v for v in super().trainable_weights if v is not self.fixed]

    @property
    def non_trainable_weights(self) -> list[Any]:
        """All other weights."""
        return self._with_fixed(super().non_trainable_weights)

    def _with_fixed(self, others: list[Any]) -> list[Any]:
        table = self.fixed
        there = table is None or any(v is table for v in others)
        return others if there else [*others, table]

    def call(
        self,
        inputs: Tree,
        training: bool | None = None,
        mask: Tree = None,
        noise: Tensor | None = None,
    ) -> Any:
        """Images to the pixels of their patches, see the class."""
        if keras_internals.has_mask(mask):
            return super().call(inputs, training=training, mask=mask)
        (images,) = keras_internals.standardized(self, inputs)
        mode = {} if training is None else {"training": training}
        if not self._step.active:
            return self.reconstruct(images, noise, **mode)
        # The loss of a step needs the noise that hid its patches.
        noise = self.draw_noise(keras.ops.shape(images)[0]) if training else None
        pixels = self.reconstruct(images, noise, **mode)
        return {"pixels": pixels, "hidden": self.hidden(noise)}

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`; without a loss, `pretraining_loss` is used.

        A loss of your own compares labels with the predicted pixels; it masks the same patches of
        every image.

        Args:
            arguments: arguments of `compile`.

        Raises:
            InputError: for metrics without a loss, since there are no labels to compare with.
        """
        arguments = super().with_defaults(arguments)
        if arguments.loss is None and (arguments.metrics or arguments.weighted_metrics):
            raise InputError(
                f"{self.name} learns from images alone, and metrics compare with labels; leave "
                "them out, or give a loss of labels too"
            )
        self._step.chosen = arguments.loss is None
        return arguments

    @property
    def gives_logits(self) -> bool:
        """False: the outputs are pixels."""
        return False

    # Masks and pixels

    def draw_noise(self, batch: Tensor | int) -> Any:
        """Returns random noise that decides which patches of each image are masked.

        Args:
            batch: number of images.

        Returns:
            float32 (batch, P), the `noise` of the call.
        """
        shape = (batch, self.num_patches)
        return seeds.uniform(shape, self.seed_generator)

    def hidden(self, noise: Tensor | None = None) -> Any:
        """Returns 1 for each masked patch and 0 for visible ones, float32 (B, P).

        Args:
            noise: (B, P), as of the call; without it the result is (1, P), for all images.
        """
        return self.masking.hidden(noise)

    def patchify(self, images: Tensor) -> Any:
        """(B, height, width, C) -> (B, P, patch * patch * C), patches row by row."""
        ops, (height, width) = keras.ops, self.backbone.config.grid
        side, channels = self.backbone.config.patch_size, images.shape[-1]
        x = ops.reshape(images, (-1, height, side, width, side, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, height * width, side * side * channels))

    def unpatchify(self, patches: Tensor) -> Any:
        """(B, P, patch * patch * C) -> (B, height, width, C)."""
        ops, (height, width) = keras.ops, self.backbone.config.grid
        side, channels = self.backbone.config.patch_size, self.backbone.config.image_shape[2]
        x = ops.reshape(patches, (-1, height, width, side, side, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, height * side, width * side, channels))

    def targets(self, images: Tensor) -> Any:
        """Returns the targets of the loss, float32 (B, P, patch * patch * C)."""
        pixels = self.patchify(keras.ops.cast(images, "float32"))
        if not self.norm_pix_loss:
            return pixels
        mean, deviation = _statistics(pixels)
        return (pixels - mean) / deviation

    def reconstruct_images(self, images: Tensor, noise: Tensor | None = None) -> tuple[Any, Any]:
        """Returns the masked images and their reconstructions.

        Args:
            images: (B, height, width, C), preprocessed.
            noise: (B, P), decides which patches are masked, see the class.

        Returns:
            The images with zeros for hidden patches, and the images with the model's pixels there;
            with `norm_pix_loss` these get mean and deviation of the patch that was hidden, which
            the model does not say.
        """
        ops = keras.ops
        images = ops.cast(images, "float32")
        pixels = self.patchify(images)
        outputs = self(images, noise=noise, training=False)
        if self.norm_pix_loss:
            mean, deviation = _statistics(pixels)
            outputs = outputs * deviation + mean
        hidden = ops.expand_dims(self.hidden(noise), -1)
        seen = pixels * (1 - hidden)
        return self.unpatchify(seen), self.unpatchify(seen + outputs * hidden)

    # The loss

    def pretraining_loss(
        self,
        images: Tensor,
        noise: Tensor | None = None,
        training: bool = False,
        sample_weight: Tensor | None = None,
    ) -> Any:
        """Returns the mean squared error of the pixels of masked patches.

        Args:
            images: (B, height, width, C), preprocessed.
            noise: (B, P), decides which patches are masked; None draws it in training, and
                otherwise masks the same patches of every image, so that epochs can be compared.
            training: True for dropout and random masks.
            sample_weight: (B,) weights of the images, or None.

        Returns:
            A scalar.

        Raises:
            InputError: if `mask_ratio` masks no patch.
        """
        self._check_hidden()
        if noise is None and training:
            noise = self.draw_noise(keras.ops.shape(images)[0])
        outputs = self(images, noise=noise, training=training)
        return self._error(outputs, self.hidden(noise), images, sample_weight)

    def _error(
        self, outputs: Tensor, hidden: Tensor, images: Tensor, weights: Tensor | None
    ) -> Any:
        ops = keras.ops
        errors = ops.mean(ops.square(outputs - self.targets(images)), axis=-1)
        # Each image has as many hidden patches.
        means = ops.sum(errors * hidden, axis=-1) / (self.num_patches - self.num_seen)
        if weights is not None:
            means = means * ops.convert_to_tensor(weights, dtype=means.dtype)
        return ops.mean(means)

    def compute_loss(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Tree = None,
        sample_weight: Tensor | None = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of a batch: that of masked patches, or the one given to `compile`."""
        if not self._step.active:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        self._check_hidden()
        (images,) = keras_internals.standardized(self, x)
        outputs: Any = y_pred
        loss = self._error(outputs["pixels"], outputs["hidden"], images, sample_weight)
        return keras_internals.with_additional_losses(self, loss)

    def _check_hidden(self) -> None:
        if self.num_seen == self.num_patches:
            raise InputError(
                f"mask_ratio is {self.mask_ratio}, which hides none of {self.num_patches} patches; "
                "there is no loss without hidden ones: give more, such as 0.75"
            )

    @staticmethod
    def loss_fn(models: Any, batch: Tree, training: bool) -> Any:
        """The loss in the form that `kmodels.training.TrainStep` takes.

        Args:
            models: a `ViTMAEForPreTraining`.
            batch: images, or (images, labels) or (images, labels, weights), whose labels are not
                read.
            training: draws the masks; else they are the same for all.
        """
        parts: Any = batch if isinstance(batch, tuple | list) else (batch,)
        weights = parts[2] if len(parts) > 2 else None
        return models.pretraining_loss(parts[0], training=training, sample_weight=weights)
