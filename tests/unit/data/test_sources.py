"""Digits, synthetic, IDX and NPZ: what they hold, and the one-line errors."""

import gzip
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmodels.data import (
    ArraySource,
    Augment,
    ImageLoader,
    ImageSource,
    MaskLoader,
    NaFlexLoader,
    ViewLoader,
    open_boxes,
    open_dataset,
    open_masks,
)
from kmodels.data.images import datasets
from kmodels.data.images.sources import split
from kmodels.text import RecordLoader, TextLoader
from python_process import run_python
from refusals import refused


def write_idx(folder, part, count=20, size=6, labels=None, pack=False):
    rng = np.random.default_rng(len(part))
    images = rng.integers(0, 256, (count, size, size), dtype="uint8")
    labels = np.arange(count, dtype="uint8") % 4 if labels is None else labels
    for name, content in (
        (f"{part}-images-idx3-ubyte", struct.pack(">4I", 2051, *images.shape) + images.tobytes()),
        (f"{part}-labels-idx1-ubyte", struct.pack(">2I", 2049, len(labels)) + labels.tobytes()),
    ):
        path = folder / (f"{name}.gz" if pack else name)
        path.write_bytes(gzip.compress(content) if pack else content)
    return images


def test_digits_have_a_fixed_split():
    data, other = open_dataset("digits"), open_dataset("digits", seed=5, validation_split=0.3)
    assert (len(data.train), len(data.validation), len(data.test)) == (1437, 180, 180)
    assert data.image_shape == (8, 8, 1) and data.num_classes == 10
    np.testing.assert_array_equal(data.train.images, other.train.images)
    images, labels = data.train.batch(np.arange(5))
    assert images.dtype == np.uint8 and images.max() == 255 and labels.dtype == np.int32
    assert isinstance(data.train, ImageSource)
    pixels = data.train.images / 255
    assert data.mean == pytest.approx((pixels.mean(),))
    assert data.std == pytest.approx((pixels.std(),))


@pytest.mark.needs("sklearn")
def test_digits_are_those_of_scikit_learn():
    # `load_digits` reads this file; the import of scikit-learn takes seconds.
    (folder,) = find_spec("sklearn").submodule_search_locations
    theirs = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    with np.load(datasets.DIGITS) as file:
        np.testing.assert_array_equal(file["pixels"], theirs[:, :-1].reshape(-1, 8, 8))
        np.testing.assert_array_equal(file["labels"], theirs[:, -1])


def test_synthetic_depends_on_the_number_of_a_picture_alone():
    data = open_dataset("synthetic:40", image_size=(5, 7), seed=2)
    assert data.image_shape == (5, 7, 3) and len(data.train) == 40 and len(data.test) == 4
    images, labels = data.train.batch(np.array([7, 3]))
    np.testing.assert_array_equal(images[1], data.train.batch(np.array([3]))[0][0])
    assert set(data.train.labels) <= set(range(10)) and len(set(data.train.labels)) > 5
    # Golden values: the same on every backend, machine and version of NumPy.
    assert images[1, 0, 0].tolist() == [23, 192, 8]
    assert labels.tolist() == [0, 3]
    assert (data.test.batch(np.array([0]))[0] != data.train.batch(np.array([0]))[0]).any()


@pytest.mark.parametrize("pack", [True, False])
def test_idx_keeps_the_test_part_and_splits_the_training_part(tmp_path, pack):
    images = write_idx(tmp_path, "train", pack=pack)
    test = write_idx(tmp_path, "t10k", count=8, pack=pack)
    data = open_dataset(f"idx:{tmp_path}", seed=1)
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 8)
    np.testing.assert_array_equal(data.test.images[..., 0], test)
    both = np.concatenate([data.train.images, data.validation.images])[..., 0]
    assert sorted(map(bytes, both)) == sorted(map(bytes, images))
    assert data.class_names == ["0", "1", "2", "3"]
    assert open_dataset(f"idx:{tmp_path}", validation_split=0.0).validation is None
    fashion = tmp_path / "fashion-mnist"
    fashion.mkdir()
    write_idx(fashion, "train", labels=np.arange(20, dtype="uint8") % 10)
    data = open_dataset(f"idx:{fashion}")
    assert data.class_names[9] == "Ankle boot" and len(data.test) == 2


IMAGES, NAMES = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def spoiled(name, change, pack=False):
    """Writes the training part, and one of its files once more, changed."""

    def write(folder):
        write_idx(folder, "train", pack=pack)
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (spoiled(IMAGES, lambda x: b"\0\0\x08\x01" + x[4:]), "starts with 2049, not 2051"),
        (spoiled(IMAGES, lambda x: x[:-7]), r"promises \[20, 6, 6\] values but holds 713"),
        (spoiled(IMAGES, lambda x: b"\0\0"), "too short for an IDX file"),
        (spoiled(f"{NAMES}.gz", lambda x: x[:-9], pack=True), "cannot be unpacked"),
        (lambda f: (write_idx(f, "train"), (f / NAMES).unlink()), f"has no {NAMES} file"),
        (lambda f: write_idx(f, "train", labels=np.zeros(3, "uint8")), r"20 images .* 3 labels"),
        (lambda f: write_idx(f, "train", count=0), r"holds no images"),
        (lambda f: None, r"has no train-images-idx3-ubyte"),
        (
            lambda f: (write_idx(f, "train"), write_idx(f, "t10k", labels=np.full(20, 9, "uint8"))),
            r"label 9 is outside 0\.\.3",
        ),
        (
            lambda f: (write_idx(f, "train"), write_idx(f, "t10k", size=4)),
            r"test images are \(4, 4\)",
        ),
    ],
)
def test_idx_errors(tmp_path, damage, message):
    damage(tmp_path)
    refused(message, open_dataset, f"idx:{tmp_path}")


PIXELS = np.arange(12 * 16, dtype="uint8").reshape(12, 4, 4)
LABELS = np.arange(12) % 3


def test_npz_with_all_parts(tmp_path):
    path = tmp_path / "data.npz"
    wide = np.repeat(PIXELS[..., None], 3, axis=-1)
    images = {"x_train": wide, "x_test": wide[:5], "x_val": wide[:4]}
    labels = {"y_train": LABELS[:, None], "y_test": LABELS[:5], "y_val": LABELS[:4]}
    np.savez(path, **images, **labels)
    data = open_dataset(f"npz:{path}", image_size=(8, 8))
    assert (len(data.train), len(data.validation), len(data.test)) == (12, 4, 5)
    assert data.image_shape == (8, 8, 3) and data.train.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    "images", [PIXELS / 255, PIXELS.astype("float64"), PIXELS.astype("uint16") * 257]
)
def test_npz_scales_to_bytes(tmp_path, images):
    path = tmp_path / "data.npz"
    np.savez(path, x=images, y=np.eye(3)[LABELS])
    data = open_dataset(f"npz:{path}")
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 1, 1)
    images = np.concatenate([part.images for part in (data.train, data.validation, data.test)])
    assert sorted(images[:, 0, 0, 0].round()) == sorted(PIXELS[:, 0, 0])
    assert data.train.images.dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": PIXELS}, r"holds a; it needs x_train"),
        ({"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS}, r"lacks y_test"),
        ({"x": PIXELS, "y": LABELS[:5]}, r"x has 12 rows, y 5"),
        ({"x": PIXELS, "y": LABELS - 1}, r"label -1 is outside"),
        ({"x": PIXELS, "y": LABELS + 0.5}, r"fractions"),
        ({"x": PIXELS, "y": LABELS + 10**7}, r"label 10000002 is too large; number the classes"),
        ({"x": PIXELS, "y": np.stack([LABELS, LABELS], 1)}, r"\(12, 2\) and rows that are not one"),
        ({"x": PIXELS, "y": np.full((12, 3), 1 / 3)}, r"\(12, 3\) and rows that are not one-hot"),
        ({"x": PIXELS, "y": np.zeros((12, 3))}, r"\(12, 3\) and rows that are not one-hot; give"),
        ({"x": PIXELS[:0], "y": LABELS[:0]}, r"shape \(0, 4, 4, 1\)"),
        ({"x": PIXELS, "y": LABELS[:0]}, r"y has shape \(0,\)"),
        ({"x": PIXELS[:, None], "y": LABELS}, r"shape \(12, 1, 4, 4\)"),
        ({"x": PIXELS - 300.0, "y": LABELS}, r"runs from -300"),
        ({"x": PIXELS.astype(complex), "y": LABELS}, r"holds complex128"),
        ({"x": np.array([{}] * 3), "y": LABELS}, r"not a readable NumPy archive"),
        (
            {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS + 1},
            r"label 3 is outside 0\.\.2",
        ),
        (
            {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS[:, :2], "y_test": LABELS},
            r"images of test are \(2, 4, 1\)",
        ),
    ],
)
def test_npz_errors(tmp_path, arrays, message):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    refused(message, open_dataset, f"npz:{path}")


@pytest.mark.parametrize("names", [("x_test", "y_test"), ("x_valid", "y_valid"), ("names",)])
def test_arrays_that_are_not_read_are_named(tmp_path, names):
    np.savez(tmp_path / "data.npz", x=PIXELS, y=LABELS, **dict.fromkeys(names, PIXELS))
    with pytest.warns(UserWarning, match=f"has {', '.join(names)}, which kmodels does not read be"):
        open_dataset(f"npz:{tmp_path}/data.npz")


def test_npz_that_is_no_archive(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 nothing")
    np.save(tmp_path / "b.npy", PIXELS)
    refused("not a readable NumPy archive", open_dataset, f"npz:{tmp_path}/a.npz")
    refused("is a single array", open_dataset, f"npz:{tmp_path}/b.npy")
    refused("does not exist", open_dataset, f"npz:{tmp_path}/c.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": "cifar"}, r"'cifar' is unknown; give one of digits"),
        ({"spec": "digits:3"}, r"unknown"),
        ({"spec": "idx:"}, r"names no path"),
        ({"spec": "idx:/nowhere"}, r"/nowhere is not a folder"),
        ({"spec": "folder:/nowhere"}, r"/nowhere does not exist"),
        ({"spec": "synthetic:0"}, r"give synthetic:N"),
        ({"spec": "digits", "image_size": (0, 4)}, r"image_size is \(0, 4\)"),
        ({"spec": "digits", "validation_split": 0.5}, r"validation_split is 0.5"),
        ({"spec": "synthetic", "validation_split": -0.1}, r"validation_split is -0.1"),
    ],
)
def test_settings_errors(arguments, message):
    refused(message, open_dataset, **arguments)


IMAGES = np.zeros((4, 8, 9, 3), "uint8")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES, np.eye(4), r"labels have shape \(4, 4\) of float64; give the number of a class"),
        (IMAGES, np.zeros((4, 1)), r"labels have shape \(4, 1\)"),
        (IMAGES, list("abcd"), "labels have shape .* of <U1"),
        (IMAGES, [0, 0.5, 1, 2], "the data has class 0.5; give whole numbers"),
        (IMAGES, [0, 1], "4 images but 2 labels"),
        (IMAGES[..., 0], [0, 1, 2, 3], r"images are of shape \(4, 8, 9\); give an array"),
        (IMAGES.transpose(0, 3, 1, 2), [0, 1, 2, 3], r"images are of shape \(4, 3, 8, 9\)"),
        ([*IMAGES], [0, 1, 2, 3], "images are a list; give an array"),
    ],
)
def test_arrays_that_are_no_images_with_classes(images, labels, message):
    refused(message, ArraySource, images, labels)


@pytest.mark.parametrize("images", [IMAGES + np.float32(0.5), IMAGES + np.uint16(300)])
def test_arrays_in_another_range_are_named(images):
    with pytest.warns(UserWarning, match="read as values from 0 to 255"):
        ArraySource(images, np.arange(4))


PICTURES = ArraySource(IMAGES, np.arange(4))
ROWS = ({"token_ids": np.ones((4, 3), "int32")}, np.ones((4, 3), "int32"), np.ones((4, 3)))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            lambda: ImageLoader(PICTURES, 2),
            "shuffle seed augment drop_last batch_size workers worker_count",
        ),
        (lambda: ViewLoader(PICTURES, 2, [Augment()]), "views seed"),
        (lambda: MaskLoader(open_masks("scenes:20").train, 2), "flip crop scale distort"),
        (lambda: NaFlexLoader(PICTURES, 2), "patch_size rows min_num_patches batch_size"),
        (lambda: TextLoader(ROWS, 2), "rows batch_size shuffle seed weights count"),
        (lambda: RecordLoader(["a"], str, 2), "records preprocessor batch_size"),
    ],
    ids=["images", "views", "masks", "naflex", "texts", "records"],
)
def test_settings_of_a_loader_that_are_set_later_are_refused(make, names):
    loader = make()
    for name in names.split():
        message = f"{name} cannot be set later; make another {type(loader).__name__}"
        refused(message, setattr, loader, name, 1)
    loader.set_epoch(1)
    loader.own = loader.own_too = 1
    loader.own = 2


@pytest.mark.parametrize("size", [16, (16,), (0, 8), (8.5, 8), "ab", (8, np.inf), (8, 8, 3)])
@pytest.mark.parametrize(
    "make",
    [
        lambda **size: open_dataset("digits", **size),
        lambda **size: open_masks("scenes:20", **size),
        lambda **size: open_boxes("scenes:20", **size),
        lambda **size: ImageLoader(open_dataset("digits").train, 4, **size),
    ],
    ids=["images", "masks", "boxes", "loader"],
)
def test_sizes_of_images_are_two_whole_numbers(make, size):
    message = r"image_size is .*; give (\(height, width\), each at least 1|2 whole numbers)"
    refused(message, make, image_size=size)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(3, 300), share=st.floats(0, 0.3), seed=st.integers(0, 2**63))
def test_split_is_a_partition(n, share, seed):
    refused("2 samples are too few", split, 2, (0.1, 0.1), 0)
    parts = split(n, (share, share), seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    again = split(n, (share, share), seed)
    assert all(map(np.array_equal, parts, again))


def test_sources_import_no_framework():
    code = (
        "import sys, kmodels.data.images.datasets, kmodels.data.workers;"
        "import kmodels.data.images.batches;"
        "print([m for m in ('keras', 'jax', 'torch', 'tensorflow') if m in sys.modules])"
    )
    done = run_python("-c", code, PYTHONPATH=":".join(sys.path))
    assert done.stdout.strip() == "[]", done.stderr
