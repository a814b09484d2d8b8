"""Segments of images from the queries of a model: semantic, instance and panoptic."""

from collections.abc import Callable, Collection
from typing import Any

import keras
import numpy as np

from kmodels.core.types import Data
from kmodels.models.vit.eomt import postprocess
from kmodels.models.vit.segmentation.masks import of_each


class Segments:
    """Methods that give a model with a mask transformer the segments of images of any size.

    Attributes:
        mask_transformer: a `MaskTransformer`.
        preprocessor: turns images into what it takes, or None.
    """

    mask_transformer: Any
    preprocessor: Any
    image_size: tuple[int, int]
    _readers: dict[tuple[bool, ...], keras.Model]

    def _masking(self) -> tuple[bool, ...]:
        """Returns which blocks mask."""
        raise NotImplementedError

    def predict_queries(self, images: Data, batch_size: int = 32) -> dict[str, np.ndarray]:
        """Returns `query_logits` of any number of images, as NumPy arrays.

        Args:
            images: what the preprocessor takes; without one what the model takes.
            batch_size: images at a time.
        """
        masked = self._masking()
        if masked not in self._readers:
            backbone = self.mask_transformer.backbone
            given = backbone.inputs[0]
            inputs = keras.Input(given.shape[1:], dtype=given.dtype)
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
            images: what the preprocessor takes: uint8 (B, H, W, C), one image (H, W, C), or a list
                of images of any size; without a preprocessor what the model takes.
            batch_size: images at a time.

        Returns:
            int32 masks (B, H, W), or (H, W) of one image; a list of them for a list.
        """
        return self._each(postprocess.semantic, images, batch_size, stack=True)

    def segment_instances(self, images: Data, threshold: float = 0.8, batch_size: int = 32) -> Any:
        """Returns instances of images, see `postprocess.instances`.

        Args:
            images: as of `segment`.
            threshold: least score of an instance.
            batch_size: images at a time.

        Returns:
            A dictionary of "segmentation" and "segments_info" for each image, in a list; of one
            image (H, W, C) the dictionary alone.
        """
        return self._each(postprocess.instances, images, batch_size, threshold=threshold)

    def segment_panoptic(
        self,
        images: Data,
        threshold: float = 0.8,
        mask_threshold: float = 0.5,
        overlap_mask_area_threshold: float = 0.8,
        stuff_classes: Collection[int] | None = None,
        batch_size: int = 32,
    ) -> Any:
        """Returns segments of images that do not overlap, see `postprocess.panoptic`.

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
            postprocess.panoptic,
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
        """Returns what a function of `postprocess` makes of each image, see `masks.of_each`."""

        def found(given: Any, sizes: list[Any]) -> list[Any]:
            said = self.predict_queries(given, batch_size)
            parts = said["masks_queries_logits"], said["class_queries_logits"]
            rows = zip(*parts, sizes, strict=True)
            return [process(held, own, self.image_size, size, **more) for held, own, size in rows]

        return of_each(images, found, stack)
