"""Segments of images from the queries of a model: semantic, instance and panoptic, in NumPy.

Masks are first resized to the size of the model's images and then to each image, and what is
computed in between is computed there, as in transformers' processor.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.models.vit.segmentation import preprocessor
from kmodels.models.vit.segmentation.masks import of_each, resized

Size = Sequence[int]


def class_scores(masks: np.ndarray, classes: np.ndarray, model_size: Size) -> np.ndarray:
    """Returns what each class has of each pixel, the sum over queries of both shares.

    Args:
        masks: logits (Q, h, w).
        classes: logits (Q, num_classes + 1).
        model_size: (height, width) of the images of the model.

    Returns:
        float32 (height, width, num_classes).
    """
    shares = _softmax(classes)[:, :-1]
    held = _sigmoid(_sized(masks, model_size))  # (Q, H, W)
    return np.tensordot(held, shares, (0, 0))


def semantic(
    masks: np.ndarray,
    classes: np.ndarray,
    model_size: Size,
    size: Size,
    content: Size | None = None,
) -> np.ndarray:
    """Returns the class of each pixel, that with the largest score.

    Args:
        masks: see `class_scores`, like all up to `size`.
        classes: see there.
        model_size: see there.
        size: (height, width) of the image.
        content: see `instances`.

    Returns:
        int32 (height, width).
    """
    scores = class_scores(masks, classes, model_size)
    if content is not None:
        scores = scores[: content[0], : content[1]]
    if tuple(size) == scores.shape[:2]:
        return scores.argmax(-1).astype("int32")
    found = np.zeros(tuple(size), "int32")
    best = np.full(tuple(size), -np.inf, "float32")
    for number in range(scores.shape[-1]):  # one class at a time: images may be large
        own = resized(scores[..., number : number + 1], size)[..., 0]
        better = own > best
        found[better], best[better] = number, own[better]
    return found


def instances(
    masks: np.ndarray,
    classes: np.ndarray,
    model_size: Size,
    size: Size,
    threshold: float = 0.8,
    content: Size | None = None,
) -> dict[str, Any]:
    """Returns instances, each the mask of a query.

    Args:
        masks: see `semantic`, like all up to `size`.
        classes: see there.
        model_size: see there.
        size: see there.
        threshold: least score, the class's share times the mean share of the mask's pixels.
        content: (height, width) of the part of the model's image that the image fills; None for
            all.

    Returns:
        "segmentation", int32 (height, width), -1 where there is none; "segments_info", a list of
        "id", "label_id" and "score". Of masks that overlap the later one has the pixels.
    """
    held = _on_image(masks, model_size, size, content)
    shares = _softmax(classes)[:, :-1]
    labels, scores = shares.argmax(-1), shares.max(-1)
    inside = held > 0
    amounts = inside.sum((1, 2))
    means = (_sigmoid(held) * inside).sum((1, 2)) / (amounts + 1e-6)
    found, info = np.full(tuple(size), -1, "int32"), []
    for query, score in enumerate(scores * means):
        if amounts[query] and score >= threshold:
            found[inside[query]] = len(info)
            info.append(_segment(len(info), labels[query], score))
    return {"segmentation": found, "segments_info": info}


def panoptic(
    masks: np.ndarray,
    classes: np.ndarray,
    model_size: Size,
    size: Size,
    threshold: float = 0.8,
    mask_threshold: float = 0.5,
    overlap_mask_area_threshold: float = 0.8,
    stuff_classes: Collection[int] | None = None,
    content: Size | None = None,
) -> dict[str, Any]:
    """Returns segments that do not overlap.

    Args:
        masks: see `semantic`, like all up to `size`.
        classes: see there.
        model_size: see there.
        size: see there.
        threshold: a query counts if the share of its class is above it.
        mask_threshold: least share of a mask's pixels.
        overlap_mask_area_threshold: a segment stays if more than this share of its mask is left by
            others.
        stuff_classes: classes whose segments become one.
        content: see `instances`.

    Returns:
        As of `instances`.
    """
    shares = _softmax(classes)
    labels, scores = shares.argmax(-1), shares.max(-1)
    kept = (labels != classes.shape[1] - 1) & (scores > threshold)
    found, info = np.full(tuple(size), -1, "int32"), []
    if not kept.any():
        return {"segmentation": found, "segments_info": info}
    labels, scores = labels[kept], scores[kept]
    held = _sigmoid(_on_image(masks[kept], model_size, size, content))
    owner = (scores[:, None, None] * held).argmax(0)
    merged: dict[int, int] = {}
    for query, label in enumerate(labels.tolist()):
        own, inside = owner == query, held[query] >= mask_threshold
        final = own & inside
        if not final.any() or own.sum() / inside.sum() <= overlap_mask_area_threshold:
            continue
        if label in (stuff_classes or ()):
            if label in merged:
                found[final] = merged[label]
                continue
            merged[label] = len(info)
        found[final] = len(info)
        info.append(_segment(len(info), label, scores[query]))
    return {"segmentation": found, "segments_info": info}


def _segment(number: int, label: int, score: float) -> dict[str, Any]:
    return {"id": number, "label_id": int(label), "score": round(float(score), 6)}


def _on_image(masks: np.ndarray, model_size: Size, size: Size, content: Size | None) -> np.ndarray:
    held = _sized(masks, model_size)
    if content is not None:
        held = held[:, : content[0], : content[1]]
    return _sized(held, size)


def _sized(masks: np.ndarray, size: Size) -> np.ndarray:
    """Returns maps (N, h, w) in another size, float32."""
    if masks.shape[1:] == tuple(size):
        return np.asarray(masks, "float32")
    found = resized(np.moveaxis(np.asarray(masks, "float32"), 0, -1), size)
    return np.moveaxis(found, -1, 0)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -80, 80)))


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


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
        return getattr(self.preprocessor, "aspect_ratio", preprocessor.WAYS[0])

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
        return self._each(semantic, images, batch_size, stack=True)

    def segment_instances(self, images: Data, threshold: float = 0.8, batch_size: int = 32) -> Any:
        """Returns instances of images, see `instances`.

        Args:
            images: as of `segment`.
            threshold: least score of an instance.
            batch_size: images at a time.

        Returns:
            A dictionary of "segmentation" and "segments_info" for each image, in a list; of one
            image (H, W, C) the dictionary alone.
        """
        return self._each(instances, images, batch_size, threshold=threshold)

    def segment_panoptic(
        self,
        images: Data,
        threshold: float = 0.8,
        mask_threshold: float = 0.5,
        overlap_mask_area_threshold: float = 0.8,
        stuff_classes: Collection[int] | None = None,
        batch_size: int = 32,
    ) -> Any:
        """Returns segments of images that do not overlap, see `panoptic`.

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
            panoptic,
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
            class_scores(held, own, self.image_size)
            for held, own in zip(*(said[name] for name in QUERIES), strict=True)
        )
        return preprocessor.of_images(scores, sizes, self.image_size[0], "split")
