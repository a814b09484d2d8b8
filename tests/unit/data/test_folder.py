"""Folders and zips of real small image files."""

import io
import os
import struct
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from kmodels.data import open_dataset
from kmodels.data.images import decoding
from kmodels.data.images.decoding import PictureError, decode, with_channels
from kmodels.data.images.resizing import resize
from refusals import refused


def picture(size=(6, 4), color=(200, 30, 60)):
    return Image.new("RGB", size, color)


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def folder_of(root, *names, content=None):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content or encode(picture(), "JPEG"))
    return root


def zip_of(path, names, content):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"junk" if name.startswith("__MACOSX") else content)
    return path


CLASSES = ("cat/1.jpg", "cat/2.JPEG", "dog/1.jpg", "dog/2.jpg", "dog/notes.txt", ".hidden/1.jpg")
FOUR = ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")


def test_classes_are_folders_in_alphabetical_order(tmp_path):
    folder_of(tmp_path, *(f"{c}/{i}.jpg" for c in ("dog", "cat") for i in range(10)), *CLASSES)
    data = open_dataset(f"folder:{tmp_path}")
    assert data.class_names == ["cat", "dog"] and data.image_shape == (4, 6, 3)
    assert (len(data.train), len(data.validation), len(data.test)) == (17, 2, 2)
    names = [name for s in (data.train, data.validation, data.test) for name in s.names]
    assert len(set(names)) == 21 and "dog/notes.txt" not in names
    for source in (data.train, data.validation, data.test):
        assert [name.startswith("dog") for name in source.names] == source.labels.tolist()
    images, labels = data.train.batch(np.array([0, 16]))
    assert images[0].shape == (4, 6, 3) and labels.tolist() == [0, 1]
    other = folder_of(tmp_path / "b", *(f"{c}/{i}.jpg" for c in ("bus", "train") for i in range(5)))
    assert open_dataset(f"folder:{other}").class_names == ["bus", "train"]


@pytest.mark.parametrize("validation", ["val", "validation", "valid"])
@pytest.mark.parametrize("wrapper", ["", "pets/"])
def test_zip_with_split_folders(tmp_path, validation, wrapper):
    names = [
        f"{wrapper}{part}/{label}/{i}.jpg"
        for part, count in (("train", 3), (validation, 2), ("test", 1))
        for label in ("cat", "dog")
        for i in range(count)
    ]
    names.append(f"__MACOSX/{names[0]}")
    path = zip_of(tmp_path / "pets.zip", names, encode(picture(), "JPEG"))
    data = open_dataset(f"folder:{path}", image_size=(4, 4))
    assert (len(data.train), len(data.validation), len(data.test)) == (6, 4, 2)
    assert data.class_names == ["cat", "dog"] and data.image_shape == (4, 4, 3)
    assert data.train.batch(np.array([5]))[0][0].shape == (4, 6, 3)
    assert data.mean == pytest.approx((200 / 255, 30 / 255, 60 / 255), abs=0.02)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"holds no images"),
        (("cat/notes.txt",), r"holds no images"),
        (("1.jpg", "2.jpg"), r"no class folders"),
        (("cat/1.jpg", "cat/2.jpg"), r"has 1 class \(cat\)"),
        (("train/cat/1.jpg", "train/dog/1.jpg", "test/cow/1.jpg"), r"class cow is in test but not"),
        (("train/cat/1.jpg", "train/dog/1.jpg", "cow/1.jpg"), r"both a train folder and cow"),
        (("cat/1.jpg", "dog/1.jpg"), r"2 samples are too few"),
        (("val/cat/1.jpg", "test/dog/1.jpg"), r"has test, val but no train folder with images"),
    ],
)
def test_folder_errors(tmp_path, names, message):
    folder_of(tmp_path, *names)
    refused(message, open_dataset, f"folder:{tmp_path}")


def test_classes_without_images_are_named(tmp_path):
    folder_of(tmp_path, "1.jpg", "cat/.keep", "dog/.keep")
    with pytest.warns(UserWarning, match="1 image in no class folder"):
        refused("no usable training image in class cat, dog", open_dataset, f"folder:{tmp_path}")


@pytest.mark.parametrize("stray", ["x.jpg", "train/x.jpg", "val/x.jpg"])
def test_images_in_no_class_folder_are_named(tmp_path, stray):
    folder_of(tmp_path, *(f"{part}/{name}" for part in ("train", "val") for name in FOUR), stray)
    with pytest.warns(UserWarning, match=f"1 image in no class folder left out: {stray}; move"):
        data = open_dataset(f"folder:{tmp_path}", validation_split=0.0)
    assert data.class_names == ["cat", "dog"] and data.skipped[0][0] == f"{tmp_path}/{stray}"
    assert data.train.names == [f"train/{name}" for name in FOUR]
    assert data.validation.names == [f"val/{name}" for name in FOUR]


@pytest.mark.parametrize("linked", ["val", "val/dog", "train/cat", "train/cat/1.png"])
def test_links_are_followed_but_not_in_circles(tmp_path, linked):
    root = folder_of(tmp_path / "data", *(f"{part}/{x}" for part in ("train", "val") for x in FOUR))
    (root / linked).rename(tmp_path / "elsewhere")
    (root / linked).symlink_to(tmp_path / "elsewhere")
    (root / "train" / "dog" / "up").symlink_to(root)
    (root / "train" / "dog" / "over").symlink_to(tmp_path / "over")
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "back").symlink_to(root / "train" / "dog")
    data = open_dataset(f"folder:{root}", validation_split=0.0)
    assert data.train.names == [f"train/{name}" for name in FOUR]
    assert data.validation.names == [f"val/{name}" for name in FOUR]


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    def denied(path, listdir=os.scandir):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    folder_of(tmp_path, *FOUR)
    monkeypatch.setattr(os, "scandir", denied)
    refused("dog cannot be read: Permission denied", open_dataset, f"folder:{tmp_path}")


def test_classes_sizes_and_zips_that_do_not_fit(tmp_path):
    folder_of(tmp_path, *CLASSES)
    for i in range(6):
        folder_of(tmp_path, f"dog/1{i}.png", content=encode(picture((9, 9))))
    data = f"folder:{tmp_path}"
    refused(r"differ in size \(4x6, 9x9", open_dataset, data, validation_split=0.0)
    (tmp_path / "eel").mkdir()
    refused("no usable training image in class eel", open_dataset, data)
    (tmp_path / "a.zip").write_bytes(b"no zip")
    refused("not a readable zip", open_dataset, f"{data}/a.zip")


def test_bad_pictures_are_named_or_skipped_and_listed(tmp_path):
    folder_of(tmp_path, *CLASSES, "cat/3.jpg", "dog/3.jpg")
    whole = encode(Image.effect_noise((64, 64), 90), "JPEG")
    folder_of(tmp_path, "cat/bad.jpg", content=whole[: len(whole) // 2])
    folder_of(tmp_path, "dog/bad.png", content=b"not an image")
    data = open_dataset(f"folder:{tmp_path}", image_size=(4, 4), skip_bad=True)
    assert [(file.rsplit("/", 1)[-1], reason.split(" (")[0]) for file, reason in data.skipped] == [
        ("bad.jpg", "truncated or damaged"),
        ("bad.png", "not an image that Pillow reads"),
    ]
    assert len(data.train) + len(data.validation) + len(data.test) == 6
    data = open_dataset(f"folder:{tmp_path}", image_size=(4, 4), validation_split=0.0)
    bad = np.flatnonzero(["bad.jpg" in name for name in data.train.names])
    refused(r"cat/bad\.jpg: truncated .*skip_bad=True", data.train.batch, bad)


def test_damage_inside_a_zip_is_named(tmp_path):
    content = encode(picture(), "PNG")
    path = zip_of(tmp_path / "pets.zip", FOUR, content)
    raw = path.read_bytes()
    at = raw.index(content) + len(content) // 2
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    data = open_dataset(f"folder:{path}", skip_bad=True, validation_split=0.0)
    assert len(data.skipped) == 1 and "cat/1.png" in data.skipped[0][0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    # Red lies top left when shown upright.
    upright = np.zeros((16, 24, 3), "uint8")
    upright[:8, :8, 0] = 255
    undo = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_90 TRANSVERSE ROTATE_270"
    stored = Image.fromarray(upright)
    if orientation > 1:
        stored = stored.transpose(Image.Transpose[undo.split()[orientation - 2]])
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = decode(encode(stored, "JPEG", exif=exif, quality=95), "a.jpg")
    assert shown.shape == (16, 24, 3)
    assert shown[2, 2, 0] > 200 and max(shown[2, -3, 0], shown[-3, 2, 0], shown[-3, -3, 0]) < 50


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.array([[0, 257, 128 * 257, 65535]], "uint16")
    shown = decode(encode(Image.fromarray(values)), "a.png")
    assert shown[0, :, 0].tolist() == [0, 1, 128, 255] and shown.shape == (1, 4, 3)


def test_twelve_bits_are_scaled():
    """A TIFF of 2 x 1 pixels: each tag is a number, its type, a count and a value."""
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    pixels = bytes([0xFF, 0xF8, 0x08])  # 4095 and 2056
    content = b"II*\0" + struct.pack("<I3sxH", 12, pixels, len(tags)) + entries + bytes(4)
    assert decode(content, "a.tif")[0, :, 0].tolist() == [255, 128]


@pytest.mark.parametrize("kind", ["AVIF", "BLP", "DDS"])
def test_each_kind_of_damage_is_named(kind):
    content = bytearray(encode(picture((8, 8)).convert("P" if kind == "BLP" else "RGB"), kind))
    for place in range(0, len(content), 1 if kind != "AVIF" else 7):
        for value in (content[place] ^ 0xFF, 0):
            damaged = content.copy()
            damaged[place] = value
            with suppress(PictureError):
                decode(bytes(damaged), "a")


@pytest.mark.parametrize("value", [-1, 65536])
def test_whole_numbers_beyond_sixteen_bits_are_refused(value):
    image = Image.fromarray(np.full((2, 2), value, "int32"))
    refused(
        f"x.tif: values from {value} to {value}, not from", decode, encode(image, "TIFF"), "x.tif"
    )


def test_transparent_parts_lie_on_white():
    pixels = np.array([[[10, 20, 30, 255], [10, 20, 30, 0]]], "uint8")
    wanted = [[[10, 20, 30], [255, 255, 255]]]
    assert decode(encode(Image.fromarray(pixels)), "a.png").tolist() == wanted
    assert decode(encode(Image.fromarray(pixels), "WEBP", lossless=True), "a").tolist() == wanted
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 1, 2, 3])
    palette.putdata([0, 1])
    assert decode(encode(palette, transparency=1), "a.png").tolist() == wanted
    grey = Image.fromarray(np.array([[[10, 255], [10, 0]]], "uint8"), "LA")
    assert decode(encode(grey), "a.png").tolist() == [[[10] * 3, [255] * 3]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_modes_become_rgb(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    shown = decode(encode(picture((3, 3), (255, 255, 255)).convert(mode), kind), "a")
    assert shown.shape == (3, 3, 3) and shown.min() > 250


def test_bombs_are_refused(monkeypatch, tmp_path):
    content = encode(Image.new("1", (400, 300)))
    monkeypatch.setattr(decoding, "MAX_PIXELS", 100_000)
    with pytest.raises(PictureError, match="400x300 is over 100000 pixels, refused"):
        decode(content, "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(PictureError, match="refused as a decompression bomb"):
        decode(content, "a.png")
    monkeypatch.setattr("kmodels.data.images.datasets.MAX_BYTES", 100)
    path = zip_of(tmp_path / "a.zip", FOUR, bytes(1000))
    data = open_dataset(f"folder:{path}", image_size=(2, 2))
    refused("unpacks to over 100 bytes", data.train.batch, np.array([0]))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("channels", [1, 3])
def test_resize(dtype, channels):
    ramp = np.linspace(0, 255, 16)[None, :, None]
    image = np.broadcast_to(ramp, (12, 16, channels)).astype(dtype)
    small = resize(image, (6, 4))
    assert small.shape == (6, 4, channels) and small.dtype == dtype
    np.testing.assert_allclose(small[0, :, 0], [32.2, 93.5, 161.5, 222.8], atol=0.6)
    assert resize(image, (12, 16)) is image
    cut = resize(image, (4, 4), (0, 0, 8, 8))
    assert cut.max() < 140


def test_channels():
    color = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], "uint8")
    assert with_channels(color, 1)[0, :, 0].tolist() == [76, 150, 29]
    assert with_channels(color[..., :1], 3)[0, 0].tolist() == [255] * 3
    assert with_channels(color, 3) is color
    refused("have 4 channels but 3", with_channels, np.zeros((1, 1, 4)), 3)
