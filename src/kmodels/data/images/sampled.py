"""Labelled images out of samples by number, for `open_dataset`."""

from typing import Any, Protocol

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.images.pictures import PictureError
from kmodels.data.images.sources import DataBundle, split


class Samples(Protocol):
    """Numbered samples with an image and a label each."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str:
        """Returns the name for messages."""
        ...

    def picture(self, number: int) -> np.ndarray:
        """Returns the image, uint8 (H, W, C)."""
        ...

    def label(self, number: int) -> int:
        """Returns the label, from 0."""
        ...


class SampledSource:
    """Images of some of the samples, read when asked for.

    Args:
        samples: all of them.
        numbers: int (n,), which of them.
        labels: int (n,), of those.
    """

    def __init__(self, samples: Samples, numbers: np.ndarray, labels: np.ndarray):
        self.samples, self.numbers = samples, numbers
        self.labels = np.asarray(labels, "int32")

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """See ImageSource."""
        numbers = self.numbers[indices].tolist()
        return [self.samples.picture(number) for number in numbers], self.labels[indices]


def read_samples(
    samples: Samples,
    spec: str,
    image_size: tuple[int, int] | None,
    seed: int,
    validation_split: float,
    skip_bad: bool,
) -> DataBundle:
    """Reads all labels, and the images when a batch asks for them.

    Args:
        samples: with images and labels.
        spec: what was asked for, for messages.
        image_size: see `open_dataset`, as are all below.
        seed: seed of the split.
        validation_split: share for each part.
        skip_bad: reads every image now, and leaves out the unreadable ones.

    Raises:
        InputError: for a sample without a label, or images that differ in size without
            image_size.
    """
    labels = np.array([samples.label(number) for number in range(len(samples))])
    numbers, skipped = np.arange(len(samples)), []
    if skip_bad:
        good = []
        for number in numbers.tolist():
            try:
                samples.picture(number)
                good.append(number)
            except PictureError as error:
                skipped.append((error.name, error.reason))
        numbers = np.array(good, int)
    if not len(numbers):
        raise InputError(f"{spec} has no image that can be read; repair it")
    parts: list[Any] = [
        SampledSource(samples, numbers[chosen], labels[numbers[chosen]])
        for chosen in split(len(numbers), (validation_split, validation_split), seed)
    ]
    train, validation, test = parts
    looked = np.unique(np.linspace(0, len(train) - 1, 16).astype(int))
    shapes = {picture.shape for picture in train.batch(looked)[0]}
    if image_size is None and len({shape[:2] for shape in shapes}) > 1:
        sizes = ", ".join(f"{shape[0]}x{shape[1]}" for shape in sorted(shapes)[:3])
        raise InputError(
            f"{spec}: images differ in size ({sizes}, ...); give image_size, such as (96, 96)"
        )
    height, width, channels = next(iter(shapes))
    if image_size is not None:
        height, width = image_size
    return DataBundle(
        train,
        validation if len(validation) else None,
        test if len(test) else None,
        [str(label) for label in range(int(labels.max()) + 1)],
        (height, width, channels),
        skipped,
    )
