"""The references of `tests/references/gemma3_processor.py`, and a preprocessor read from them."""

import json
from pathlib import Path

import numpy as np

from arrays import read_npz
from kmodels.models import Gemma3ImageConverter, Gemma3ImageTextLMPreprocessor

START, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class ProcessorCase:
    """Pictures, texts and what transformers' processor makes of them."""

    def __init__(self, references: Path):
        self.folder = references / "gemma3_processor"
        self.said = json.loads((self.folder / "texts.json").read_text())
        self.expected = read_npz(self.folder / "expected.npz")

    def picture(self, name: str) -> Path:
        """Returns the path of a picture."""
        return self.folder / "pictures" / name

    def preprocessor(self, form: str = "model", crops: bool = False, **settings):
        """Returns the preprocessor of a directory, with pan-and-scan where it is asked for."""
        if crops:
            held = Gemma3ImageConverter.from_preset(self.folder / form, **self.said["crops"])
            settings["image_converter"] = held
        return Gemma3ImageTextLMPreprocessor.from_preset(self.folder / form, **settings)

    def check(self, found: dict, name: str) -> None:
        """Asserts that ids, mask, places and pixels are transformers'."""
        expected = self.expected
        np.testing.assert_array_equal(found["token_ids"], expected[f"{name}_ids"])
        np.testing.assert_array_equal(found["padding_mask"], expected[f"{name}_mask"])
        np.testing.assert_array_equal(found["vision_mask"], expected[f"{name}_images"])
        pixels = expected.get(f"{name}_pixels", np.zeros((0, 20, 20, 3), "float32"))
        per_image, at = self.said["tokens"], 0
        for row, images in enumerate(found["images"]):
            (places,) = np.nonzero(found["vision_mask"][row])
            count = len(places) // per_image
            np.testing.assert_array_equal(images[:count], pixels[at : at + count])
            assert not images[count:].any()
            indices = found["vision_indices"][row]
            np.testing.assert_array_equal(indices[: len(places)], places)
            assert not indices[len(places) :].any()
            at += count
        assert at == len(pixels)
