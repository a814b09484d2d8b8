"""Semantic segmentation with a linear head on the patches of a ViT."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data, DTypeLike
from kmodels.layers import Dense, Dropout
from kmodels.layers.placement import of_family
from kmodels.models.blocks.class_names import check_class_names
from kmodels.models.vit.image_task import ImageSegmenter
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.segmentation import masks, preprocessor
from kmodels.models.vit.segmentation.preprocessor import ViTImageSegmenterPreprocessor
from kmodels.task import Compiled, is_auto
from kmodels.training.losses import PixelCrossentropy
from kmodels.training.metrics import MeanIoU


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageSegmenter(ImageSegmenter):
    """A ViT with a linear head that gives each pixel of an image a class.

    The head is that of DINOv2's linear evaluation: batch norm of the patches that the backbone
    gives, one dense layer, and bilinear resizing of its logits to the image. DINOv3's drops
    channels in front of the batch norm.

    Args:
        backbone: a `ViTBackbone`.
        num_classes: number of classes, including the background if it is a class.
        preprocessor: turns raw images and masks into inputs of the model, or None.
        ignore_class: label of pixels that are left out of loss and metric; None for none.
        use_batch_norm: batch norm in front of the dense layer. Over several processes of torch, and
            devices of TensorFlow, it would be that of each one's rows, which is refused; give False
            there.
        dropout: rate in front of the dense layer.
        channel_dropout: rate at which channels of all patches are dropped, in front of the batch
            norm.
        head_dtype: policy of the head; by default the dtype of the backbone's variables, so that
            under "mixed_bfloat16" it computes in float32.
        class_names: names of the classes in the order of the outputs, or None; they are saved
            with the model.
        **kwargs: of `keras.Model`, such as `name`.

    Call:
        images (B, height, width, C), preprocessed floats -> logits (B, height, width,
        num_classes), float32; `predict` gives them too, as keras-hub's segmenters do. Use
        `segment` for masks.

    Raises:
        InputError: for a backbone that gives no tokens, or settings that cannot be.

    Source:
        Oquab et al. 2023, section 7.4 (arXiv:2304.07193); its code calls the head `BNHead`.
    """

    backbone_class = ViTBackbone
    preprocessor_class = ViTImageSegmenterPreprocessor
    own_setting = "use_batch_norm"
    head_name = "head for pixels"

    @of_family
    def __init__(
        self,
        backbone: ViTBackbone,
        num_classes: int,
        preprocessor: ViTImageSegmenterPreprocessor | None = None,
        ignore_class: int | None = 255,
        use_batch_norm: bool = True,
        dropout: float = 0.0,
        channel_dropout: float = 0.0,
        head_dtype: DTypeLike = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ):
        if len(backbone.output.shape) != 3:
            raise InputError(f"{type(backbone).__name__} gives no tokens; give a ViTBackbone")
        check_whole("num_classes", num_classes, 2)
        config = backbone.config
        if config.patch_drop_rate:
            raise InputError(
                f"the backbone has patch_drop_rate={config.patch_drop_rate}, and pixels of patches "
                "that are left out would have no class; give a backbone with 0"
            )
        policy = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)

        # === Layers ===
        norm = None
        if use_batch_norm:
            # torch's defaults, with which the original's were trained.
            norm = keras.layers.BatchNormalization(
                momentum=0.9, epsilon=1e-5, name="batch_norm", dtype=policy
            )
        drop = Dropout(dropout, name="head_dropout", dtype=policy)
        dense = Dense(
            num_classes,
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
            name="pixel_logits",
            dtype=policy,
        )

        # === Graph ===
        inputs = backbone.inputs[0]
        x = backbone(inputs)[:, config.num_prefix_tokens :]
        x = keras.ops.cast(x, policy.compute_dtype)
        if channel_dropout:
            x = Dropout(channel_dropout, (None, 1, None), name="channel_dropout", dtype=policy)(x)
        x = x if norm is None else norm(x)
        x = dense(drop(x))  # (B, P, K)
        dtype = "float64" if policy.compute_dtype == "float64" else "float32"
        grid = keras.ops.cast(keras.ops.reshape(x, (-1, *config.grid, num_classes)), dtype)
        outputs = keras.ops.image.resize(
            grid, config.image_shape[:2], "bilinear", data_format="channels_last"
        )
        super().__init__(
            backbone=backbone, preprocessor=preprocessor, inputs=inputs, outputs=outputs, **kwargs
        )

        # === Config ===
        self.num_classes = num_classes
        self.ignore_class = ignore_class
        self.settings = {
            "num_classes": num_classes,
            "class_names": check_class_names(class_names, num_classes),
            "ignore_class": ignore_class,
            "use_batch_norm": use_batch_norm,
            "dropout": dropout,
            "channel_dropout": channel_dropout,
        }
        self.head_dtype = policy
        # Around Keras' __setattr__, which would count its layers as those of this model again.
        object.__setattr__(self, "_of_patches", keras.Model(inputs, grid, name="patch_logits"))

    @property
    def output_dense(self) -> Any:
        """The layer that gives the logits of the patches."""
        return self.get_layer("pixel_logits")

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`, by default for masks of class numbers.

        The optimizer is Adam with a learning rate of 5e-5, as keras-hub's, the loss
        `kmodels.training.PixelCrossentropy` with the `ignore_class`, and the metric
        `kmodels.training.MeanIoU`; with a loss of your own there is none.
        """
        if is_auto(arguments.loss):
            arguments = arguments.filled(
                loss=lambda: PixelCrossentropy(self.ignore_class),
                metrics=lambda: [MeanIoU(self.num_classes, ignore_class=self.ignore_class)],
            )
        return super().with_defaults(
            arguments.filled(optimizer=lambda: keras.optimizers.Adam(5e-5))
        )

    @property
    def ignored_labels(self) -> Collection[int] | None:
        """The `ignore_class` of the loss, if it compares classes."""
        loss: Any = getattr(self, "loss", None)
        if not isinstance(loss, PixelCrossentropy | keras.losses.SparseCategoricalCrossentropy):
            return None
        return () if loss.ignore_class is None else (loss.ignore_class,)

    def check_labels(self, y: Any) -> None:
        """Raises `InputError` for arrays of classes that the model does not have."""
        if isinstance(y, Mapping) and self.ignored_labels is not None:
            raise InputError(
                f"labels have the keys {', '.join(map(str, y))}; give masks (B, H, W) with the "
                "number of a class for each pixel"
            )
        super().check_labels(y)

    def segment(self, images: Data, batch_size: int = 32) -> Any:
        """Returns the class of each pixel of images, in the size that they have.

        The logits of patches leave the device, and are resized to each image at once.

        Args:
            images: inputs of the preprocessor: uint8 (B, H, W, C), one image (H, W, C), or a list
                of images of any size; inputs of the model if there is no preprocessor.
            batch_size: images per batch.

        Returns:
            int32 masks (B, H, W), or (H, W) of one image; a list of them for a list.
        """

        def segment(pictures: Any, sizes: list[Any]) -> list[np.ndarray]:
            pixels = (
                np.stack(pictures) if self.preprocessor is None else self.preprocessor(pictures)
            )
            grids = self._of_patches.predict(pixels, batch_size=batch_size, verbose=0)
            way = getattr(self.preprocessor, "aspect_ratio", preprocessor.WAYS[0])
            if way in preprocessor.FRAMED:
                whole = self.backbone.config.image_shape[:2]
                logits = (masks.resized(grid, whole) for grid in grids)
                return preprocessor.of_images(logits, sizes, whole[0], way)
            return [masks.classes(grid, size) for grid, size in zip(grids, sizes, strict=True)]

        return masks.of_each(images, segment, stack=True)
