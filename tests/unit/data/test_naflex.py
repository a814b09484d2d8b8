"""Rows of patches from images of any aspect ratio."""

import pickle

import numpy as np

from kmodels.data import ArraySource, Augment, NaFlexLoader, Resizing
from kmodels.data.images.naflex import grid_of, mix, pairs_of, patches_of
from refusals import refused

PLAIN = Resizing()
SIDES = ((40, 90), (64, 64), (33, 20), (120, 31), (16, 200), (70, 75), (9, 9), (55, 100))


class Pictures:
    """Images of several sizes, each of one colour that its label is."""

    def __init__(self, count=24):
        self.labels = (np.arange(count) % 5).astype("int32")

    def __len__(self):
        return len(self.labels)

    def batch(self, indices):
        found = []
        for i in indices:
            draw = np.random.default_rng(int(i))
            found.append(draw.integers(0, 256, (*SIDES[i % len(SIDES)], 3), dtype="uint8"))
        return found, self.labels[indices]


def loader(**more):
    given = {"patch_size": 8, "row_length": 64, "max_num_patches": 48, "seed": 3, **more}
    return NaFlexLoader(Pictures(), 6, **given)


def cut(x):
    """The patches and the grid of each image of a batch, by row and place."""
    for row, grids in enumerate(x["spatial_shapes"]):
        at = 0
        for place, (rows, columns) in enumerate(grids.tolist()):
            if size := rows * columns:
                yield (row, place), x["pixel_values"][row, at : at + size], (rows, columns)
                at += size
        assert not x["pixel_values"][row, at:].any()


def test_a_batch_holds_its_images():
    data = loader(resizing=PLAIN)
    x, labels, weights = data[1]
    assert x["pixel_values"].shape == (data.batch_size, 64, 192)
    assert labels.shape == weights.shape == x["spatial_shapes"].shape[:2]
    np.testing.assert_allclose(weights.mean(), 1.0, rtol=1e-6)
    expected = {}
    pictures, wanted = Pictures().batch(np.arange(6, 12))
    for picture, label in zip(pictures, wanted, strict=True):
        grid = grid_of(*picture.shape[:2], 8, 48, enlarge=False)
        image = PLAIN(picture, (grid[0] * 8, grid[1] * 8)).astype("float32")
        expected[grid, int(label)] = patches_of((image / 255 - 0.5) / 0.5, 8)
    found = list(cut(x))
    assert len(found) == 6 and (weights > 0).sum() == 6
    for place, patches, grid in found:
        np.testing.assert_allclose(patches, expected[grid, int(labels[place])], atol=1e-5)


def test_epochs_states_and_workers():
    data = loader(shuffle=True, augment=Augment(flip=True, random_resized_crop=(0.3, 1.0)))
    first = [data[i] for i in range(len(data))]
    state = data.state_dict()
    assert state == {"epoch": 0, "batch": 4} and data.samples == 24 and len(data) == 4
    again = pickle.loads(pickle.dumps(loader(shuffle=True, augment=data.maker.augment)))
    again.load_state_dict({"epoch": 0, "batch": 2})
    assert len(again) == 2
    same(again[0], first[2])
    data.on_epoch_end()
    pixels = first[0][0]["pixel_values"]
    assert data.epoch == 1 and not np.array_equal(data[0][0]["pixel_values"], pixels)
    part = loader(shuffle=True, augment=data.maker.augment).part(1, 2)
    np.testing.assert_array_equal(part[0][0]["pixel_values"], pixels[1:2])
    shuffled = sorted(g for x, *_ in first for _, _, g in cut(x))
    assert len(shuffled) == 24 and len(set(shuffled)) > 8


def test_workers_make_the_same_batches():
    images = np.random.default_rng(1).integers(0, 256, (8, 20, 44, 3), dtype="uint8")
    source = ArraySource(images, np.arange(8))
    made = [NaFlexLoader(source, 4, patch_size=8, row_length=32, workers=n) for n in (0, 1)]
    for i in range(2):
        same(made[0][i], made[1][i])
    made[1].close()


def same(one, other):
    for name in one[0]:
        np.testing.assert_array_equal(one[0][name], other[0][name])
    for a, b in zip(one[1:], other[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_large_batches_get_fewer_patches_and_lengths_are_drawn():
    tight = loader(rows=2, images_per_row=6)
    sizes = [sum(len(p) for _, p, _ in cut(tight[i][0])) for i in range(4)]
    assert max(sizes) <= 128 and min(sizes) > 64
    free = [len(p) for i in range(4) for _, p, _ in cut(loader(enlarge=True)[i][0])]
    some = loader(enlarge=True, min_num_patches=9)
    drawn = [len(p) for i in range(4) for _, p, _ in cut(some[i][0])]
    assert min(free) > 30 and min(drawn) < 20 < max(drawn) <= 48


def test_crops_keep_the_aspect_ratio_of_their_image():
    data = loader(augment=Augment(random_resized_crop=(0.2, 1.0)), patch_size=1, max_num_patches=64)
    sides = 40 * np.array(SIDES)  # a crop has whole pixels
    boxes = [data.maker._boxes([tuple(side)] * 200, 0, np.arange(200)) for side in sides]
    left, top, right, bottom = np.moveaxis(boxes, -1, 0)
    height, width = sides.T[..., None]
    ratio = (right - left) / (bottom - top) / (width / height)
    assert ratio.min() > 0.74 and ratio.max() < 1.34
    area = (right - left) * (bottom - top) / (width * height)
    assert np.min(boxes) >= 0 and area.min() > 0.19


def test_mixing_takes_the_common_middle():
    sides = enumerate([(8, 4), (6, 6), (2, 8)])
    images = [np.full((h, w, 1), float(i), "float32") for i, (h, w) in sides]
    labels, samples = np.eye(3, dtype="float32"), np.arange(3)
    assert pairs_of([x.shape[:2] for x in images]) == [(0, 1)]
    mixed, targets = mix(images, labels, Augment(mixup=1.0, num_classes=3), 1, 0, samples)
    assert [x.shape for x in mixed] == [x.shape for x in images]
    np.testing.assert_array_equal(mixed[2], images[2])
    for i, other in ((0, 1), (1, 0)):
        # A label's share is that of the pixels, whose colour is the number of their image.
        np.testing.assert_allclose(targets[i] @ [0, 1, 2], mixed[i].mean(), rtol=1e-5)
        assert 0 < targets[i, other] < 1
    assert (mixed[0][0] == 0).all() and (mixed[0][1:7] > 0).all()  # 6 of 8 rows are common
    mixed, targets = mix(images, labels, Augment(cutmix=1.0, num_classes=3), 4, 0, samples)
    for i in (0, 1):
        assert set(np.unique(mixed[i])) == {0.0, 1.0}
        np.testing.assert_allclose(targets[i, 1 - i], np.mean(mixed[i] != i), rtol=1e-5)
    data = loader(augment=Augment(mixup=0.4, cutmix=0.4, num_classes=5))
    _, labels, weights = data[0]
    assert labels.shape[-1] == 5
    np.testing.assert_allclose(labels.sum(-1), weights > 0, atol=1e-6)


def test_messages():
    refused("min_num_patches is 99, max_num_patches 48", loader, min_num_patches=99)
    refused("1 rows of 2 images hold no batch of 6", loader, rows=1, images_per_row=2)
    refused("rows is 0", loader, rows=0)
    refused("the data is empty", NaFlexLoader, Pictures(0), 2)
    refused("drop_last leaves nothing of 24", NaFlexLoader, Pictures(), 25, drop_last=True)
    short = loader(rows=1, images_per_row=6, row_length=5, max_num_patches=5)
    refused("6 images do not fit into 1 rows of 5 patches and 6", short.__getitem__, 0)
