"""Sources of images: their protocol, arrays, and the splits of a data set."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from kmodels.core.errors import InputError, shown
from kmodels.data.images.decoding import PictureError, suffixes, warn_of_range
from kmodels.data.rng import philox

PARTS = ("train", "validation", "test")
# The part of the data that a folder of this name has.
SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}
# Extensions of other files that are expected next to images.
_DOCUMENTS = (
    *(".txt", ".md", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".html", ".pdf"),
    *(".ini", ".db", ".log", ".py", ".mat", ".npy", ".npz", ".zip", ".tar", ".gz"),
)
# Label of pixels that belong to no class.
NO_LABEL = 255
_STATISTICS_SAMPLES = 2048


@runtime_checkable
class ImageSource(Protocol):
    """Protocol for numbered images with labels; picklable, without importing a framework."""

    labels: np.ndarray
    """int32 (n,)."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> tuple[Any, np.ndarray]:
        """Returns images and labels.

        Returns:
            Images with values from 0 to 255, uint8 or float32: one array (B, H, W, C) if all have
            one size, else a list of arrays (H, W, C). Labels int32 (B,).
        """
        ...


class ArraySource:
    """Images in memory.

    Args:
        images: uint8 or float32 (n, H, W, C), values from 0 to 255.
        labels: int (n,).
        indices: numbers of the images to use, in order; default: all.

    Raises:
        InputError: for images of another shape, or labels that are not one class for each.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, indices: np.ndarray | None = None):
        check_images(images)
        labels = np.asarray(labels)
        if labels.ndim != 1 or labels.dtype.kind not in "biuf":
            raise InputError(
                f"labels have shape {labels.shape} of {labels.dtype}; give the number of a class "
                "for each image, (n,)"
            )
        check_whole_classes(labels, "the data")
        if len(images) != len(labels):
            raise InputError(
                f"{len(images)} images but {len(labels)} labels; give the same number of both"
            )
        self.images = images if indices is None else images[indices]
        self.labels = np.asarray(labels if indices is None else labels[indices], "int32")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See ImageSource."""
        return self.images[indices], self.labels[indices]

    def part(self, indices: np.ndarray) -> Self:
        """Returns the images with these numbers, in this order."""
        return type(self)(self.images, self.labels, indices)


@dataclass
class DataBundle:
    """The splits and classes of a data set, from `open_dataset`.

    Attributes:
        train: the training split.
        validation: the validation split; None if validation_split is 0 and the data has none.
        test: the test split; None if there is none.
        class_names: one per label.
        image_shape: (H, W, C) of the images of a loader by default.
        skipped: (file, reason) of images that skip_bad skipped.
    """

    train: ImageSource
    validation: ImageSource | None
    test: ImageSource | None
    class_names: list[str]
    image_shape: tuple[int, int, int]
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of training pixels / 255, per channel."""
        return self._statistics[0]

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of training pixels / 255, per channel."""
        return self._statistics[1]

    @cached_property
    def _statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of all images in memory, or of evenly spaced ones in files.

        Reading a million files for two numbers would take minutes.
        """
        count = len(self.train)
        whole = getattr(self.train, "images", None)
        if whole is not None:
            numbers = np.arange(count)
        else:
            numbers = np.unique(np.linspace(0, count - 1, _STATISTICS_SAMPLES).astype(int))
        channels = self.image_shape[-1]
        total, squares, pixels = np.zeros(channels), np.zeros(channels), 0
        for at in range(0, len(numbers), 256):
            for picture in _as_list(self.train.batch(numbers[at : at + 256])[0]):
                flat = picture.reshape(-1, picture.shape[-1]).astype("float64") / 255.0
                total += flat.sum(0)
                squares += (flat * flat).sum(0)
                pixels += len(flat)
        mean = total / pixels
        deviation = np.sqrt(np.maximum(squares / pixels - mean**2, 0.0))
        # Images of one colour have no deviation, which would divide by zero.
        return tuple(mean.tolist()), tuple(np.maximum(deviation, 1e-3).tolist())


def _as_list(pictures: Any) -> list[np.ndarray]:
    # One large array is cheaper to sum at once than image by image.
    return pictures if isinstance(pictures, list) else [pictures.reshape(-1, 1, pictures.shape[-1])]


def check_images(images: Any) -> None:
    """Raises `InputError` unless images are (n, H, W, C); warns of values beyond 0..255."""
    shape = getattr(images, "shape", None)
    in_front = shape is not None and len(shape) == 4 and shape[1] in (1, 3) and shape[3] > 4
    if shape is None or len(shape) != 4 or in_front:
        given = f"a {type(images).__name__}" if shape is None else f"of shape {shape}"
        raise InputError(f"images are {given}; give an array (n, height, width, channels)")
    warn_of_range(images[:64])  # all of a file would be read


def check_share(share: float) -> None:
    """Raises `InputError` for a share that cannot be held out for validation and for testing."""
    if not 0.0 <= share < 0.5:
        raise InputError(f"validation_split is {share}; give at least 0 and below 0.5")


def check_stems(folder: Path, images: Sequence[Path]) -> None:
    """Raises `InputError` for two images with the name of one mask or text, as a.jpg and a.png."""
    counts = Counter(image.with_suffix("") for image in images)
    if twice := [image.name for image in images if counts[image.with_suffix("")] > 1]:
        raise InputError(
            f"{folder} has {' and '.join(twice[:2])}, to which one mask or text would belong; "
            "rename one"
        )


def common_size(source: ImageSource, name: object) -> tuple[int, int]:
    """Returns (height, width) of 16 of the images; raises `InputError` if they differ."""
    numbers = np.unique(np.linspace(0, len(source) - 1, 16).astype(int))
    sizes = {picture.shape[:2] for picture in source.batch(numbers)[0]}
    if len(sizes) > 1:
        shown = ", ".join(f"{height}x{width}" for height, width in sorted(sizes)[:3])
        raise InputError(
            f"{name}: images differ in size ({shown}, ...); give image_size, such as (96, 96)"
        )
    return sizes.pop()


def is_image_file(name: str) -> bool:
    """Returns True for the name of a file that Pillow reads."""
    return name.lower().endswith(suffixes())


def unread_files(paths: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns those of `paths_below` that are neither images nor texts and settings."""
    return sorted(
        "/".join(parts)
        for parts in paths
        if parts[-1] and not is_image_file(parts[-1]) and not parts[-1].lower().endswith(_DOCUMENTS)
    )


def warn_of_files(root: Path, names: Sequence[str]) -> None:
    """Warns of files below a folder that Pillow does not read, if there are some."""
    if names:
        ends = Counter(PurePosixPath(name).suffix.lower() or "no suffix" for name in names)
        warnings.warn(
            f"{shown(root)}: {len(names)} files are left out, which Pillow does not read "
            f"({', '.join(f'{count} {end}' for end, count in ends.most_common())}); convert them, "
            "or install Pillow's plugin for them, such as pillow-heif",
            stacklevel=5,
        )


def readable(
    picture: Callable[[int], np.ndarray], count: int
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Returns the numbers of the first `count` images that can be read, int (n,).

    The second result has (name, reason) of each other one.
    """
    numbers, skipped = [], []
    for number in range(count):
        try:
            picture(number)
            numbers.append(number)
        except PictureError as error:
            skipped.append((error.name, error.reason))
    return np.array(numbers, int), skipped


def check_whole_classes(classes: np.ndarray, where: str) -> None:
    """Raises `InputError` for classes that are not whole numbers, naming where they are."""
    if classes.dtype.kind == "f" and (wrong := classes != np.rint(classes)).any():
        raise InputError(f"{where} has class {classes[wrong][0]}; give whole numbers")


# More classes than any data set has; each gets a name.
_MOST_CLASSES = 10_000_000


def count_classes(labels: np.ndarray, where: object) -> int:
    """Returns the number of classes of labels from 0, none of which is negative.

    A label that is an id rather than the number of a class raises `InputError`.
    """
    if (most := int(labels.max())) >= _MOST_CLASSES:
        raise InputError(f"{where}: label {most} is too large; number the classes from 0")
    return most + 1


def check_labels(
    labels: np.ndarray, num_classes: int, where: str, ignored: int | None = None
) -> np.ndarray:
    """Returns labels as int32; raises `InputError` for one outside 0..num_classes-1.

    `where` names the labels in the message; the label `ignored` is accepted, too.
    """
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignored)
        if wrong.any():
            other = "" if ignored is None else f" and not {ignored}"
            raise InputError(
                f"{where}: label {labels[wrong][0]} is outside 0..{num_classes - 1}{other}; "
                "correct the labels or the number of classes"
            )
    return labels.astype("int32")


def all_parts(sources: dict[str, Any], share: float, seed: int) -> dict[str, Any]:
    """Returns the `PARTS` of a data set; missing ones are drawn from the training part.

    Each source has `part(indices)`. A part is None if it is missing and the share is 0.
    """
    train, missing = sources["train"], PARTS[1:]
    shares = [0.0 if part in sources else share for part in missing]
    rest, *drawn = split(len(train), shares, seed)
    taken = {x: train.part(part) for x, part in zip(missing, drawn, strict=True) if len(part)}
    if taken:
        taken["train"] = train.part(rest)
    return {**dict.fromkeys(PARTS), **sources, **taken}


def split(n: int, shares: Sequence[float], seed: int) -> tuple[np.ndarray, ...]:
    """Splits 0..n-1 into one part per share and the rest, as a pure function of the seed.

    Returns sorted int arrays: the rest first, then one for each share, with at least one sample if
    the share is above 0.
    """
    drawn = np.argsort(philox(seed, "split").random_raw(n), kind="stable")
    parts, at = [], 0
    for share in shares:
        count = max(1, round(n * share)) if share > 0 else 0
        parts.append(np.sort(drawn[at : at + count]))
        at += count
    if at >= n:
        raise InputError(
            f"{n} samples are too few to hold out shares {tuple(shares)}; give more data or a "
            "smaller validation_split"
        )
    return np.sort(drawn[at:]), *parts
