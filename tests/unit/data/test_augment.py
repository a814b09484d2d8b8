"""Order and augmentation: pure functions of seed, epoch and sample."""

import colorsys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmodels.data import ArraySource, Augment, ImageLoader, order
from kmodels.data.images.augment import (
    OPERATIONS,
    big_vision_augment,
    photometric_distortion,
    rand_augment,
    three_augment,
)
from kmodels.data.images.batches import BatchMaker
from kmodels.data.rng import symmetric_beta, uniforms
from refusals import refused

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (13, 10, 8, 3), dtype="uint8")
LABELS = np.arange(13) % 4
MIXES = {"mixup": 0.4, "cutmix": 1.0, "num_classes": 4}
ALL = Augment(flip=True, crop_padding=2, rand_augment=(2, 9), erasing=0.5, **MIXES)


class Listed(ArraySource):
    """Pictures that differ in size."""

    def batch(self, indices):
        return [self.images[i][: 10 - i % 3] for i in indices], self.labels[indices]


def maker(augment=None, batch_size=4, source=None, **settings):
    defaults = {
        "shuffle": True, "seed": 3, "preprocess": None, "drop_last": False, "image_size": None,
        "channels": None, "mean": (0.5,), "std": (0.25,),
        "one_hot": augment.num_classes if augment is not None and augment.mixes else None,
    }  # fmt: skip
    source = ArraySource(IMAGES, LABELS) if source is None else source
    return BatchMaker(source=source, batch_size=batch_size, augment=augment, **defaults | settings)


def epoch_of(batches, epoch=0):
    parts = [batches.make(epoch, number) for number in range(batches.batches)]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 400), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_order_is_a_pure_permutation(n, seed, epoch):
    drawn = order(n, seed, epoch)
    np.testing.assert_array_equal(np.sort(drawn), np.arange(n))
    np.testing.assert_array_equal(drawn, order(n, seed, epoch))
    if n > 20:
        assert (drawn != order(n, seed, epoch + 1)).any()
        assert (drawn != order(n, seed + 1, epoch)).any()


@settings(max_examples=30, deadline=None)
@given(keys=st.lists(st.integers(0, 2**40), min_size=1, max_size=9), count=st.integers(1, 9))
def test_numbers_of_a_key_do_not_depend_on_the_other_keys(keys, count):
    together = uniforms(1, "crop", 2, np.array(keys), count)
    alone = [uniforms(1, "crop", 2, np.array([key]), count)[0] for key in keys]
    np.testing.assert_array_equal(together, alone)
    assert ((together >= 0) & (together < 1)).all()


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_beta_has_its_moments(alpha):
    drawn = symmetric_beta((np.arange(20000) + 0.5) / 20000, alpha)
    assert drawn.mean() == pytest.approx(0.5, abs=2e-3)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=5e-3)
    assert (np.diff(drawn) >= 0).all() and drawn.min() >= 0 and drawn.max() <= 1


def test_epochs_differ_and_repeat_whatever_the_batch_size():
    first, second = epoch_of(maker(ALL), 0), epoch_of(maker(ALL), 1)
    assert (first[0] != second[0]).any()
    np.testing.assert_array_equal(first[0], epoch_of(maker(ALL), 0)[0])
    for batch_size in (1, 2, 3, 5, 13, 20):
        images, labels = epoch_of(maker(ALL, batch_size), 1)
        np.testing.assert_array_equal(images, second[0])
        np.testing.assert_array_equal(labels, second[1])


def test_padded_crops_and_flips_are_windows_of_the_picture():
    batches = maker(Augment(flip=True, crop_padding=2), 13, mean=(0.0,), std=(1 / 255,))
    images, labels = batches.make(0, 0)
    seen = set()
    for image, sample in zip(images, batches.order(0), strict=True):
        padded = np.pad(IMAGES[sample], ((2, 2), (2, 2), (0, 0)))
        windows = {
            (down, right, flip): padded[down : down + 10, right : right + 8][:, ::flip]
            for down in range(5)
            for right in range(5)
            for flip in (1, -1)
        }
        seen |= {key for key, window in windows.items() if np.allclose(window, image)}
    assert len(seen) >= 10 and {flip for *_, flip in seen} == {1, -1}
    assert labels.tolist() == LABELS[batches.order(0)].tolist()


def test_random_resized_crop():
    augment, listed = Augment(random_resized_crop=(0.3, 1.0)), Listed(IMAGES, LABELS)
    batches = maker(augment, 13, listed, image_size=(6, 7))
    assert batches.make(0, 0)[0].shape == (13, 6, 7, 3)
    augment, shapes = Augment(random_resized_crop=(0.3, 0.6)), np.tile([40, 60], (500, 1))
    left, top, right, bottom = augment.boxes(shapes, 0, 0, np.arange(500)).T
    area = (right - left) * (bottom - top) / 2400
    assert area.min() > 0.29 and area.max() < 0.61 and area.std() > 0.05
    assert min(left.min(), top.min()) >= 0 and right.max() <= 60 and bottom.max() <= 40


def test_erasing_leaves_the_mean():
    plain, erased = (maker(a, 13).make(0, 0)[0] for a in (None, Augment(erasing=1.0)))
    changed = (plain != erased).any(-1)
    assert changed.any((1, 2)).all() and (erased[changed] == 0).all()
    for one in changed:  # a rectangle
        assert one.sum() == one.any(0).sum() * one.any(1).sum()
    untouched = maker(Augment(erasing=1e-9), 13).make(0, 0)[0]
    np.testing.assert_array_equal(plain, untouched)


def test_mixup_mixes_labels_as_pictures():
    augment = Augment(mixup=1.0, num_classes=4)
    images, labels = maker(augment, 13).make(0, 0)
    plain, whole = maker(one_hot=4, batch_size=13).make(0, 0)
    for a in range(0, 12, 2):
        (i, j), (s, t) = plain[a : a + 2], whole[a : a + 2]
        kept = np.linalg.lstsq((i - j).reshape(-1, 1), (images[a] - j).ravel(), rcond=None)[0][0]
        np.testing.assert_allclose(images[a], kept * i + (1 - kept) * j, atol=1e-5)
        np.testing.assert_allclose(images[a + 1], kept * j + (1 - kept) * i, atol=1e-5)
        np.testing.assert_allclose(labels[a], kept * s + (1 - kept) * t, atol=1e-5)
    np.testing.assert_array_equal(images[12], plain[12])
    np.testing.assert_allclose(labels.sum(1), 1.0, rtol=1e-6)


def test_cutmix_mixes_labels_by_area():
    images, labels = maker(Augment(cutmix=1.0, num_classes=4), 13).make(0, 0)
    plain, whole = maker(one_hot=4, batch_size=13).make(0, 0)
    partner = np.r_[np.arange(12) ^ 1, 12]
    from_other = (images == plain[partner]).all(-1) & (partner != np.arange(13))[:, None, None]
    assert ((images == plain).all(-1) | from_other).all()
    share = from_other.mean((1, 2))[:, None]
    np.testing.assert_allclose(labels, whole * (1 - share) + whole[partner] * share, atol=1e-6)
    assert share[:12].std() > 0.05


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_each_operation_keeps_shape_and_type(number):
    for channels in (1, 3):
        images = IMAGES[..., :channels]
        drawn = np.tile([(number + 0.5) / len(OPERATIONS), 0.0, 0.0], (13, 1, 1))
        fill = np.zeros(channels, "uint8")
        done = rand_augment(images, drawn, 9.0, fill)
        assert done.shape == images.shape and done.dtype == np.uint8
        drawn[..., 2] = 0.5  # not applied
        np.testing.assert_array_equal(rand_augment(images, drawn, 9.0, fill), images)
        unchanged = OPERATIONS[number].__name__ in ("_color", "_equalize")
        assert unchanged or (done != images).any()


def test_operations_do_as_pillow():
    from PIL import Image, ImageOps

    by_name = {operation.__name__: operation for operation in OPERATIONS}
    one, fill = np.ones(13), np.zeros(3, "uint8")
    for name, reference in (
        ("_autocontrast", ImageOps.autocontrast),
        ("_equalize", ImageOps.equalize),
        ("_invert", ImageOps.invert),
        ("_solarize", lambda image: ImageOps.solarize(image, 128)),
        ("_posterize", lambda image: ImageOps.posterize(image, 2)),
    ):
        done = by_name[name](IMAGES, 0.5, one, fill)
        for image, wanted in zip(done, IMAGES, strict=True):
            np.testing.assert_array_equal(image, reference(Image.fromarray(wanted)))
    padded = np.pad(IMAGES, ((0, 0), (0, 0), (1, 1), (0, 0)))
    turned = by_name["_rotate"](padded, 3.0, one, fill)
    before, after = (sorted(map(tuple, x[0].reshape(-1, 3))) for x in (padded, turned))
    assert after == before


def test_three_augment_does_as_pillow():
    """Each of the three, then brightness, contrast and saturation in each of their orders."""
    from itertools import permutations

    from PIL import Image, ImageEnhance, ImageFilter, ImageOps

    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for number, (order_of, factors) in enumerate(
        zip(permutations(range(3)), RNG.uniform(0.7, 1.3, (6, 3)), strict=True)
    ):
        jitter = [(number + 0.5) / 6, *((factors - 0.7) / 0.6)]
        for which in range(3):
            drawn = np.tile([(which + 0.5) / 3, 0.5, *jitter], (13, 1))
            # Pillow's blur is an approximation by boxes, which is poor for single pixels.
            images = np.kron(IMAGES, np.ones((1, 4, 4, 1), "uint8")) if which == 2 else IMAGES
            for image, start in zip(three_augment(images, drawn, 0.3), images, strict=True):
                wanted = Image.fromarray(start)
                if which == 0:
                    wanted = wanted.convert("L").convert("RGB")
                elif which == 1:
                    wanted = ImageOps.solarize(wanted)
                else:
                    wanted = wanted.filter(ImageFilter.GaussianBlur(1.05))
                for place in order_of:
                    wanted = kinds[place](wanted).enhance(factors[place])
                gap = np.abs(np.asarray(wanted, "int32") - image)
                assert gap.max() <= (12 if which == 2 else 1)
    apart = three_augment(IMAGES, uniforms(0, "x", 0, np.arange(13), 6), 0.0)
    assert apart.shape == IMAGES.shape and (apart != IMAGES).any((1, 2, 3)).all()


def test_photometric_distortion_turns_brightness_contrast_saturation_and_hue():
    """Beside colorsys, one after the other; each value is cut to whole numbers in between."""
    image = np.random.default_rng(0).integers(0, 256, (6, 7, 3)).astype("uint8")
    off = np.full(9, 0.9)

    def on(**drawn):
        numbers = off.copy()
        for name, value in drawn.items():
            numbers[int(name[1:])] = value
        return photometric_distortion(image, numbers)

    np.testing.assert_array_equal(photometric_distortion(image, off), image)
    brighter = np.clip(image + (64 * 0.75 - 32), 0, 255).astype("uint8")
    np.testing.assert_array_equal(on(_0=0.1, _1=0.75), brighter)
    np.testing.assert_array_equal(on(_2=0.1, _3=0.25), (image * 0.75).astype("uint8"))
    gray = (image @ np.array([0.2989, 0.587, 0.114])).astype("uint8")[..., None]
    wanted = np.clip(1.3 * image - 0.3 * gray, 0, 255).astype("uint8")
    assert np.abs(on(_4=0.1, _5=0.8).astype(int) - wanted).max() <= 1
    turned = [
        colorsys.hsv_to_rgb((hue + 0.2) % 1, saturation, value)
        for hue, saturation, value in (colorsys.rgb_to_hsv(*x) for x in image.reshape(-1, 3) / 255)
    ]
    found = on(_6=0.1, _7=0.7).reshape(-1, 3)
    assert (
        np.abs(found - np.array(turned) * 255).max() <= 1 and (found != image.reshape(-1, 3)).any()
    )
    # Contrast comes before or after saturation, which shows where values are cut.
    late, early = (on(_2=0.1, _3=0.9, _4=0.1, _5=0.8, _8=last) for last in (0.9, 0.1))
    np.testing.assert_array_equal(
        late, np.clip(on(_4=0.1, _5=0.8) * np.float32(1.4), 0, 255).astype("uint8")
    )
    image = np.clip(image * np.float32(1.4), 0, 255).astype("uint8")
    np.testing.assert_array_equal(early, on(_4=0.1, _5=0.8))
    assert (late != early).any()
    one = np.random.default_rng(1).integers(0, 256, (5, 5, 1)).astype("uint8")
    np.testing.assert_array_equal(photometric_distortion(one, np.full(9, 0.3)).shape, one.shape)


def test_operations_of_big_vision():
    from PIL import Image, ImageEnhance, ImageOps

    pillow = {
        0: ImageOps.autocontrast, 1: ImageOps.equalize, 2: ImageOps.invert,
        4: lambda x: ImageOps.posterize(x, 2), 5: lambda x: ImageOps.solarize(x, 128),
        6: lambda x: ImageEnhance.Color(x).enhance(1.0),
        8: lambda x: ImageEnhance.Brightness(x).enhance(1.0),
        9: lambda x: ImageEnhance.Sharpness(x).enhance(1.0),
    }  # fmt: skip
    plain = {
        # A gray of the number of pixels / 256 and twice the distance from it.
        7: lambda x: np.clip(np.trunc(0 + (x - 0.0) * 1.0), 0, 255),
        # All of an image that is small for it is Cutout's, or moves out of sight.
        12: lambda x: np.full_like(x, 128), 13: lambda x: np.full_like(x, 128),
        14: lambda x: np.full_like(x, 128),
        15: lambda x: np.where(x < 128, np.minimum(x.astype(int) + 55, 255), x),
    }  # fmt: skip
    for number in range(16):
        drawn = np.tile([(number + 0.5) / 16, 0.9, 0.5, 0.5], (13, 1, 1))
        done = big_vision_augment(IMAGES, drawn, 5.0)
        for image, start in zip(done, IMAGES, strict=True):
            if number in pillow:
                # A factor of 0.1 + 1.8 / 2 leaves an image as it is.
                np.testing.assert_array_equal(image, pillow[number](Image.fromarray(start)))
            elif number in plain:
                np.testing.assert_array_equal(image, plain[number](start))
            else:
                assert image.shape == start.shape and (image != start).any()
    half = np.tile([14.5 / 16, 0.0, 0.0, 0.0], (1, 1, 1))
    cut = big_vision_augment(np.zeros((1, 100, 90, 3), "uint8"), half, 10.0)[0, :, :, 0]
    assert (cut == 128).sum() == 40 * 40 and (cut[:40, :40] == 128).all()


def test_magnitudes_noise_and_repeats():
    settings = {"mean": (0.0,), "std": (1.0,), "batch_size": 13}
    still, moving = (
        maker(Augment(rand_augment=(1, 5, *more)), **settings).make(0, 0)[0] for more in ((), (2,))
    )
    assert (still != moving).any()
    np.testing.assert_array_equal(
        maker(Augment(rand_augment=(1, 5, 0)), **settings).make(0, 0)[0], still
    )
    big, black = Listed(np.zeros((400, 64, 64, 3), "uint8"), np.zeros(400, int)), {"std": (1.0,)}
    loader = maker(
        Augment(erasing=1.0, erasing_noise=True), 400, big, image_size=(64, 64), mean=(0,), **black
    )
    noise = loader.make(0, 0)[0]
    noise = noise[noise != 0]
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    assert abs(np.mean(noise**4) - 3) < 0.1
    numbers = ArraySource(np.zeros((200, 2, 2, 3), "uint8"), np.arange(200))
    repeated = maker(None, 200, numbers, repeats=3)
    _, labels = repeated.make(0, 0)
    which, counts = np.unique(labels, return_counts=True)
    assert len(which) == 72 and counts.max() == 3  # 64 images three times, then 8 of the next
    assert (labels[::2] != labels[1::2]).all()
    drawn = repeated.order(0)
    assert len(np.unique(drawn)) == 200 and (drawn % 200 == labels).all()
    flipped = maker(Augment(flip=True), 200, ArraySource(IMAGES[:1].repeat(200, 0), np.arange(200)),
                    repeats=3).make(0, 0)[0]  # fmt: skip
    copies = flipped[labels == labels[0]]
    assert len(copies) == 3 and len(flipped) == 200


def test_what_comes_from_outside_has_the_mean_colour():
    """Which is zero after normalisation, as what random erasing leaves."""
    settings = {"mean": (0.2, 0.4, 0.6), "batch_size": 13}
    images, _ = maker(Augment(rand_augment=(8, 10)), **settings).make(0, 0)
    corners = images[:, [0, 0, -1, -1], [0, -1, 0, -1]].reshape(-1, 3)
    assert (np.abs(corners) < 1e-6).all(1).any()
    refused("mean has 2", maker(Augment(rand_augment=(1, 1)), mean=(0.1, 0.2)).make, 0, 0)


def loader(**settings):
    return ImageLoader(ArraySource(IMAGES, LABELS), 4, **settings)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Augment, {"crop_padding": -1}, "crop_padding is -1"),
        (Augment, {"crop_padding": 1, "random_resized_crop": (0.5, 1.0)}, "choose one"),
        (Augment, {"random_resized_crop": (0.0, 1.0)}, "shares of the area"),
        (Augment, {"rand_augment": (0, 9)}, "n >= 1"),
        (Augment, {"rand_augment": (10**9, 9)}, "100 >= n >= 1"),
        (Augment, {"rand_augment": (2, 11)}, "0 <= m <= 10"),
        (loader, {"augment": {"flip": True}}, "augment is {'flip': True}; give an Augment, or"),
        (loader, {"resizing": "stretch"}, "resizing is 'stretch'; give a Resizing"),
        (Augment, {"rand_augment": (2, 9, -1)}, "deviation d >= 0"),
        (Augment, {"rand_augment": (2, 9, 1), "rand_augment_kind": "big_vision"}, "no deviation"),
        (Augment, {"rand_augment_kind": "other"}, "give timm or big_vision"),
        (Augment, {"three_augment": 2.0}, "three_augment is 2.0; give a number from 0 to 1"),
        (maker, {"repeats": 0}, "repeats is 0"),
        (Augment, {"erasing": 1.5}, "erasing is 1.5"),
        (Augment, {"erasing_noise": True}, "no effect without erasing"),
        (Augment, {"rand_augment_kind": "big_vision"}, "no effect without rand_augment"),
        (Augment, {"mixup": -1.0}, "mixup is -1.0"),
        (Augment, {"cutmix": 1.0}, "set num_classes"),
        (maker, {"batch_size": 0}, "batch_size is 0"),
        (maker, {"batch_size": 14, "drop_last": True}, "drop_last leaves nothing of 13"),
        (maker, {"std": (0.0,)}, r"std is \(0.0,\)"),
        (maker, {"std": (np.nan,)}, r"std is \(nan,\); give numbers above 0"),
        (maker, {"mean": (np.nan, 0.0)}, r"mean is \(nan, 0.0\); give finite numbers"),
        (maker, {"one_hot": 3}, r"label 3 is outside 0\.\.2"),
        (maker, {"one_hot": 0}, "one_hot is 0; give at least 1"),
        (maker, {"channels": 0}, "channels is 0; give at least 1"),
        (maker, {"source": IMAGES}, r"source is a ndarray; give .* ArraySource\(images, labels\)"),
        (
            loader,
            {"augment": ALL, "one_hot": 5},
            "one_hot is 5 and num_classes of augment 4; leave",
        ),
        (maker, {"source": ArraySource(IMAGES[:0], LABELS[:0])}, "the data is empty"),
    ],
)
def test_wrong_settings(make, settings, message):
    refused(message, make, **settings)


def test_normalisation_resizing_and_channels():
    batches = maker(shuffle=False, image_size=(5, 4), channels=1, mean=(0.5,), std=(0.2,))
    images, labels = batches.make(0, 0)
    assert images.shape == (4, 5, 4, 1) and images.dtype == np.float32 and labels.dtype == np.int32
    images, _ = maker(shuffle=False, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0)).make(0, 0)
    wanted = (IMAGES[:4] / 255 - [0.1, 0.2, 0.3]) / [0.5, 1.0, 2.0]
    np.testing.assert_allclose(images, wanted, atol=1e-6)
    refused("mean has 2", maker(mean=(0.1, 0.2)).make, 0, 0)
    raw, _ = maker(preprocess=lambda pixels: pixels / 2, shuffle=False).make(0, 0)
    np.testing.assert_allclose(raw, IMAGES[:4] / 2)


def test_pictures_of_different_size_need_image_size():
    listed = Listed(IMAGES, LABELS)
    refused("images differ in size; give image_size", maker(source=listed).make, 0, 0)
