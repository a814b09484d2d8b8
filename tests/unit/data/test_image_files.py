"""Image files of every format that Pillow reads, and what is left out."""

import io
import os
import warnings

import numpy as np
import pytest
from PIL import Image

import kmodels
from kmodels.data import open_dataset
from kmodels.data.images import decoding
from kmodels.data.images.any_picture import open_picture
from kmodels.data.images.decoding import PictureError, decode
from kmodels.data.images.masks import read_mask
from kmodels.models.vit.preprocessor import ViTImageConverter
from refusals import refused

RED = Image.new("RGB", (6, 4), (200, 30, 60))
# Ends of names and Pillow's format.
FILES = {
    **{".bmp": "BMP", ".dib": "DIB", ".gif": "GIF", ".tif": "TIFF", ".tiff": "TIFF"},
    **{".ppm": "PPM", ".jfif": "JPEG", ".jpe": "JPEG", ".avif": "AVIF", ".webp": "WEBP"},
    **{".tga": "TGA", ".jp2": "JPEG2000", ".pcx": "PCX", ".TIF": "TIFF"},
    **{".apng": "PNG", ".sgi": "SGI", ".qoi": "QOI"},
}


def encode(image, kind, **options):
    file = io.BytesIO()
    if kind == "ICO":
        options["sizes"] = [image.size]
    image.save(file, kind, **options)
    return file.getvalue()


def folder_of(root, names):
    for name, content in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return f"folder:{root}"


def test_a_class_folder_may_hold_every_format(tmp_path):
    Image.init()
    files = {
        f"{label}/{number}{end}": encode(RED, kind)
        for label in ("cat", "dog")
        for number, (end, kind) in enumerate(FILES.items())
        if kind in Image.SAVE
    }
    data = open_dataset(folder_of(tmp_path, files), image_size=(4, 6), validation_split=0.0)
    assert len(data.train) == len(files) >= 2 * len(FILES) - 2 and data.skipped == []
    images, _ = data.train.batch(np.arange(len(files)))
    for name, image in zip(data.train.names, images, strict=True):
        assert np.abs(image[1, 1].astype(int) - (200, 30, 60)).max() < 12, name


def test_devices_and_pipes_are_not_read(tmp_path):
    data = folder_of(tmp_path / "data", {f"{label}/1.png": b"" for label in ("cat", "dog")})
    os.mkfifo(tmp_path / "pipe.png")
    for target in ("/dev/zero", tmp_path / "pipe.png"):
        for label in ("cat", "dog"):
            (tmp_path / "data" / label / "1.png").unlink()
            (tmp_path / "data" / label / "1.png").symlink_to(target)
        train = open_dataset(data, image_size=(4, 6), validation_split=0.0).train
        refused("cat/1.png: not a regular file", train.batch, np.arange(2))
        refused("not a regular file", read_mask, tmp_path / "data/cat/1.png")


def test_what_pillow_does_not_read_is_counted(tmp_path):
    content = encode(RED, "PNG")
    files = {f"{label}/{i}.png": content for label in ("cat", "dog") for i in range(4)}
    files |= {"cat/a.xyz": b"x", "dog/b.xyz": b"x", "dog/c.svg": b"<svg/>", "dog/notes.txt": b"x"}
    with pytest.warns(UserWarning, match=r"3 files are left out.*\(2 \.xyz, 1 \.svg\)") as told:
        data = open_dataset(folder_of(tmp_path, files))
    assert len(told) == 1 and "\n" not in str(told[0].message)
    left_out = [file.rsplit("/", 1)[-1] for file, _ in data.skipped]
    assert left_out == ["a.xyz", "b.xyz", "c.svg"]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_read(kind, monkeypatch):
    monkeypatch.setitem(decoding._told_of, "frames", False)
    others = [Image.new("RGB", (6, 4), color) for color in ((0, 255, 0), (0, 0, 255))]
    content = encode(RED, kind, save_all=True, append_images=others)
    with pytest.warns(UserWarning, match="^a has several frames; the first"):
        first = decode(content, "a")
    assert np.abs(first[1, 1].astype(int) - (200, 30, 60)).max() < 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(content, "b")


def test_floats_in_files_are_values_up_to_255():
    grey = np.linspace(0, 255, 24, dtype="float32").reshape(4, 6)
    found = decode(encode(Image.fromarray(grey), "TIFF"), "a.tif")
    np.testing.assert_array_equal(found[..., 0], np.round(grey))
    with pytest.warns(UserWarning, match="no value above 1"):
        decode(encode(Image.fromarray(grey / 255), "TIFF"), "a.tif")
    wrong = encode(Image.fromarray(grey - 3), "TIFF")
    with pytest.raises(PictureError, match="floats from -3"):
        decode(wrong, "a.tif")


def test_alpha_lies_on_white_and_sixteen_bits_are_scaled():
    clear = Image.new("RGBA", (6, 4), (200, 30, 60, 0))
    for kind in ("PNG", "TIFF", "WEBP"):
        assert (decode(encode(clear, kind), "a") == 255).all()
    deep = np.full((4, 6), 65535, "uint16")
    for kind in ("PNG", "TIFF"):
        assert (decode(encode(Image.fromarray(deep), kind), "a") == 255).all()


UNIT = np.random.default_rng(0).random((2, 16, 16, 3), "float32")
CALLS = {
    "preprocessor": lambda x: kmodels.models.ViTImageClassifierPreprocessor((16, 16))(x),
    "list": lambda x: kmodels.models.ViTImageClassifierPreprocessor((8, 8))(list(x)),
    "one": lambda x: kmodels.models.ViTImageClassifierPreprocessor((8, 8))(x[0]),
    "converter": lambda x: ViTImageConverter((16, 16))(x),
    "record": lambda x: open_picture(x[0]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_float_images_up_to_1_are_a_warning(call):
    with pytest.warns(UserWarning, match="no value above 1.*multiply them by 255"):
        call(UNIT)
    call(UNIT * 255)
    call(np.zeros_like(UNIT))
    call((UNIT > 0.5).astype("uint8"))


@pytest.mark.parametrize("call", list(CALLS.values())[:-1], ids=list(CALLS)[:-1])
def test_values_that_no_pixel_has_are_a_warning(call):
    cases = {
        "bool images have no value above 1": UNIT > 0.5,
        "from -1 to 2": np.where(UNIT > 0.5, 2.0, -1.0),
        "from nan to nan": np.full_like(UNIT, np.nan),
        "from 0 to 65535": np.where(UNIT > 0.5, 65535, 0).astype("uint16"),
    }
    for message, images in cases.items():
        with pytest.warns(UserWarning, match=message):
            call(images)


def test_a_file_of_another_kind_is_named():
    refused("a.eps: not an image that Pillow reads", decode, encode(RED, "EPS"), "a.eps")
