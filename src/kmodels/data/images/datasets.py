"""`open_dataset`: labelled images from a short text such as "digits", and a reader of each kind."""

import gzip
import math
import re
import struct
import warnings
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError, pluralize, shown
from kmodels.core.files import ALWAYS_ALLOWED, MOST_EXPANSION, check_zip, is_hidden, paths_below
from kmodels.core.remote import local_copy
from kmodels.data.images.decoding import MAX_BYTES, PictureError, decode, read_picture
from kmodels.data.images.resizing import sides_of
from kmodels.data.images.sources import (
    SPLITS,
    ArraySource,
    DataBundle,
    all_parts,
    check_labels,
    check_share,
    common_size,
    count_classes,
    is_image_file,
    readable,
    unread_files,
    warn_of_files,
)
from kmodels.data.images.synthetic import SyntheticSource
from kmodels.data.records import TarShards, TFRecords

SPECS = "digits, synthetic[:N], idx:DIR, folder:DIR_OR_ZIP, npz:FILE, FILES.tar, FILES.tfrecord"
_KINDS = ("digits", "synthetic", "idx", "folder", "npz")
# "x.tar", and "x.tfrecord", "x.tfrecords", "x.tfrecord-00000-of-00010".
_SAMPLES = re.compile(r"(?P<tar>\.tar$)|\.tfrecords?(-[^/]*)?$")


@checked
def open_dataset(
    spec: str,
    *,
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
    validation_split: float = 0.1,
    skip_bad: bool = False,
) -> DataBundle:
    """Opens a data set of labelled images.

    Test and validation parts of the data are used; a missing one is drawn from the training part,
    as a pure function of the seed.

    Args:
        spec: digits (1,797 of 8x8, grey, always split 80/10/10) | synthetic[:N] (N random
            images, 1,000 by default) | idx:DIR (files of MNIST or Fashion-MNIST, gz or not) |
            folder:DIR (a folder of images per class, perhaps below train, validation and test;
            or a zip of these) | npz:FILE (x_train, y_train, x_test, y_test, or x, y) |
            FILES.tar (WebDataset's shards, see `TarShards`) | FILES.tfrecord (see `TFRecords`).
            FILES may match several: "train-{0000..0003}.tar", "train-*.tfrecord". A path may be
            an address such as "gs://bucket/train.tar", whose files are copied to the local disk.
        image_size: (height, width) that loaders resize to; default: the size of the images.
            Needed for a folder of images of different sizes.
        seed: seed of the split, and of synthetic images.
        validation_split: share of the training part for each part that is missing.
        skip_bad: reads all image files now and skips unreadable ones, which are listed in
            `DataBundle.skipped`. Otherwise they raise when they are read.

    Returns:
        The splits; files are read with their batch.

    Raises:
        InputError: for an unknown spec, or data that is missing, empty or damaged.
    """
    image_size = None if image_size is None else sides_of(image_size)
    check_share(validation_split)
    kind, colon, argument = spec.partition(":")
    if kind not in _KINDS and (opened := _SAMPLES.search(spec)):
        samples = TarShards(spec) if opened["tar"] else TFRecords(spec)
        return read_samples(samples, spec, image_size, seed, validation_split, skip_bad)
    if kind in ("idx", "folder", "npz") and not argument:
        raise InputError(f"data {spec!r} names no path; give one of {SPECS}")
    if kind == "digits" and not colon:
        bundle = read_digits()
    elif kind == "synthetic" and (not colon or argument):
        return _synthetic(argument or "1000", image_size, seed, validation_split)
    elif kind == "idx":
        bundle = read_idx(local_copy(argument), seed, validation_split)
    elif kind == "npz":
        bundle = read_npz(local_copy(argument), seed, validation_split)
    elif kind == "folder":
        path = local_copy(argument)
        return read_folder(path, image_size, seed, validation_split, skip_bad)
    else:
        raise InputError(f"data {spec!r} is unknown; give one of {SPECS}")
    if image_size is not None:
        bundle.image_shape = (*image_size, bundle.image_shape[-1])
    return bundle


def _synthetic(
    count: str, image_size: tuple[int, int] | None, seed: int, validation_split: float
) -> DataBundle:
    if not count.isdecimal() or int(count) < 1:
        raise InputError(f"data 'synthetic:{count}' has no count; give synthetic:N with N above 0")
    height, width = image_size or (32, 32)
    shape, classes = (height, width, 3), 10
    train = int(count)
    held_out = math.ceil(train * validation_split)
    parts = [
        SyntheticSource(size, shape, classes, seed, start)
        for size, start in ((train, 0), (held_out, train), (held_out, train + held_out))
    ]
    train_part, *others = parts
    validation, test = others if held_out else (None, None)
    names = [str(label) for label in range(classes)]
    return DataBundle(train_part, validation, test, names, shape)


DIGITS = Path(__file__).parent / "digits.npz"
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_IDX_MAGIC = {"images": 2051, "labels": 2049}
_NPZ_KEYS = "x_train, y_train, x_test, y_test (and perhaps x_val, y_val), or x and y"


def _bundle(
    arrays: dict[str, tuple[np.ndarray, np.ndarray]],
    class_names: list[str],
    seed: int,
    validation_split: float,
) -> DataBundle:
    """Returns a data set of (images, labels) by part."""
    sources = {part: ArraySource(*pair) for part, pair in arrays.items()}
    parts = all_parts(sources, validation_split, seed)
    return DataBundle(**parts, class_names=class_names, image_shape=arrays["train"][0].shape[1:])


def read_digits() -> DataBundle:
    """Reads 1,797 handwritten digits, grey 8x8, in a fixed 80/10/10 split; they come with kmodels.

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C.
    Kaynak (UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49), licensed under
    CC BY 4.0: the images that scikit-learn's `load_digits` gives, in its order.
    """
    with np.load(DIGITS) as file:
        pixels, labels = file["pixels"], file["labels"]
    # The originals have 17 grey values, 0 to 16.
    images = np.round(pixels[..., None] * (255 / 16)).astype("uint8")
    names = [str(digit) for digit in range(10)]
    return _bundle({"train": (images, labels.astype("int32"))}, names, 0, 0.1)


def read_idx(folder: Path, seed: int, validation_split: float) -> DataBundle:
    """Reads MNIST and other data sets in the IDX format, gz or not."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give idx:DIR with the four IDX files")
    train = _idx_pair(folder, "train")
    parts, classes = {"train": train}, int(train[1].max()) + 1
    if any(_idx_file(folder, "t10k", kind) for kind in _IDX_MAGIC):
        images, labels = parts["test"] = _idx_pair(folder, "t10k")
        check_labels(labels, classes, f"{folder}: test labels")
        if images.shape[1:] != train[0].shape[1:]:
            raise InputError(
                f"{folder}: test images are {images.shape[1:3]}, training images "
                f"{train[0].shape[1:3]}; give files of one data set"
            )
    fashion = "fashion" in folder.resolve().name.lower() and classes == len(FASHION)
    names: list[str] = [*FASHION] if fashion else [str(label) for label in range(classes)]
    return _bundle(parts, names, seed, validation_split)


def _idx_pair(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = (_idx_file(folder, part, kind) for kind in _IDX_MAGIC)
    if images is None or labels is None:
        lacking = "images-idx3" if images is None else "labels-idx1"
        raise InputError(
            f"{folder} has no {part}-{lacking}-ubyte file (gz or not); add it or give another "
            "folder"
        )
    pixels, values = _read_idx(images, "images"), _read_idx(labels, "labels")
    if len(pixels) != len(values):
        raise InputError(
            f"{images.name} holds {len(pixels)} images but {labels.name} {len(values)} labels; "
            "give files of one data set"
        )
    if not len(pixels):
        raise InputError(f"{images} holds no images; give a data set with some")
    return pixels[..., None], values.astype("int32")


def _idx_file(folder: Path, part: str, kind: str) -> Path | None:
    dims = 3 if kind == "images" else 1
    for dot in ("-", "."):
        for ending in ("", ".gz"):
            path = folder / f"{part}-{kind}{dot}idx{dims}-ubyte{ending}"
            if path.is_file():
                return path
    return None


def _read_idx(path: Path, kind: str) -> np.ndarray:
    try:
        content = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be unpacked ({error}); fetch it again") from error
    dims = 3 if kind == "images" else 1
    if len(content) < 4 + 4 * dims:
        raise InputError(f"{path} is too short for an IDX file; fetch it again")
    magic, *shape = struct.unpack_from(f">{1 + dims}I", content)
    if magic != _IDX_MAGIC[kind]:
        raise InputError(
            f"{path} starts with {magic}, not {_IDX_MAGIC[kind]}; it is not an IDX file of {kind}"
        )
    body = np.frombuffer(content, "uint8", offset=4 + 4 * dims)
    if len(body) != np.prod(shape, dtype=np.int64):
        raise InputError(
            f"{path} promises {shape} values but holds {len(body)}; it is cut off or damaged"
        )
    return body.reshape(shape)


def _unpacked(path: Path) -> bytes:
    most = max(MOST_EXPANSION * path.stat().st_size, ALWAYS_ALLOWED)
    with gzip.open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(f"{path} unpacks to over {most:,} bytes, which no images do")
    return content


def read_npz(path: Path, seed: int, validation_split: float) -> DataBundle:
    """Reads a NumPy archive whose arrays have the names of Keras' own data sets."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; give npz:FILE")
    with path.open("rb") as file:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
            raise InputError(f"{path} is a single array; save with np.savez: {_NPZ_KEYS}")
    # Imported here, since worker processes import this module without Keras.
    from kmodels.weights import read_npz as read_arrays

    try:
        arrays = {name: tensor.read() for name, tensor in read_arrays(path).items()}
    except InputError as error:
        raise InputError(f"{path} is not a readable NumPy archive ({error})") from None
    if "x_train" in arrays and "y_train" in arrays:
        prefixes = {"train": "train", "validation": "val", "test": "test"}
        keys = {part: (f"x_{end}", f"y_{end}") for part, end in prefixes.items()}
    elif "x" in arrays and "y" in arrays:
        keys = {"train": ("x", "y")}
    else:
        raise InputError(f"{path} holds {', '.join(arrays) or 'nothing'}; it needs {_NPZ_KEYS}")
    if others := sorted(arrays.keys() - {name for pair in keys.values() for name in pair}):
        warnings.warn(
            f"{shown(path)} has {', '.join(others)}, which kmodels does not read beside "
            f"{' and '.join(keys['train'])}; it reads {_NPZ_KEYS}",
            stacklevel=4,
        )
    parts = {}
    for part, (x, y) in keys.items():
        if (x in arrays) != (y in arrays):
            lacking = y if x in arrays else x
            raise InputError(f"{path} lacks {lacking}; it needs {_NPZ_KEYS}")
        if x in arrays:
            parts[part] = (
                _npz_images(arrays[x], f"{path}: {x}"),
                _npz_labels(arrays[y], f"{path}: {y}"),
            )
            if len(parts[part][0]) != len(parts[part][1]):
                raise InputError(
                    f"{path}: {x} has {len(arrays[x])} rows, {y} {len(arrays[y])}; give as many"
                )
    shape = parts["train"][0].shape[1:]
    classes = count_classes(parts["train"][1], f"{path}: labels of train")
    for part, (images, labels) in parts.items():
        check_labels(labels, classes, f"{path}: labels of {part}")
        if images.shape[1:] != shape:
            raise InputError(
                f"{path}: images of {part} are {images.shape[1:]}, of train {shape}; give one size"
            )
    return _bundle(parts, [str(label) for label in range(classes)], seed, validation_split)


def _npz_images(images: np.ndarray, where: str) -> np.ndarray:
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or not images.size:
        raise InputError(
            f"{where} has shape {images.shape}; give (n, height, width) or (n, height, width, "
            "1 or 3) with n above 0"
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype == np.uint16:
        return images.astype("float32") * np.float32(255 / 65535)
    if images.dtype.kind not in "biuf":
        raise InputError(f"{where} holds {images.dtype}; give numbers")
    images = images.astype("float32")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0.0 and high <= 255.0):
        raise InputError(f"{where} runs from {low} to {high}; give pixels in 0..1 or 0..255")
    return images * np.float32(255.0) if high <= 1.0 else images


def _npz_labels(labels: np.ndarray, where: str) -> np.ndarray:
    if labels.ndim == 2 and labels.size:
        if labels.shape[1] > 1 and not ((labels != 0).sum(1) == 1).all():
            raise InputError(
                f"{where} has shape {labels.shape} and rows that are not one-hot; give one class "
                "for each image"
            )
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(1)
    if labels.ndim != 1 or not labels.size or labels.dtype.kind not in "biuf":
        raise InputError(f"{where} has shape {labels.shape} of {labels.dtype}; give (n,) integers")
    whole = np.nan_to_num(labels, nan=-1.0).astype("int64")
    if (whole != labels).any():
        raise InputError(f"{where} holds fractions; give whole numbers from 0")
    if whole.min() < 0:
        raise InputError(f"{where}: label {whole.min()} is outside 0..n; give numbers from 0")
    return whole


class Samples(Protocol):
    """Protocol for numbered samples that have an image and a label."""

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
    """Images of the samples with these numbers, int (n,), read with their batch."""

    def __init__(self, samples: Samples, numbers: np.ndarray, labels: np.ndarray):
        self.samples, self.numbers = samples, numbers
        self.labels = np.asarray(labels, "int32")

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """See ImageSource."""
        numbers = self.numbers[indices].tolist()
        return [self.samples.picture(number) for number in numbers], self.labels[indices]

    def part(self, indices: np.ndarray) -> "SampledSource":
        """Returns the images with these numbers, in this order."""
        return SampledSource(self.samples, self.numbers[indices], self.labels[indices])


def read_samples(
    samples: Samples,
    spec: str,
    image_size: tuple[int, int] | None,
    seed: int,
    validation_split: float,
    skip_bad: bool,
) -> DataBundle:
    """Opens samples as images: labels are read now, images with their batch."""
    labels = np.array([samples.label(number) for number in range(len(samples))])
    names = [str(label) for label in range(count_classes(labels, spec))]
    numbers, skipped = np.arange(len(samples)), []
    if skip_bad:
        numbers, skipped = readable(samples.picture, len(samples))
    if not len(numbers):
        raise InputError(f"{spec} has no image that can be read; repair it")
    whole = SampledSource(samples, numbers, labels[numbers])
    parts = all_parts({"train": whole}, validation_split, seed)
    height, width = image_size or common_size(parts["train"], spec)
    channels = parts["train"].batch(np.zeros(1, int))[0][0].shape[-1]
    shape = height, width, channels
    return DataBundle(**parts, class_names=names, image_shape=shape, skipped=skipped)


# === Folders of images, one per class, perhaps below split folders, or a zip of them ===

Listing = list[tuple[str, ...]]


class FileSource:
    """Images in files below a folder or in a zip file, read with their batch.

    Names are paths below the root, with forward slashes.
    """

    def __init__(self, root: Path, names: list[str], labels: np.ndarray):
        self.root = Path(root)
        self.names = names
        self.labels = np.asarray(labels, "int32")
        self._zip: zipfile.ZipFile | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getstate__(self) -> dict:
        # An open zip file cannot be pickled; another process opens its own.
        return {**self.__dict__, "_zip": None}

    def batch(self, indices: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """See ImageSource."""
        return [self.picture(int(i)) for i in indices], self.labels[indices]

    def part(self, indices: np.ndarray) -> "FileSource":
        """Returns the images with these numbers, in this order."""
        return FileSource(self.root, [self.names[int(i)] for i in indices], self.labels[indices])

    def picture(self, number: int) -> np.ndarray:
        """Returns one image, uint8 (H, W, 3)."""
        name = self.names[number]
        where = f"{self.root}/{name}"
        try:
            return decode(self._read(name), where)
        except (OSError, RuntimeError, NotImplementedError) as error:
            raise PictureError(where, f"cannot be read ({error})") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise PictureError(where, f"damaged in the zip ({error})") from error

    def _read(self, name: str) -> bytes:
        if self.root.is_dir():
            return read_picture(self.root / name)
        if self._zip is None:
            self._zip = zipfile.ZipFile(self.root)
        # The size is checked before unpacking: a few kilobytes can unpack to gigabytes.
        if self._zip.getinfo(name).file_size > MAX_BYTES:
            raise PictureError(f"{self.root}/{name}", f"unpacks to over {MAX_BYTES} bytes")
        return self._zip.read(name)


def read_folder(
    root: Path,
    image_size: tuple[int, int] | None,
    seed: int,
    validation_split: float,
    skip_bad: bool,
) -> DataBundle:
    """Opens ROOT/CLASS/*.jpg or ROOT/train/CLASS/*.jpg, or a zip of either."""
    listed, unread = _list_folder(root)
    images = _below_wrapper(listed)
    if not any(parts[-1] for parts in images):
        raise InputError(
            f"{root} holds no images that Pillow reads, such as .jpg; give folder:DIR with a "
            "folder per class"
        )
    by_split, names = _sort_by_class(root, images)
    skipped = [(f"{root}/{name}", "not an image that Pillow reads") for name in unread]
    warn_of_files(root, unread)
    sorted_images = {name for members in by_split.values() for name, _ in members}
    outside = sorted({"/".join(p) for p in images if p[-1]} - sorted_images)
    skipped += [(f"{root}/{name}", "in no class folder") for name in outside]
    if outside:
        warnings.warn(
            f"{shown(root)}: {pluralize(len(outside), 'image')} in no class folder left out: "
            f"{', '.join(outside[:8])}; move them into one",
            stacklevel=4,
        )
    label_of = {name: label for label, name in enumerate(names)}
    sources: dict[str, FileSource] = {}
    for part, members in by_split.items():
        members.sort()
        labels = np.array([label_of[name] for _, name in members], int)
        source = FileSource(root, [path for path, _ in members], labels)
        if skip_bad:
            numbers, unreadable = readable(source.picture, len(source))
            source, skipped = source.part(numbers), skipped + unreadable
        sources[part] = source
    present = sources["train"].labels
    empty = [name for label, name in enumerate(names) if label not in present]
    if empty:
        raise InputError(
            f"{root}: no usable training image in class {', '.join(empty)}; add some or remove "
            "the folder"
        )
    parts = all_parts(sources, validation_split, seed)
    shape = (*(image_size or common_size(parts["train"], root)), 3)
    return DataBundle(**parts, class_names=names, image_shape=shape, skipped=skipped)


def _list_folder(root: Path) -> tuple[Listing, list[str]]:
    """Lists the images and folders below root by the parts of their paths, and the other files.

    Texts and settings are in neither list.
    """
    if root.is_dir():
        paths = paths_below(root)
    elif root.is_file():
        try:
            with zipfile.ZipFile(root) as archive:
                check_zip(archive, root)
                paths = [
                    (*PurePosixPath(info.filename).parts, *(("",) if info.is_dir() else ()))
                    for info in archive.infolist()
                ]
        except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeError) as error:
            raise InputError(f"{root} is not a readable zip file ({error}); give a zip") from error
    else:
        raise InputError(f"{root} does not exist; give folder:DIR or folder:FILE.zip")
    listed = [p for p in paths if not any(map(is_hidden, p))]
    images = [p for p in listed if p[-1] == "" or is_image_file(p[-1])]
    return images, unread_files(parts for parts in listed if len(parts) > 1)


def _below_wrapper(images: Listing) -> Listing:
    """Removes a level of folders if a single folder wraps the data, as in many zip files.

    A folder with images right in it is a class, and one named train a split, not a wrapper. The
    wrapper stays in the names, as a part of the first one.
    """
    top = {parts[0] for parts in images}
    inner = [parts for parts in images if len(parts) > 2]
    wraps = (
        len(top) == 1
        and top.isdisjoint(SPLITS)
        and bool(inner)
        and not any(len(parts) == 2 and parts[1] for parts in images)
    )
    if not wraps:
        return images
    prefix = next(iter(top))
    return [(f"{prefix}/{parts[1]}", *parts[2:]) for parts in inner]


def _sort_by_class(
    root: Path, images: Listing
) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """Returns (path, class) of the images by split, and the class names in alphabetical order."""
    tops, has_splits = _tops(images), _has_splits(images)
    files = [parts for parts in images if parts[-1]]
    if not has_splits and tops.issubset(SPLITS) and all(len(parts) > 2 for parts in files):
        raise InputError(
            f"{root} has {', '.join(sorted(tops))} but no train folder with images; add one"
        )
    if has_splits and (strange := sorted(tops - set(SPLITS))):
        raise InputError(
            f"{root} has both a train folder and {', '.join(strange)}; give class folders, or "
            "train, validation and test with class folders in them"
        )
    by_split: dict[str, list[tuple[str, str]]] = defaultdict(list)
    classes: dict[str, set[str]] = defaultdict(set)
    for parts in images:
        top, depth = parts[0].rsplit("/", 1)[-1], 1 if has_splits else 0
        if len(parts) < depth + 2:
            continue  # an image outside of all class folders
        part = SPLITS[_top(parts)] if has_splits else "train"
        label = parts[1] if has_splits else top
        classes[part].add(label)
        if parts[-1]:
            by_split[part].append(("/".join(parts), label))
    names = sorted(classes["train"])
    if len(names) < 2:
        raise InputError(
            f"{root} has {len(names)} class ({', '.join(names)}); give a folder for each of at "
            "least two"
            if names
            else f"{root} has images but no class folders; put them in a folder per class"
        )
    for part in ("validation", "test"):
        if extra := sorted(classes[part] - set(names)):
            raise InputError(
                f"{root}: class {', '.join(extra)} is in {part} but not in train; add it there or "
                "remove it"
            )
    by_split.setdefault("train", [])
    return by_split, names


def _has_splits(images: Listing) -> bool:
    """Returns True if a train folder has class folders.

    A train folder with images of its own is a class, unless all folders beside it are splits.
    """
    train = [parts for parts in images if SPLITS.get(_top(parts)) == "train" and parts[-1]]
    nested = [len(parts) > 2 for parts in train]
    return any(nested) and (all(nested) or _tops(images).issubset(SPLITS))


def _tops(images: Listing) -> set[str]:
    return {_top(parts) for parts in images if len(parts) > 1}


def _top(parts: tuple[str, ...]) -> str:
    return parts[0].rsplit("/", 1)[-1].lower()
