"""The references of `tests/references/gemma3_processor.py`, and a preprocessor read from them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from arrays import read_npz
from kmodels.models import Gemma3ImageConverter, Gemma3ImageTextLMPreprocessor

START, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Processor:
    """Pictures, texts and what a processor of transformers makes of them."""

    name: str

    def __init__(self, references: Path):
        self.folder = references / self.name
        self.said = json.loads((self.folder / "texts.json").read_text())
        self.expected = read_npz(self.folder / "expected.npz")

    def picture(self, name: str) -> Path:
        return self.folder / "pictures" / name

    def given(self, name: str, form: str) -> dict | list:
        """Returns texts and images of a case in one of the forms that records have."""
        texts, names = self.said["cases"][name]
        opened = {
            "paths": self.picture,
            "strings": lambda one: str(self.picture(one)),
            "bytes": lambda one: self.picture(one).read_bytes(),
            "pillow": lambda one: Image.open(self.picture(one)),
            "arrays": lambda one: np.asarray(Image.open(self.picture(one)).convert("RGB")),
            "datasets": lambda one: {"bytes": self.picture(one).read_bytes(), "path": one},
        }[form]
        images = [[opened(one) for one in row] for row in names]
        if texts is None:
            return [{"images": row} for row in images]
        return {"prompts": texts, "images": images}

    def check_texts(self, found: dict, name: str) -> None:
        """Asserts that ids, mask and the tokens of images are transformers'."""
        for key, theirs in (
            ("token_ids", "ids"),
            ("padding_mask", "mask"),
            ("vision_mask", "images"),
        ):
            np.testing.assert_array_equal(found[key], self.expected[f"{name}_{theirs}"])


class ProcessorCase(Processor):
    name = "gemma3_processor"

    def preprocessor(self, form: str = "model", crops: bool = False, **settings):
        """Returns the preprocessor of a directory, with pan-and-scan where it is asked for."""
        if crops:
            held = Gemma3ImageConverter.from_preset(self.folder / form, **self.said["crops"])
            settings["image_converter"] = held
        return Gemma3ImageTextLMPreprocessor.from_preset(self.folder / form, **settings)

    def check(self, found: dict, name: str) -> None:
        """Asserts that ids, mask, places and pixels are transformers'."""
        self.check_texts(found, name)
        pixels = self.expected.get(f"{name}_pixels", np.zeros((0, 20, 20, 3), "float32"))
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
