"""Images with masks: made scenes, files, and batches that cut and mirror both alike."""

import numpy as np
import pytest
from PIL import ExifTags, Image

from kmodels.data import BoxLoader, MaskArrays, MaskLoader, Resizing, made_scenes, open_masks
from kmodels.data.images import decoding
from refusals import refused


def test_scenes_are_a_function_of_the_seed():
    images, masks = made_scenes(30, (24, 32), seed=2)
    again = made_scenes(30, (24, 32), seed=2)
    np.testing.assert_array_equal(images, again[0])
    np.testing.assert_array_equal(masks, again[1])
    assert images.shape == (30, 24, 32, 3) and set(np.unique(masks)) == set(range(5))
    assert not np.array_equal(made_scenes(30, (24, 32), seed=3)[0], images)
    data = open_masks("scenes:30", image_size=(24, 32), seed=2)
    assert [len(data.train), len(data.validation), len(data.test)] == [24, 3, 3]
    assert data.class_names[0] == "background" and data.image_shape == (24, 32, 3)
    assert len(data.mean) == 3


def test_images_and_masks_are_cut_and_mirrored_alike():
    """Images that show their masks: what the loader gives of one is what it gives of the other."""
    masks = np.random.default_rng(0).integers(0, 200, (9, 12, 16)).astype("uint8")
    images = np.repeat(masks[..., None], 3, -1)
    nearest = Resizing("nearest")
    source = MaskArrays(images, masks)
    options = {"shuffle": True, "seed": 1, "resizing": nearest, "image_size": (8, 8)}
    loader = MaskLoader(source, 4, flip=True, crop=0.3, **options)
    assert len(loader) == 3 and loader[2][1].shape == (1, 8, 8)
    seen = []
    for i in range(3):
        x, y = loader[i]
        assert x.dtype == "float32" and y.dtype == "int32"
        np.testing.assert_array_equal(np.rint(x[..., 0] * 255), y)
        seen.append(y)
    loader.set_epoch(1)
    assert not np.array_equal(loader[0][1], seen[0])
    loader.set_epoch(0, 1)
    np.testing.assert_array_equal(loader[0][1], seen[1])
    np.testing.assert_array_equal(loader.part(1, 3)[0][1], seen[1][1:3])
    plain, mirrored = (MaskLoader(source, 9, flip=flip) for flip in (False, True))
    plain, mirrored = plain[0][1], mirrored[0][1]
    same = (plain == mirrored).all((1, 2))
    assert 0 < same.sum() < 9
    np.testing.assert_array_equal(plain[~same], mirrored[~same][:, :, ::-1])


def test_scaled_images_are_cropped_and_padded():
    """Images that show their masks; the rest has the mean colour and no label."""
    masks = np.kron(np.random.default_rng(0).integers(0, 200, (8, 6, 8)), np.ones((1, 2, 2), int))
    images = np.repeat(masks[..., None], 3, -1).astype("uint8")
    options = {"seed": 1, "resizing": Resizing("nearest"), "image_size": (8, 8)}
    loader = MaskLoader(
        MaskArrays(images, masks), 8, scale=(0.5, 2.0), flip=True, mean=0.4, **options
    )
    x, y = loader[0]
    outside = y == 255
    assert x.shape == (8, 8, 8, 3) and y.dtype == "int32"
    np.testing.assert_array_equal(x[outside], 0)
    np.testing.assert_array_equal(np.rint((x[..., 0] + 0.4) * 255)[~outside], y[~outside])
    # An image whose shorter side is below 8 is padded at the right or bottom alone.
    sides = [(~one).any(1).sum() for one in outside], [(~one).any(0).sum() for one in outside]
    assert 4 <= min(sides[0]) < 8 and max(sides[0]) == max(sides[1]) == 8
    for one, rows, columns in zip(outside, *sides, strict=True):
        assert not one[:rows, :columns].any()
    again = MaskLoader(
        MaskArrays(images, masks), 8, scale=(0.5, 2.0), flip=True, mean=0.4, **options
    )
    np.testing.assert_array_equal(again.part(3, 5)[0][1], y[3:5])
    # Twice the size and no more: crops differ, and no class has 3/4 of one that can have less.
    striped = np.tile((np.arange(16) % 8 > 6).astype(int), (4, 16, 1))
    images = np.zeros((4, 16, 16, 3), "uint8")
    half = MaskLoader(MaskArrays(images, striped), 4, scale=(2.0, 2.0), **options)
    assert (half[0][1] != 255).all()


def test_crops_avoid_a_class_that_fills_them():
    masks = np.ones((64, 32, 32), int)
    masks[:, :, 16:] = 2
    source = MaskArrays(np.zeros((64, 32, 32, 3), "uint8"), masks)
    loader = MaskLoader(source, 64, image_size=(8, 8), scale=(4.0, 4.0), seed=3)
    shares = [np.unique(one, return_counts=True)[1].max() / 64 for one in loader[0][1]]
    # One crop in five shows both, 11 tries miss with a probability of 0.09.
    assert np.mean(np.array(shares) < 0.75) > 0.6


def test_labels_are_reduced_as_by_transformers(tmp_path):
    images, masks = made_scenes(10, (12, 14), seed=0)
    masks[0, 0] = 255
    for kind, arrays in (("images", images), ("masks", masks)):
        (tmp_path / kind).mkdir()
        for number, pixels in enumerate(arrays):
            Image.fromarray(pixels).save(tmp_path / kind / f"{number}.png")
    data = open_masks(f"folder:{tmp_path}", validation_split=0.0, reduce_labels=True)
    found = np.stack(data.train.batch(np.arange(10))[1])
    plain = open_masks(f"folder:{tmp_path}", validation_split=0.0)
    wanted = np.stack(plain.train.batch(np.arange(10))[1]).astype("uint8")
    # As its image processors write it, on bytes.
    wanted[wanted == 0] = 255
    wanted -= 1
    wanted[wanted == 254] = 255
    np.testing.assert_array_equal(found, wanted)
    assert (data.num_classes, plain.num_classes) == (4, 5) and (found == 255).sum() > 14


def test_ade20k_is_read_as_it_is(tmp_path):
    images, masks = made_scenes(10, (12, 14), seed=0)
    for part, numbers in (("training", range(7)), ("validation", range(7, 10))):
        for kind, arrays in (("images", images), ("annotations", masks)):
            (tmp_path / kind / part).mkdir(parents=True)
            for number in numbers:
                Image.fromarray(arrays[number]).save(tmp_path / kind / part / f"{number}.png")
    table = "Idx\tRatio\tTrain\tVal\tStuff\tName\n"
    rows = ("wall", "building, edifice", "sky", "floor, flooring")
    table += "".join(f"{i}\t0.1\t9\t1\t1\t{name}\n" for i, name in enumerate(rows, 1))
    (tmp_path / "objectInfo150.txt").write_text(table)
    data = open_masks(f"folder:{tmp_path}", reduce_labels=True)
    assert (len(data.train), len(data.validation), data.test) == (7, 3, None)
    assert data.class_names == ["wall", "building", "sky", "floor"]
    found = np.stack(data.validation.batch(np.arange(3))[1])
    np.testing.assert_array_equal(found, np.where(masks[7:] == 0, 255, masks[7:].astype(int) - 1))
    assert open_masks(f"folder:{tmp_path}").class_names[:2] == ["other", "wall"]
    (tmp_path / "annotations" / "validation" / "8.png").unlink()
    refused(r"validation has no PNG for 8\.png; add them", open_masks, f"folder:{tmp_path}")


def test_files(tmp_path):
    images, masks = made_scenes(10, (12, 14), seed=0)
    for part, chosen in (("train", range(8)), ("test", range(8, 10))):
        for i in chosen:
            for kind, pixels in (("images", images[i]), ("masks", masks[i])):
                folder = tmp_path / part / kind
                folder.mkdir(parents=True, exist_ok=True)
                picture = Image.fromarray(pixels)
                if kind == "masks" and i == 3:
                    picture.putpalette(list(range(255, 255 - 3 * 85, -1)))  # numbers, not colors
                picture.save(folder / f"{i}.png")
    data = open_masks(f"folder:{tmp_path}", validation_split=0.25)
    assert [len(data.train), len(data.validation), len(data.test)] == [6, 2, 2]
    assert data.class_names == list("01234") and data.image_shape == (12, 14, 3)
    found = [data.train, data.validation, data.test]
    shown = {mask.tobytes() for part in found for mask in part.batch(np.arange(len(part)))[1]}
    assert shown == {mask.astype("int32").tobytes() for mask in masks}
    (tmp_path / "classes.txt").write_text("ground\na\nb\nc\nd\n")
    assert open_masks(f"folder:{tmp_path}").class_names[0] == "ground"
    mask, rows = tmp_path / "train" / "masks" / "0.png", np.arange(8)
    train = open_masks(f"folder:{tmp_path}", validation_split=0.0).train
    Image.fromarray(images[0]).save(mask)
    refused(r"0\.png has 3 channels; give a PNG whose values are", train.batch, rows)
    Image.fromarray(masks[0][:5]).save(mask)
    refused("has 14x5 pixels and its image 14x12; give masks of the", train.batch, rows)
    mask.write_bytes(b"none")
    refused(r"0.png is not a PNG of a mask \(", train.batch, rows)
    mask.unlink()
    refused(r"has no PNG for 0\.png; add them", open_masks, f"folder:{tmp_path}")


def test_pixels_of_files_have_a_class_or_the_ignored_one(tmp_path):
    images, masks = made_scenes(10, (8, 8), seed=0)
    for kind, parts in (("images", images), ("masks", np.minimum(masks, 3))):
        (tmp_path / kind).mkdir()
        for i, pixels in enumerate(parts):
            Image.fromarray(pixels).save(tmp_path / kind / f"{i}.png")
    spec, wrong = f"folder:{tmp_path}", tmp_path / "masks" / "0.png"
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")

    def read(**settings):
        return open_masks(spec, validation_split=0.0, **settings).train.batch(np.arange(1))

    Image.fromarray(np.full((8, 8), 254, "uint8")).save(wrong)
    refused(r"0\.png: label 254 is outside 0\.\.3 and not 255; correct the labels or the", read)
    refused(r"0\.png: label 254 is outside 0\.\.3; correct the labels", read, ignore_class=None)
    assert (read(ignore_class=254)[1][0] == 254).all()
    (tmp_path / "classes.txt").unlink()
    assert open_masks(spec, ignore_class=254).class_names == list("0123")
    assert len(open_masks(spec).class_names) == 255
    (tmp_path / "images" / "0.png").unlink()
    with pytest.warns(UserWarning, match="masks: 1 masks have no image and are left out: 0.png"):
        open_masks(spec)
    for i in range(1, 10):
        Image.fromarray(np.full((8, 8), 255, "uint8")).save(tmp_path / "masks" / f"{i}.png")
    wrong.unlink()
    refused("has no labeled pixel; give masks whose values are", open_masks, spec)


def mask_folder(root, count=4):
    images, masks = made_scenes(count, (8, 8), seed=0)
    for kind, arrays in (("images", images), ("masks", masks)):
        for i, pixels in enumerate(arrays):
            (root / kind / "city").mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / kind / ("city" if i % 2 else "") / f"{i}.png")


@pytest.mark.parametrize("names", [("train", "val"), ("Train", "valid"), ("training", "test")])
def test_parts_have_their_usual_names(tmp_path, names):
    for name in names:
        mask_folder(tmp_path / name)
    data = open_masks(f"folder:{tmp_path}", validation_split=0.0)
    assert len(data.train) == len(data.validation or data.test) == 4
    (tmp_path / "TRAIN").mkdir()
    refused("has TRAIN and [tT]rain", open_masks, f"folder:{tmp_path}")


def test_files_beside_images_are_no_images(tmp_path):
    mask_folder(tmp_path)
    for name in ("._0.png", ".cache/1.png"):
        (tmp_path / "images" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "images" / name).write_bytes(b"none")
    assert len(open_masks(f"folder:{tmp_path}", validation_split=0.0).train) == 4
    (tmp_path / "images" / "a.heix").write_bytes(b"none")
    with pytest.warns(UserWarning, match=r"1 files are left out, which .* \(1 \.heix\)"):
        open_masks(f"folder:{tmp_path}", validation_split=0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n\nb\nc\nd\n", "classes.txt has an empty line; give the name of a class"),
        ("\xe9\nb\n".encode("latin-1"), "classes.txt is not UTF-8 at byte 1"),
        ("a\nb\n".encode("utf-16"), "classes.txt is not UTF-8 at byte 1"),
        ("\ufeffa\r\nb\nc\nd\ne\n\n".encode(), None),
    ],
)
def test_class_names(tmp_path, content, message):
    mask_folder(tmp_path)
    (tmp_path / "classes.txt").write_bytes(content)
    if message is None:
        data = open_masks(f"folder:{tmp_path}", validation_split=0.0)
        assert data.class_names == ["a", "b", "c", "d", "e"]
    else:
        refused(message, open_masks, f"folder:{tmp_path}")


def test_what_would_be_learnt_wrong_is_refused(tmp_path, monkeypatch):
    mask_folder(tmp_path)
    spec = f"folder:{tmp_path}"
    refused(
        "ignore_class is 0 with reduce_labels", open_masks, spec, reduce_labels=True, ignore_class=0
    )
    refused("ignore_class is 'a'; give a whole number or None", open_masks, spec, ignore_class="a")
    for share in (0.5, -1, float("nan")):
        refused("validation_split is ", open_masks, spec, validation_split=share)
    Image.fromarray(np.zeros((8, 8, 3), "uint8")).save(tmp_path / "images" / "0.jpg")
    refused(r"images has 0\.jpg and 0\.png, to which one mask", open_masks, spec)
    (tmp_path / "images" / "0.jpg").unlink()
    for i in range(4):
        path = tmp_path / "masks" / ("city" if i % 2 else "") / f"{i}.png"
        Image.fromarray(np.eye(8, dtype="uint8") * 255).save(path)
    refused("pixels of class 0 and of ignore_class=255 alone, so", open_masks, spec)
    monkeypatch.setattr(decoding, "MAX_PIXELS", 63)
    refused(r"0\.png is not a PNG of a mask \(8x8 is over 63 pixels", open_masks, spec)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_masks_of_turned_images(tmp_path, monkeypatch, orientation):
    """A mask with an orientation is turned as its image; one without is named."""
    monkeypatch.setitem(decoding._told_of, "orientation", False)
    labels = np.arange(64, dtype="uint8").reshape(8, 8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
        Image.fromarray(labels).save(tmp_path / kind / "0.png", exif=exif)
    train = open_masks(f"folder:{tmp_path}", validation_split=0.0).train
    (image,), (mask,) = train.batch(np.arange(1))
    np.testing.assert_array_equal(image[..., 0], mask)
    Image.fromarray(labels).save(tmp_path / "masks" / "0.png")
    if orientation == 1:
        train.batch(np.arange(1))
        return
    with pytest.warns(UserWarning, match=r"0\.png has an EXIF orientation and is turned upright"):
        (image,), (mask,) = train.batch(np.arange(1))
    assert not np.array_equal(image[..., 0], mask)
    train.batch(np.arange(1))  # once is enough


def test_what_cannot_be_is_said(tmp_path):
    images, masks = made_scenes(4, (8, 8))
    message = r"images have shape .* and masks .*; give \(n, H, W, C\)"
    refused(message, MaskArrays, images, masks[:3])
    refused("one of the masks has class 0.5; give whole", MaskArrays, images, masks + 0.5)
    refused(r"images are of shape \(4, 3", MaskArrays, images.transpose(0, 3, 1, 2), masks)
    pairs, message = MaskArrays(images, masks), "which leave pixels without a class"
    for resizing in (Resizing(crop_to_aspect_ratio=True), Resizing(resize_mode="crop")):
        refused(message, MaskLoader, pairs, 2, resizing=resizing)
    refused("crop and scale are both set", MaskLoader, pairs, 2, crop=0.5, scale=(1, 2))
    refused("crop is 2.0; give a number above 0", MaskLoader, pairs, 2, crop=2.0)
    for scale in ((0, 1), (2, 1)):
        refused("give factors with 0 < smallest <= larg", MaskLoader, pairs, 2, scale=scale)
    refused("BoxLoader has no scale and distort", BoxLoader, pairs, 2, distort=True)
    refused("scenes have no unlabeled pixels", open_masks, "scenes:20", reduce_labels=True)
    refused("data is digits; give one of scenes", open_masks, "digits")
    refused("data is scenes:2; give scenes:N with N at least 10", open_masks, "scenes:2")
    refused("there is no folder", open_masks, f"folder:{tmp_path / 'nowhere'}")
    refused("images has no images; give DIR/images and DIR/masks", open_masks, f"folder:{tmp_path}")
