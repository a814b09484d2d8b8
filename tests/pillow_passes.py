"""The order in which Pillow resized the images of the references."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from PIL import Image


@contextmanager
def horizontal_pass_first() -> Iterator[None]:
    """Makes Pillow resize horizontally, then vertically, as it does before version 13.

    Since version 13 (python-pillow/Pillow#9549) the vertical pass comes first if the height shrinks
    more than the width. Bytes are rounded between the passes, so the order changes pixels. The
    references hold the pixels that transformers computes with the Pillow of constraints.txt.
    """
    one_call = Image.Image.resize

    def two_calls(image, size, resample, box=None, reducing_gap=None):
        assert reducing_gap is None
        left, top, right, bottom = box or (0, 0, *image.size)
        across = (left, 0, right, image.height)
        narrow = one_call(image, (size[0], image.height), resample, box=across)
        return one_call(narrow, size, resample, box=(0, top, size[0], bottom))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", two_calls)
        yield
