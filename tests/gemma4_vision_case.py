"""Pictures and texts for the preprocessors of Gemma 4, and what transformers' processors give."""

import json
from pathlib import Path

import numpy as np

from arrays import read_npz
from kmodels.models import Gemma4ImageConverter, Gemma4ImageTextLMPreprocessor

START, SOFT, END = "<|image>", "<|image|>", "<image|>"


class ProcessorCase:
    """Pictures, texts and what transformers' processor makes of them."""

    def __init__(self, references: Path):
        self.folder = references / "gemma4_processor"
        self.said = json.loads((self.folder / "texts.json").read_text())
        self.expected = read_npz(self.folder / "expected.npz")

    def picture(self, name: str) -> Path:
        """Returns the path of a picture."""
        return self.folder / "pictures" / name

    def preprocessor(self, form: str = "model", **settings) -> Gemma4ImageTextLMPreprocessor:
        """Returns the preprocessor of a directory; "unified" cuts whole pieces."""
        return Gemma4ImageTextLMPreprocessor.from_preset(self.folder / form, **settings)

    def converter(self, form: str = "model") -> Gemma4ImageConverter:
        """Returns the image converter of a directory."""
        return Gemma4ImageConverter.from_preset(self.folder / form)

    def check(self, found: dict, name: str, form: str = "model") -> None:
        """Asserts that ids, mask, places and pixels are transformers'."""
        expected = self.expected
        np.testing.assert_array_equal(found["token_ids"], expected[f"{name}_ids"])
        np.testing.assert_array_equal(found["padding_mask"], expected[f"{name}_mask"])
        np.testing.assert_array_equal(found["vision_mask"], expected[f"{name}_images"])
        keys = ("merged", "merged_places") if form == "unified" else ("pixels", "places")
        if f"{name}_{keys[0]}" not in expected:
            assert found["pixel_values"].shape[1] == 0
            return
        pixels, where = (expected[f"{name}_{key}"] for key in keys)
        sizes, at = self.said["sizes"], 0
        square = 1 if form == "unified" else sizes["pooling_kernel_size"] ** 2
        for row, held in enumerate(found["pixel_position_ids"]):
            (there,) = np.nonzero(found["vision_mask"][row])
            count = int((held >= 0).all(-1).any(-1).sum())
            assert (held >= 0).all(-1).sum() == len(there) * square
            np.testing.assert_array_equal(held[:count], where[at : at + count])
            np.testing.assert_array_equal(
                found["pixel_values"][row][:count], pixels[at : at + count]
            )
            assert not found["pixel_values"][row][count:].any() and (held[count:] == -1).all()
            indices = found["vision_indices"][row]
            np.testing.assert_array_equal(indices[: len(there)], there)
            assert not indices[len(there) :].any()
            at += count
        assert at == len(pixels)
