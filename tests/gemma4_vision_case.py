"""The references of Gemma 4 with images: models of transformers, and what its processors give."""

import json
from pathlib import Path

import numpy as np

from arrays import read_npz
from kmodels.models import Gemma4ImageConverter, Gemma4ImageTextLM, Gemma4ImageTextLMPreprocessor

START, SOFT, END = "<|image>", "<|image|>", "<image|>"
MODELS = ("unified", "unified_causal", "tower", "tower_small")
CASES = ("none", "one", "two", "last")
IMAGE = 155
# Rows of every batch, so that a compiled step serves them all.
LENGTH = 40


class Reference:
    """A model of `tests/references/gemma4_vision.py`, and what transformers computes with it."""

    def __init__(self, references: Path, name: str):
        self.folder = references / "gemma4_vision" / name
        self.path = self.folder / "model"
        self.expected = read_npz(self.folder / "expected.npz")
        self.model = Gemma4ImageTextLM.from_preset(self.path)

    def pictures(self, case: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns patches and places of the images of a case, without a batch."""
        numbers = self.expected[f"{case}_numbers"].astype(int)
        return self.expected["pixel_values"][numbers], self.expected["places"][numbers]

    def inputs(self, *cases: str, length: int = LENGTH) -> dict[str, np.ndarray]:
        """Returns a batch of cases, each behind some padding, with room for two images."""
        rows = [self.expected[f"{case}_ids"][0] for case in cases]
        shape = self.expected["pixel_values"].shape[1:]
        pixels = np.zeros((len(rows), 2, *shape), "float32")
        places = np.full((len(rows), 2, shape[0], 2), -1, "int32")
        ids, mask = (np.zeros((len(rows), length), "int32") for _ in range(2))
        for number, (row, case) in enumerate(zip(rows, cases, strict=True)):
            ids[number, length - len(row) :], mask[number, length - len(row) :] = row, 1
            given = self.pictures(case)
            pixels[number, : len(given[0])], places[number, : len(given[1])] = given
        return {
            "token_ids": ids,
            "padding_mask": mask,
            "pixel_values": pixels,
            "pixel_position_ids": places,
            "vision_mask": (ids == IMAGE).astype("int32"),
        }

    def logits(self, case: str) -> np.ndarray:
        """Returns transformers' logits of a case, without a batch."""
        return self.expected[f"{case}_logits"][0]

    def found(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Returns logits in one compiled call: as it is, a call is on JAX a program for each op."""
        return self.model.predict(inputs, verbose=0)


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
