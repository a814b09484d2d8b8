"""One image in each form that a record may hold, and what is refused."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from kmodels.data.images.any_picture import open_picture
from refusals import refused

PIXELS = np.random.default_rng(3).integers(0, 256, (6, 9, 3)).astype("uint8")


def encoded(image, kind="PNG", **settings):
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def test_forms(tmp_path):
    image, file = Image.fromarray(PIXELS), tmp_path / "a.png"
    content = encoded(image)
    file.write_bytes(content)
    inline = "data:image/png;base64," + base64.b64encode(content).decode()
    texts = (file, str(file), np.array(str(file)), inline)
    contents = (content, bytearray(content), np.array(content, dtype=object))
    arrays = (image, PIXELS, PIXELS.astype("int64"))
    dataset = ({"bytes": content, "path": None}, {"bytes": None, "path": str(file)})
    for picture in (*texts, *contents, *arrays, *dataset):
        found = open_picture(picture)
        assert found.dtype == np.uint8, picture
        np.testing.assert_array_equal(found, PIXELS, err_msg=str(type(picture)))


def test_channels_and_floats():
    grey = PIXELS[..., 0]
    for picture in (grey, grey[..., None], Image.fromarray(grey)):
        np.testing.assert_array_equal(open_picture(picture), np.stack([grey] * 3, -1))
    floats = open_picture(PIXELS.astype("float64") / 2)
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, PIXELS / 2)


def test_as_a_viewer_shows_it():
    image = Image.fromarray(PIXELS)
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = Image.open(io.BytesIO(encoded(image, exif=exif)))
    np.testing.assert_array_equal(open_picture(turned), np.rot90(PIXELS, -1))
    clear = np.concatenate([PIXELS, np.zeros_like(PIXELS[..., :1])], -1)
    assert (open_picture(Image.fromarray(clear)) == 255).all()
    clear[..., 3] = 255
    np.testing.assert_array_equal(open_picture(Image.fromarray(clear)), PIXELS)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("http://a.b/c.png", "http://a.b/c.png is an address of the web; download it first"),
        ("HTTPS://a.b/c.png", "is an address of the web"),
        ("no.png", "no.png cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        (b"GIF89a", "the image: not an image that Pillow reads; repair or remove it"),
        ("data:image/png;base64,+", "the image (data:image/png;base64) is not base64"),
        (None, "the image is a NoneType; give the path of a file, its bytes"),
        (np.zeros((3, 8, 8)), "the image has shape (3, 8, 8); give (height, width, 3)"),
        (np.zeros((0, 8, 3)), "the image has shape (0, 8, 3)"),
        (np.full((2, 2, 3), 256), "the image has values from 256 to 256; give an image before"),
        (np.full((2, 2, 3), np.nan), "the image has values from nan to nan"),
    ],
)
def test_what_is_refused(picture, message):
    refused(re.escape(message), open_picture, picture)


def test_a_file_that_is_damaged_or_too_large(tmp_path, monkeypatch):
    file = tmp_path / "a.png"
    file.write_bytes(encoded(Image.fromarray(PIXELS))[:80])
    with Image.open(file) as image:
        refused("the image cannot be read: ", open_picture, image)
    monkeypatch.setattr("kmodels.data.images.decoding.MAX_BYTES", 10)
    file.write_bytes(b"0" * 11)
    refused("a.png: over 10 bytes; repair or remove it", open_picture, file)
