"""Several views of each image in a batch, for what compares them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.images.augment import Augment
from kmodels.data.images.batches import BatchMaker
from kmodels.data.images.loader import ImageLoader
from kmodels.data.images.sources import ImageSource
from kmodels.data.rows import rows_within


@dataclass
class ViewMaker(BatchMaker):
    """A `BatchMaker` that makes several augmentations of each image."""

    views: tuple[Augment, ...] = ()

    def make(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns batch `number` of an epoch.

        Returns:
            float32 images (B, V, H, W, C), and int32 labels (B,).
        """
        start = number * self.batch_size
        stop = min(start + self.batch_size, len(self.source))
        if not 0 <= start < stop:
            raise IndexError(f"batch {number} of {self.batches}")
        if self.rows is not None:
            within = rows_within(*self.rows, stop - start)
            start, stop = start + within.start, start + within.stop
        samples = self.order(epoch)[start:stop]
        found, labels = [], np.zeros(0, "int32")
        for view, augment in enumerate(self.views):
            # Each view draws its own numbers for the same images.
            maker = replace(self, augment=augment, seed=self.seed + 7919 * (view + 1))
            images, labels = maker.pictures(epoch, samples)
            augment.erase(images, maker.seed, epoch, samples)
            found.append(images)
        return np.stack(found, axis=1), labels


class ViewLoader(ImageLoader):
    """Batches of images in several views each, for `fit`.

    Args:
        source: images, such as a split of `open_dataset`.
        batch_size: images per batch.
        views: an augmentation for each view; none that mixes images.
        **settings: of `ImageLoader`.

    A batch is float32 images (B, V, H, W, C) and int32 labels (B,).

    Raises:
        InputError: without views, or for views that mix images.
    """

    def __init__(
        self, source: ImageSource, batch_size: int, views: Sequence[Augment], **settings: Any
    ):
        super().__init__(source, batch_size, **settings)
        if not views or any(augment.mixes for augment in views):
            raise InputError("views are none, or mix images; give an Augment without mixing each")
        given = {field.name: getattr(self.maker, field.name) for field in fields(BatchMaker)}
        self.maker = ViewMaker(**given, views=tuple(views))
