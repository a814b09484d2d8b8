"""Segments of images from the queries of a model: semantic, instance and panoptic, in NumPy.

As in transformers' processor, masks are first resized to the size of the model's images and then
to each image, and intermediate results are computed at the former size.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from kmodels.models.vit.segmentation.masks import resized

Size = Sequence[int]


def class_scores(masks: np.ndarray, classes: np.ndarray, model_size: Size) -> np.ndarray:
    """Returns scores float32 (height, width, num_classes): sum over queries of class x mask share.

    Arguments are those of `instances`.
    """
    shares = _softmax(classes)[:, :-1]
    probabilities = _sigmoid(_sized(masks, model_size))  # (Q, H, W)
    return np.tensordot(probabilities, shares, (0, 0))


def semantic(
    masks: np.ndarray,
    classes: np.ndarray,
    model_size: Size,
    size: Size,
    content: Size | None = None,
) -> np.ndarray:
    """Returns the class of each pixel, that with the largest score: int32 (height, width).

    Arguments are those of `instances`.
    """
    scores = class_scores(masks, classes, model_size)
    if content is not None:
        scores = scores[: content[0], : content[1]]
    if tuple(size) == scores.shape[:2]:
        return scores.argmax(-1).astype("int32")
    numbers = np.zeros(tuple(size), "int32")
    best = np.full(tuple(size), -np.inf, "float32")
    for number in range(scores.shape[-1]):  # one class at a time: images may be large
        own = resized(scores[..., number : number + 1], size)[..., 0]
        better = own > best
        numbers[better], best[better] = number, own[better]
    return numbers


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
        masks: logits (Q, h, w).
        classes: logits (Q, num_classes + 1).
        model_size: (height, width) of the images of the model.
        size: (height, width) of the image.
        threshold: least score, the class's share times the mean share of the mask's pixels.
        content: (height, width) of the part of the model's image that the image fills; None for
            all.

    Returns:
        "segmentation", int32 (height, width), -1 for none; "segments_info", a list of "id",
        "label_id" and "score". The last of overlapping masks gets the pixels.
    """
    logits = _on_image(masks, model_size, size, content)
    shares = _softmax(classes)[:, :-1]
    labels, scores = shares.argmax(-1), shares.max(-1)
    inside = logits > 0
    amounts = inside.sum((1, 2))
    means = (_sigmoid(logits) * inside).sum((1, 2)) / (amounts + 1e-6)
    numbers, info = np.full(tuple(size), -1, "int32"), []
    for query, score in enumerate(scores * means):
        if amounts[query] and score >= threshold:
            numbers[inside[query]] = len(info)
            info.append(_segment(len(info), labels[query], score))
    return {"segmentation": numbers, "segments_info": info}


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
        masks: logits (Q, h, w).
        classes: logits (Q, num_classes + 1).
        model_size: (height, width) of the images of the model.
        size: (height, width) of the image.
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
    sure = (labels != classes.shape[1] - 1) & (scores > threshold)
    numbers, info = np.full(tuple(size), -1, "int32"), []
    if not sure.any():
        return {"segmentation": numbers, "segments_info": info}
    labels, scores = labels[sure], scores[sure]
    probabilities = _sigmoid(_on_image(masks[sure], model_size, size, content))
    owner = (scores[:, None, None] * probabilities).argmax(0)
    merged: dict[int, int] = {}
    for query, label in enumerate(labels.tolist()):
        own, inside = owner == query, probabilities[query] >= mask_threshold
        final = own & inside
        if not final.any() or own.sum() / inside.sum() <= overlap_mask_area_threshold:
            continue
        if label in (stuff_classes or ()):
            if label in merged:
                numbers[final] = merged[label]
                continue
            merged[label] = len(info)
        numbers[final] = len(info)
        info.append(_segment(len(info), label, scores[query]))
    return {"segmentation": numbers, "segments_info": info}


def _segment(number: int, label: int, score: float) -> dict[str, Any]:
    return {"id": number, "label_id": int(label), "score": round(float(score), 6)}


def _on_image(masks: np.ndarray, model_size: Size, size: Size, content: Size | None) -> np.ndarray:
    logits = _sized(masks, model_size)
    if content is not None:
        logits = logits[:, : content[0], : content[1]]
    return _sized(logits, size)


def _sized(masks: np.ndarray, size: Size) -> np.ndarray:
    """Returns maps (N, h, w) in another size, float32."""
    if masks.shape[1:] == tuple(size):
        return np.asarray(masks, "float32")
    logits = resized(np.moveaxis(np.asarray(masks, "float32"), 0, -1), size)
    return np.moveaxis(logits, -1, 0)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -80, 80)))


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
