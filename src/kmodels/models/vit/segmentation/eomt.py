"""Segmentation by queries in the last blocks of a ViT: semantic, instance and panoptic."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike

from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data, DTypeLike, Tensor, Tree
from kmodels.layers.placement import of_family
from kmodels.models.blocks.class_names import check_class_names
from kmodels.models.vit.image_task import ImageSegmenter
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.segmentation import preprocessor as preprocessing
from kmodels.models.vit.segmentation import segments
from kmodels.models.vit.segmentation.mask_transformer import (
    MaskTransformer,
    Prediction,
    class_scores,
)
from kmodels.models.vit.segmentation.masks import of_each
from kmodels.models.vit.segmentation.preprocessor import ViTImageSegmenterPreprocessor
from kmodels.task import Compiled
from kmodels.training.losses import InsideStep, StepsWithOwnLoss
from kmodels.training.metrics import MeanIoU
from kmodels.training.set_criterion import KEYS, SetCriterion, labels_of

# What `query_logits` and `predict_queries` return.
QUERIES = ("masks_queries_logits", "class_queries_logits")


@keras.saving.register_keras_serializable(package="kmodels")
class EoMTImageSegmenter(StepsWithOwnLoss, ImageSegmenter):
    """An encoder-only mask transformer: a ViT whose last blocks carry learned queries.

    Each query predicts a class, or "no object", and a mask, the product of its token with upscaled
    tokens of the patches. In training every block with queries predicts, and queries attend only
    to the patches of their own mask; this masking is annealed block by block, so that the final
    model is a plain ViT.

    Args:
        backbone: a `ViTBackbone`, such as that of DINOv2 with registers or of DINOv3.
        num_classes: number of classes, "no object" not counted.
        preprocessor: turns raw images and masks into inputs of the model, or None.
        num_queries: number of queries Q, the most segments that an image can have.
        num_blocks: blocks that carry queries, the last ones of the backbone.
        num_upscale_blocks: how often the sides of the grid of patches are doubled for masks.
        ignore_class: label of pixels that belong to no segment and are not measured; None for none.
        annealing_steps: steps of the training, over which masked attention is given up, see
            `MaskProbabilities`; None leaves it as it is.
        no_object_weight: argument of the loss, `kmodels.training.SetCriterion`.
        class_weight: argument of the loss.
        mask_weight: argument of the loss.
        dice_weight: argument of the loss.
        train_num_points: argument of the loss.
        oversample_ratio: argument of the loss.
        importance_sample_ratio: argument of the loss.
        seed: seed of the points; None for the model's own under `keras.utils.set_random_seed`.
        head_dtype: policy of the heads; by default that of the backbone.
        class_names: names of the classes in the order of the outputs, or None; they are saved
            with the model.
        **kwargs: of `keras.Model`, such as `name`.

    Call:
        images (B, height, width, C), preprocessed floats -> scores of the classes at each pixel,
        (B, height, width, num_classes), float32, 0 or more: the sum over queries of class
        probability times mask probability. `query_logits` and `predict_queries` return the outputs
        of the queries.

    Raises:
        InputError: for a backbone that does not suit, or settings that cannot be.

    Source:
        Kerssies et al. 2025 (arXiv:2503.19108). Parity: transformers'
        `EomtForUniversalSegmentation` and `EomtDinov3ForUniversalSegmentation`.
    """

    backbone_class = ViTBackbone
    preprocessor_class = ViTImageSegmenterPreprocessor
    own_setting = "num_upscale_blocks"
    head_name = "head of queries"

    @of_family
    def __init__(
        self,
        backbone: ViTBackbone,
        num_classes: int,
        preprocessor: ViTImageSegmenterPreprocessor | None = None,
        num_queries: int = 200,
        num_blocks: int = 4,
        num_upscale_blocks: int = 2,
        ignore_class: int | None = 255,
        annealing_steps: int | None = None,
        no_object_weight: float = 0.1,
        class_weight: float = 2.0,
        mask_weight: float = 5.0,
        dice_weight: float = 5.0,
        train_num_points: int = 12544,
        oversample_ratio: float = 3.0,
        importance_sample_ratio: float = 0.75,
        seed: int | None = None,
        head_dtype: DTypeLike = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ):
        check_whole("num_classes", num_classes)
        check_whole("num_upscale_blocks", num_upscale_blocks, 0)
        weights = {
            "no_object_weight": no_object_weight,
            "class_weight": class_weight,
            "mask_weight": mask_weight,
            "dice_weight": dice_weight,
            "train_num_points": train_num_points,
            "oversample_ratio": oversample_ratio,
            "importance_sample_ratio": importance_sample_ratio,
        }
        criterion = SetCriterion(num_classes, **weights)
        policy = keras.dtype_policies.get(head_dtype or backbone.dtype_policy)
        mask_transformer = MaskTransformer(
            backbone,
            num_classes,
            num_queries,
            num_blocks,
            num_upscale_blocks,
            annealing_steps,
            policy,
        )
        size = backbone.config.image_shape[:2]

        # === Graph ===
        inputs = backbone.inputs[0]
        last = mask_transformer(inputs, (True,) * num_blocks)[-1]
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=class_scores(last, size),
            **kwargs,
        )

        # === Config ===
        self.num_classes = num_classes
        self.num_queries = num_queries
        self.num_blocks = num_blocks
        self.ignore_class = ignore_class
        self.criterion = criterion
        self.seed_generator = mask_transformer.probabilities.add_seed(1.0, seed)
        self.settings = {
            "num_classes": num_classes,
            "class_names": check_class_names(class_names, num_classes),
            "num_queries": num_queries,
            "num_blocks": num_blocks,
            "num_upscale_blocks": num_upscale_blocks,
            "ignore_class": ignore_class,
            "annealing_steps": annealing_steps,
            **weights,
            "seed": seed,
        }
        self.head_dtype = policy
        # Around Keras' __setattr__, which would count layers as those of this model again.
        for name, value in {
            "mask_transformer": mask_transformer,
            "image_size": size,
            "_step": InsideStep(),
            # The masking blocks when steps were traced, and models of `predict_queries` by them.
            "_masked": (True,) * num_blocks,
            "_readers": {},
        }.items():
            object.__setattr__(self, name, value)

    # Masked attention

    @property
    def attn_mask_probs(self) -> np.ndarray:
        """The share of queries that each block with queries masks, float32 (num_blocks,)."""
        return keras.ops.convert_to_numpy(self.mask_transformer.probabilities.attn_mask_probs)

    @attn_mask_probs.setter
    def attn_mask_probs(self, values: ArrayLike) -> None:
        shares = np.broadcast_to(np.asarray(values, "float32"), (self.num_blocks,))
        if not ((shares >= 0) & (shares <= 1)).all():
            raise InputError(f"attn_mask_probs are {shares.tolist()}; give numbers from 0 to 1")
        self.mask_transformer.probabilities.attn_mask_probs.assign(shares)

    def _masking(self) -> tuple[bool, ...]:
        """Returns the blocks that mask now; inside a trace, those at the time of the trace."""
        try:
            return tuple((self.attn_mask_probs > 0).tolist())
        except Exception:  # each framework has its own for a value that is not there
            return self._masked

    def _follow_masks(self) -> None:
        if (now := self._masking()) != self._masked:
            object.__setattr__(self, "_masked", now)
            self.test_function = self.predict_function = None

    def make_test_function(self, force: bool = False) -> Any:
        """Returns Keras' function, rebuilt if the masked blocks have changed."""
        self._follow_masks()
        return super().make_test_function(force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Returns Keras' function, rebuilt if the masked blocks have changed."""
        self._follow_masks()
        return super().make_predict_function(force)

    # The call

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Images to class scores; inside a step with the model's own loss, all predictions."""
        if keras_internals.has_mask(mask):
            return super().call(inputs, training=training, mask=mask)
        predictions = self._predictions(inputs, training)
        if not self._step.active:
            return class_scores(predictions[-1], self.image_size)
        return {
            "masks": keras.ops.stack([one.masks for one in predictions], axis=1),
            "classes": keras.ops.stack([one.classes for one in predictions], axis=1),
        }

    def _predictions(self, inputs: Tree, training: bool | None) -> list[Prediction]:
        (images,) = keras_internals.standardized(self, inputs)
        masked = (True,) * self.num_blocks if training else self._masking()
        return self.mask_transformer(
            images, masked, **({} if training is None else {"training": training})
        )

    def query_logits(self, images: Tensor, training: bool = False) -> dict[str, Any]:
        """Returns the outputs of the queries, as transformers' model does.

        Args:
            images: (B, height, width, C), preprocessed floats.
            training: as in a call.

        Returns:
            "masks_queries_logits", float32 (B, Q, h, w), and "class_queries_logits", float32
            (B, Q, num_classes + 1), whose last is "no object".
        """
        last = self._predictions(images, training)[-1]
        return {"masks_queries_logits": last.masks, "class_queries_logits": last.classes}

    # Training

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`, by default with the loss of matched masks.

        The optimizer is AdamW with a learning rate of 1e-4 and a decay of 0.05. The default loss,
        also for None, is the `criterion`, on label masks (B, H, W) or on "mask_labels"
        (B, T, H, W) with "class_labels" (B, T); a loss of your own gets the class scores (B,
        height, width, num_classes), as metrics do. The default metric, if the loss is the
        `criterion`, is `kmodels.training.MeanIoU`.
        """
        arguments = arguments.filled(
            optimizer=lambda: keras.optimizers.AdamW(1e-4, weight_decay=0.05), loss=lambda: None
        )
        self._step.chosen = arguments.loss is None
        if arguments.loss is None:
            arguments = arguments.filled(
                metrics=lambda: [MeanIoU(self.num_classes, ignore_class=self.ignore_class)]
            )
        return super().with_defaults(arguments)

    @property
    def gives_logits(self) -> bool:
        """False: the outputs are scores."""
        return False

    @property
    def ignored_labels(self) -> Collection[int] | None:
        """Labels of pixels of no target, -1 and `ignore_class`, if the loss is the `criterion`."""
        if not self._step.chosen:
            return None
        return (-1,) if self.ignore_class is None else (self.ignore_class, -1)

    def check_labels(self, y: Any) -> None:
        """Raises `InputError` for arrays of classes and masks that cannot be."""
        super().check_labels(y)
        masks = y.get(KEYS[0]) if isinstance(y, Mapping) else None
        if not isinstance(masks, np.ndarray) or not masks.size:
            return
        if self.preprocessor is None and masks.shape[2:] != tuple(self.image_size):
            height, width = self.image_size
            raise InputError(
                f"mask_labels have shape {masks.shape}; give (B, T, {height}, {width})"
            )
        if not 0 <= masks.min() <= masks.max() <= 1:
            raise InputError(
                f"mask_labels have values from {masks.min()} to {masks.max()}; give 0 and 1"
            )

    def compute_loss(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Tree = None,
        sample_weight: Tensor | None = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of all predictions, or of class scores if `compile` got a loss.

        Points are drawn in training, and the same in every evaluation.

        Raises:
            InputError: for labels in another form, or weights that are not one for each image.
        """
        if not self._step.active:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        if sample_weight is not None and len(sample_weight.shape) != 1:
            raise InputError(
                f"sample_weight has shape {tuple(sample_weight.shape)}; give one for each image"
            )
        outputs: Any = y_pred
        loss = self.criterion(
            y,
            outputs["masks"],
            outputs["classes"],
            seed=self.seed_generator if training else 0,
            sample_weight=sample_weight,
            ignore_class=self.ignore_class,
        )
        return keras_internals.with_additional_losses(self, loss)

    def compute_metrics(
        self, x: Tree, y: Tree, y_pred: Tree, sample_weight: Tensor | None = None
    ) -> Any:
        """Returns metrics of the class scores of the last prediction."""
        if self._step.active:
            outputs: Any = y_pred
            last = Prediction(outputs["masks"][:, -1], outputs["classes"][:, -1])
            y_pred = class_scores(last, self.image_size)
        if self._step.chosen:
            y = labels_of(y, -1 if self.ignore_class is None else self.ignore_class)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    # Segments

    @property
    def _way(self) -> str:
        return getattr(self.preprocessor, "aspect_ratio", preprocessing.WAYS[0])

    def predict_queries(self, images: Data, batch_size: int = 32) -> dict[str, np.ndarray]:
        """Returns `query_logits` of any number of images, as NumPy arrays.

        Args:
            images: inputs of the preprocessor, or of the model if there is no preprocessor.
            batch_size: images per batch.

        Returns:
            A row for each image, or for each window if the preprocessor cuts images.
        """
        masked = self._masking()
        if masked not in self._readers:
            backbone = self.mask_transformer.backbone
            images_input = backbone.inputs[0]
            inputs = keras.Input(images_input.shape[1:], dtype=images_input.dtype)
            last = self.mask_transformer(inputs, masked)[-1]
            outputs = {"masks_queries_logits": last.masks, "class_queries_logits": last.classes}
            self._readers[masked] = keras.Model(inputs, outputs, name="query_logits")
        pixels: Any = images
        if self.preprocessor is not None:
            pixels = self.preprocessor(images)
        elif isinstance(images, list | tuple):
            pixels = np.stack(images)
        return self._readers[masked].predict(pixels, batch_size=batch_size, verbose=0)

    def segment(self, images: Data, batch_size: int = 32) -> Any:
        """Returns the class of each pixel of images, in the size that they have.

        Args:
            images: inputs of the preprocessor: uint8 (B, H, W, C), one image (H, W, C), or a list
                of images of any size; inputs of the model if there is no preprocessor.
            batch_size: images per batch.

        Returns:
            int32 masks (B, H, W), or (H, W) of one image; a list of them for a list.
        """

        def of_windows(images: Any, sizes: list[Any]) -> list[np.ndarray]:
            said = self.predict_queries(images, batch_size)
            scores = (
                segments.class_scores(queries, own, self.image_size)
                for queries, own in zip(*(said[name] for name in QUERIES), strict=True)
            )
            return preprocessing.of_images(scores, sizes, self.image_size[0], self._way)

        if self._way in preprocessing.WINDOWED:
            return of_each(images, of_windows, stack=True)
        return self._each(segments.semantic, images, batch_size, stack=True)

    def segment_instances(self, images: Data, threshold: float = 0.8, batch_size: int = 32) -> Any:
        """Returns instances of images, see `segments.instances`.

        Args:
            images: as of `segment`.
            threshold: least score of an instance.
            batch_size: images at a time.

        Returns:
            A dictionary of "segmentation" and "segments_info" for each image, in a list; of one
            image (H, W, C) the dictionary alone.
        """
        return self._each(segments.instances, images, batch_size, threshold=threshold)

    def segment_panoptic(
        self,
        images: Data,
        threshold: float = 0.8,
        mask_threshold: float = 0.5,
        overlap_mask_area_threshold: float = 0.8,
        stuff_classes: Collection[int] | None = None,
        batch_size: int = 32,
    ) -> Any:
        """Returns segments of images that do not overlap, see `segments.panoptic`.

        Args:
            images: as of `segment`.
            threshold: least share of a segment's class.
            mask_threshold: least share of its pixels.
            overlap_mask_area_threshold: share of its mask that others must leave.
            stuff_classes: classes whose segments become one.
            batch_size: images at a time.

        Returns:
            As of `segment_instances`.
        """
        return self._each(
            segments.panoptic,
            images,
            batch_size,
            threshold=threshold,
            mask_threshold=mask_threshold,
            overlap_mask_area_threshold=overlap_mask_area_threshold,
            stuff_classes=stuff_classes,
        )

    def _each(
        self,
        process: Callable[..., Any],
        images: Data,
        batch_size: int,
        stack: bool = False,
        **more: Any,
    ) -> Any:
        """Returns the result of a function of `segments` for each image, as `masks.of_each`."""
        way = self._way
        if way in preprocessing.WINDOWED:
            raise InputError(
                f"the preprocessor has aspect_ratio={way!r}, whose windows give classes of pixels "
                "alone; give one with 'pad' for instances"
            )

        def segment(images: Any, sizes: list[Any]) -> list[Any]:
            said = self.predict_queries(images, batch_size)
            results = []
            for *queries, size in zip(*(said[name] for name in QUERIES), sizes, strict=True):
                content = self.preprocessor.fitted_size(size) if way == "pad" else None
                results.append(process(*queries, self.image_size, size, **more, content=content))
            return results

        return of_each(images, segment, stack)
