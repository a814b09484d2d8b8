"""Segments of images from the queries of a model: semantic, instance and panoptic."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.models.vit.eomt import postprocess
from kmodels.models.vit.segmentation import aspect_ratio
from kmodels.models.vit.segmentation.masks import of_each

# What `predict_queries` returns.
QUERIES = ("masks_queries_logits", "class_queries_logits")


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

    @property
    def _way(self) -> str:
        """What the preprocessor does with images of other shapes."""
        return getattr(self.preprocessor, "aspect_ratio", aspect_ratio.WAYS[0])

    def predict_queries(self, images: Data, batch_size: int = 32) -> dict[str, np.ndarray]:
        """Returns `query_logits` of any number of images, as NumPy arrays.

        Args:
            images: what the preprocessor takes; without one what the model takes.
            batch_size: images at a time.

        Returns:
            A row for each image, or for each window of one where the preprocessor cuts it.
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
        if self._way == "split":
            return of_each(images, partial(self._of_windows, batch_size=batch_size), stack=True)
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
        way = self._way
        if way == "split":
            raise InputError(
                "the preprocessor has aspect_ratio='split', whose windows give classes of pixels "
                "alone; give one with 'pad' for instances"
            )

        def found(given: Any, sizes: list[Any]) -> list[Any]:
            said = self.predict_queries(given, batch_size)
            parts = (said[name] for name in QUERIES)
            pads = way == "pad"
            rows = zip(*parts, sizes, strict=True)
            return [
                process(
                    held,
                    own,
                    self.image_size,
                    size,
                    **more,
                    content=self.preprocessor.fitted_size(size) if pads else None,
                )
                for held, own, size in rows
            ]

        return of_each(images, found, stack)

    def _of_windows(self, given: Any, sizes: Sequence[Any], batch_size: int) -> list[np.ndarray]:
        """Returns the classes of the pixels of each image, from those of its windows."""
        said = self.predict_queries(given, batch_size)
        scores = (
            postprocess.class_scores(held, own, self.image_size)
            for held, own in zip(*(said[name] for name in QUERIES), strict=True)
        )
        return aspect_ratio.of_images(scores, sizes, self.image_size[0], "split")
