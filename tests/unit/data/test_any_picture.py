"""One image in each form that a record may hold, and what is refused."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from kmodels.core.errors import InputError
from kmodels.data.images.any_picture import open_picture

PIXELS = np.random.default_rng(3).integers(0, 256, (6, 9, 3)).astype("uint8")


def encoded(image, kind="PNG", **settings):
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def forms(folder):
    image = Image.fromarray(PIXELS)
    content = encoded(image)
    file = folder / "a.png"
    file.write_bytes(content)
    inline = "data:image/png;base64," + base64.b64encode(content).decode()
    return {
        "path": file,
        "text": str(file),
        "text in an array": np.array(str(file)),
        "bytes": content,
        "bytearray": bytearray(content),
        "bytes in an array": np.array(content, dtype=object),
        "inline": inline,
        "pillow": image,
        "array": PIXELS,
        "wide integers": PIXELS.astype("int64"),
        "dataset": {"bytes": content, "path": None},
        "dataset on disk": {"bytes": None, "path": str(file)},
    }


def test_forms(tmp_path):
    for name, picture in forms(tmp_path).items():
        found = open_picture(picture)
        assert found.dtype == np.uint8, name
        np.testing.assert_array_equal(found, PIXELS, err_msg=name)


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
        (b"GIF89a", "the image: not a JPEG, PNG or WebP image; repair or remove it"),
        ("data:image/png;base64,+", "the image (data:image/png;base64) is not base64"),
        (None, "the image is a NoneType; give the path of a file, its bytes"),
        (np.zeros((3, 8, 8)), "the image has shape (3, 8, 8); give (height, width, 3)"),
        (np.zeros((0, 8, 3)), "the image has shape (0, 8, 3)"),
        (np.full((2, 2, 3), 256), "the image has values from 256 to 256; give an image before"),
        (np.full((2, 2, 3), np.nan), "the image has values from nan to nan"),
    ],
)
def test_what_is_refused(picture, message):
    with pytest.raises(InputError) as raised:
        open_picture(picture)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_damaged_image_of_pillow(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(encoded(Image.fromarray(PIXELS))[:80])
    with Image.open(file) as image, pytest.raises(InputError, match="the image cannot be read: "):
        open_picture(image)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("kmodels.data.images.any_picture.MAX_BYTES", 10)
    file = tmp_path / "a.png"
    file.write_bytes(b"0" * 11)
    with pytest.raises(InputError, match=r"a.png: over 10 bytes; repair or remove it"):
        open_picture(file)
