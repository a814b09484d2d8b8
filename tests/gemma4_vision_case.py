"""Pictures and texts for the preprocessors of Gemma 4, and what transformers' processors give."""

import numpy as np

from gemma3_processor_case import Processor
from kmodels.models import Gemma4ImageConverter, Gemma4ImageTextLMPreprocessor

START, SOFT, END = "<|image>", "<|image|>", "<image|>"


class ProcessorCase(Processor):
    name = "gemma4_processor"

    def preprocessor(self, form: str = "model", **settings) -> Gemma4ImageTextLMPreprocessor:
        """Returns the preprocessor of a directory; "unified" cuts whole pieces."""
        return Gemma4ImageTextLMPreprocessor.from_preset(self.folder / form, **settings)

    def converter(self, form: str = "model") -> Gemma4ImageConverter:
        """Returns the image converter of a directory."""
        return Gemma4ImageConverter.from_preset(self.folder / form)

    def check(self, found: dict, name: str, form: str = "model") -> None:
        """Asserts that ids, mask, places and pixels are transformers'."""
        self.check_texts(found, name)
        keys = ("merged", "merged_places") if form == "unified" else ("pixels", "places")
        if f"{name}_{keys[0]}" not in self.expected:
            assert found["pixel_values"].shape[1] == 0
            return
        pixels, where = (self.expected[f"{name}_{key}"] for key in keys)
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
