"""Tasks and a batch for a training step of each, of zeros: for steps that compute nothing."""

from typing import Any

import numpy as np

from kmodels import models
from kmodels.models.blocks.embedder.task import TextEmbedder
from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.gemma_vision.gemma4_encoder import Gemma4VisionEmbedder
from kmodels.models.vit.naflex.model import MASK, SHAPES, VALUES


def batch_of(model: Any, rows: int = 2, length: int = 24, packed: bool = False) -> tuple[Any, ...]:
    """Returns (x, y) or (x, y, sample_weight), zeros, in the shapes of a task.

    Args:
        model: the task.
        rows: of the batch.
        length: most tokens of a row.
        packed: whether rows hold several texts.
    """
    config = model.backbone.config
    if isinstance(model, models.ImageTextSimilarity | models.CLIPTextModelWithProjection):
        sizes = getattr(config, "text_encoder", None) or vars(config)
        length = min(length, sizes["max_sequence_length"])
    x = texts(rows, length, packed)
    if isinstance(model, models.NaFlexViTImageClassifier):
        return patches(config, rows), np.zeros((rows, 1), "int32")
    if isinstance(model, models.ViTMAEForPreTraining):
        return (images(config, rows),)
    if isinstance(model, models.ViTObjectDetector):
        boxes = np.full((rows, 4, 4), 0.5, "float32")
        return images(config, rows), {"boxes": boxes, "class_labels": np.zeros((rows, 4), "int32")}
    if isinstance(model, models.ViTImageSegmenter | models.EoMTImageSegmenter):
        return images(config, rows), np.zeros((rows, *config.image_shape[:2]), "int32")
    if isinstance(model, models.ViTImageClassifier):
        if model.num_classes:
            return images(config, rows), np.zeros(rows, "int32")
        return images(config, rows), np.zeros((rows, *model.output_shape[1:]), "float32")
    if isinstance(model, models.CLIPTextModelWithProjection):
        return x, np.zeros((rows, model.output_shape[-1]), "float32")
    if isinstance(model, models.ImageTextSimilarity):
        vision = config.vision
        if not config.naflex:
            return {**x, "images": images(vision, rows)}, np.zeros(rows, "int32")
        seen = patches(vision, rows)
        return {**x, **seen, SHAPES: seen[SHAPES][:, 0]}, np.zeros(rows, "int32")
    if isinstance(model, TextEmbedder):
        pairs = {name: np.stack([ids, ids], 1) for name, ids in x.items()}
        return pairs, np.zeros(rows, "int32")
    ids = x["token_ids"]
    encoder = getattr(model.backbone, "vision_encoder", None)
    seen = {} if encoder is None else pictures(encoder, rows, length)
    return {**x, **seen}, ids, np.ones(ids.shape, "float32")


def images(config: Any, rows: int) -> np.ndarray:
    """Returns images of the size that a config names."""
    return np.zeros((rows, *config.image_shape), "float32")


def texts(rows: int, length: int, packed: bool = False) -> dict[str, np.ndarray]:
    ids = np.zeros((rows, length), "int32")
    others = ("segment_ids", "positions") if packed else ("padding_mask",)
    return {"token_ids": ids, **dict.fromkeys(others, ids)}


def patches(config: Any, rows: int) -> dict[str, np.ndarray]:
    """Returns rows with the patches of an image each."""
    count = config.grid[0] * config.grid[1]
    width = config.patch_size**2 * config.image_shape[-1]
    return {
        VALUES: np.zeros((rows, count, width), "float32"),
        SHAPES: np.zeros((rows, 1, 2), "int32"),
        MASK: np.ones((rows, count), "int32"),
    }


def pictures(encoder: Any, rows: int, length: int) -> dict[str, np.ndarray]:
    """Returns an image for each row, as a vision encoder reads it."""
    mask = {"vision_mask": np.zeros((rows, length), "int32")}
    if isinstance(encoder, Gemma3VisionEncoder):
        size = encoder.image_size
        return {**mask, "images": np.zeros((rows, 1, size, size, 3), "float32")}
    # Without a tower, the squares that it would pool are patches.
    pool = encoder.pool_size
    side = encoder.patch_size * (pool if isinstance(encoder, Gemma4VisionEmbedder) else 1)
    count, width = 4 * pool**2, 3 * side**2
    return {
        **mask,
        "pixel_values": np.zeros((rows, 1, count, width), "float32"),
        "pixel_position_ids": np.zeros((rows, 1, count, 2), "int32"),
    }
