"""`open_dataset`: one word for the data, as recipes take it."""

import math
import re

from kmodels.core.errors import InputError
from kmodels.core.remote import local_copy
from kmodels.data.formats.readers import read_digits, read_idx, read_npz
from kmodels.data.formats.tfrecord import TFRecords
from kmodels.data.formats.webdataset import TarShards
from kmodels.data.images.folder import read_folder
from kmodels.data.images.sampled import read_samples
from kmodels.data.images.sources import DataBundle, SyntheticSource

SPECS = "digits, synthetic[:N], idx:DIR, folder:DIR_OR_ZIP, npz:FILE, FILES.tar, FILES.tfrecord"
_KINDS = ("digits", "synthetic", "idx", "folder", "npz")
# "x.tar", and "x.tfrecord", "x.tfrecords", "x.tfrecord-00000-of-00010".
_SAMPLES = re.compile(r"(?P<tar>\.tar$)|\.tfrecords?(-[^/]*)?$")


def open_dataset(
    spec: str,
    *,
    image_size: tuple[int, int] | None = None,
    seed: int = 0,
    validation_split: float = 0.1,
    skip_bad: bool = False,
) -> DataBundle:
    """Opens a data set of labelled images.

    Test and validation parts that the data brings are kept; a missing one is drawn from the
    training part, as a pure function of the seed.

    Args:
        spec: digits (1,797 of 8x8, grey, always split 80/10/10) | synthetic[:N] (N random
            images, 1,000 by default) | idx:DIR (files of MNIST or Fashion-MNIST, gz or not) |
            folder:DIR (a folder of images per class, perhaps below train, validation and test;
            or a zip of these) | npz:FILE (x_train, y_train, x_test, y_test, or x, y) |
            FILES.tar (WebDataset's shards, see `TarShards`) | FILES.tfrecord (see `TFRecords`),
            where FILES may name several: "train-{0000..0003}.tar", "train-*.tfrecord". A path may
            be an address such as "gs://bucket/train.tar"; files are copied to the local disk then.
        image_size: (height, width) that loaders resize to; the data's own by default. Images of
            a folder that differ in size need it.
        seed: seed of the split, and of synthetic images.
        validation_split: share of the training part for each part that is missing.
        skip_bad: reads every image of files now and leaves out the unreadable ones, which
            `DataBundle.skipped` lists. Otherwise they raise when they are read.

    Returns:
        The splits, opened; files are read when a batch asks for them.

    Raises:
        InputError: for an unknown spec, or data that is missing, empty or damaged.
    """
    if image_size is not None and (len(image_size) != 2 or min(image_size) < 1):
        raise InputError(f"image_size is {image_size}; give (height, width) in pixels")
    if not 0.0 <= validation_split < 0.5:
        raise InputError(f"validation_split is {validation_split}; give at least 0 and below 0.5")
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
        for size, start in (
            (train, 0),
            (held_out, train),
            (held_out, train + held_out),
        )
    ]
    return DataBundle(
        train=parts[0],
        validation=parts[1] if held_out else None,
        test=parts[2] if held_out else None,
        class_names=[str(label) for label in range(classes)],
        image_shape=shape,
    )
