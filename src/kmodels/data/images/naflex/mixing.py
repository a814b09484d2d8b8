"""MixUp and CutMix of images of different sizes, as timm's NaFlex loader does them.

Only the part that both images of a pair have in their middle is mixed, so none is resized, and the
labels follow the share of pixels that came from each.
"""

from collections.abc import Sequence

import numpy as np

from kmodels.data.images.augment import Augment
from kmodels.data.rng import symmetric_beta, uniforms


def pairs_of(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns pairs of images whose aspect ratios are near each other; an odd one stays alone."""
    ratios = [width / height for height, width in shapes]
    order = np.argsort(ratios, kind="stable").tolist()
    return list(zip(order[::2], order[1::2], strict=False))


def mix(
    images: list[np.ndarray],
    labels: np.ndarray,
    augment: Augment,
    seed: int,
    epoch: int,
    samples: np.ndarray,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Mixes pairs of images; each keeps its own size.

    Args:
        images: float32 (H, W, C) each.
        labels: float32 (B, classes).
        augment: for `mixup` and `cutmix`.
        seed: seed of the run.
        epoch: from 0.
        samples: (B,) sample numbers, of which the first of a pair decides what is drawn.

    Returns:
        New images and labels.

    Source:
        timm 1.0, `timm.data.naflex_mixup.mix_batch_variable_size`.
    """
    mixed, targets = list(images), labels.copy()
    pairs = pairs_of([image.shape[:2] for image in images])
    drawn = uniforms(seed, "naflex-mix", epoch, samples[[one for one, _ in pairs]], 4)
    for (one, other), (kind, share, down, right) in zip(pairs, drawn, strict=True):
        both = augment.mixup > 0 and augment.cutmix > 0
        blends = kind < 0.5 if both else augment.mixup > 0
        alpha = augment.mixup if blends else augment.cutmix
        kept = float(symmetric_beta(np.array([share]), alpha)[0])
        for here, there in ((one, other), (other, one)):
            mixed[here], own = _mixed(images[here], images[there], kept, blends, down, right)
            targets[here] = labels[here] * own + labels[there] * (1 - own)
    return mixed, targets


def _mixed(
    image: np.ndarray, other: np.ndarray, kept: float, blends: bool, down: float, right: float
) -> tuple[np.ndarray, float]:
    """Returns an image with a part of another, and the share of its pixels that are its own."""
    sizes = np.array([image.shape[:2], other.shape[:2]])
    overlap = sizes.min(axis=0)
    starts = (sizes - overlap) // 2
    part = overlap if blends else (overlap * np.sqrt(1 - kept)).astype(int)
    if not blends:
        starts = starts + (np.array([down, right]) * (overlap - part + 1)).astype(int)
    into, origin = (
        np.s_[top : top + part[0], left : left + part[1]] for top, left in starts.tolist()
    )
    found, share = image.copy(), float(np.prod(part) / np.prod(sizes[0]))
    if not blends:
        found[into] = other[origin]
        return found, 1 - share
    found[into] = image[into] * np.float32(kept) + other[origin] * np.float32(1 - kept)
    return found, 1 - share + kept * share
