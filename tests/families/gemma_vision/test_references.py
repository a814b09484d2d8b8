"""Gemma 3 with its vision encoder, beside transformers' on texts with no, one and two images."""

import keras
import numpy as np
import pytest

from arrays import read_npz, to_numpy
from kmodels.models import Gemma3ImageTextLM
from kmodels.models.common.image_text import images as image_places
from kmodels.weights import read_safetensors
from tolerances import tolerance

CASES = ("none", "one", "two", "last")
# Rows of every batch, so that a compiled step serves them all.
LENGTH = 40
LIMIT = tolerance("logits")
IMAGE, TOKENS = 160, 9


class Reference:
    def __init__(self, folder):
        self.path = folder / "model"
        self.expected = read_npz(folder / "expected.npz")
        self.model = Gemma3ImageTextLM.from_preset(self.path)

    def inputs(self, *cases, length=LENGTH):
        """A batch of cases, each behind some padding, with room for two images."""
        rows = [self.expected[f"{case}_ids"][0] for case in cases]
        counts = [(row == IMAGE).sum() // TOKENS for row in rows]
        images = np.zeros((len(rows), 2, 24, 24, 3), "float32")
        ids, mask = (np.zeros((len(rows), length), "int32") for _ in range(2))
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ids[number, length - len(row) :], mask[number, length - len(row) :] = row, 1
            images[number, :count] = self.expected["images"][:count]
        seen = (ids == IMAGE).astype("int32")
        return {"token_ids": ids, "padding_mask": mask, "images": images, "vision_mask": seen}

    def logits(self, case):
        return self.expected[f"{case}_logits"][0]

    def found(self, inputs):
        """Logits in one compiled call: as it is, a call is on JAX a program for each op."""
        return self.model.predict(inputs, verbose=0)


@pytest.fixture(scope="module")
def whole(references):
    return Reference(references / "gemma3_vision")


def test_features_of_images_are_transformers(whole):
    found = to_numpy(whole.model.backbone.vision_encoder(whole.expected["images"][None]))
    expected = whole.expected["features"].reshape(1, -1, found.shape[-1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance("hidden"))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers(whole, case):
    expected = whole.logits(case)
    found = whole.found(whole.inputs(case))[0, -len(expected) :]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT)


def test_rows_of_a_batch_are_as_alone(whole):
    found = whole.found(whole.inputs(*CASES))
    for row, case in zip(found, CASES, strict=True):
        expected = whole.logits(case)
        np.testing.assert_allclose(row[-len(expected) :], expected, rtol=0, atol=LIMIT)


def test_places_of_images_may_come_as_keras_hub_gives_them_or_not_at_all(whole):
    inputs = whole.inputs("two", "one")
    mask = inputs.pop("vision_mask")
    expected = whole.found({**inputs, "vision_mask": mask})
    places = np.zeros((2, 2 * TOKENS), "int32")
    for row, there in zip(places, mask, strict=True):
        row[: there.sum()] = np.flatnonzero(there)
    np.testing.assert_array_equal(whole.found(inputs), expected)
    np.testing.assert_array_equal(whole.found({**inputs, "vision_indices": places}), expected)


@pytest.mark.once  # whether the reference would tell
def test_each_rule_of_who_sees_whom_counts(whole, monkeypatch):
    inputs = whole.inputs("two")
    right = whole.found(inputs)
    there = inputs["padding_mask"][0].astype(bool)

    def far(other):
        return np.abs(to_numpy(other) - right)[0, there].max() > 100 * LIMIT

    assert far(whole.found({**inputs, "images": inputs["images"][:, ::-1].copy()}))
    assert far(whole.found({**inputs, "images": 0 * inputs["images"]}))
    with monkeypatch.context() as patched:  # both images are one block
        patched.setattr(image_places, "block_ids", lambda mask: keras.ops.cast(mask, "int32") - 1)
        assert far(whole.model(inputs))
    with monkeypatch.context() as patched:  # no image sees ahead
        patched.setattr(image_places, "block_ids", lambda mask: 0 * mask - 1)
        assert far(whole.model(inputs))


def test_a_packed_row_gives_what_its_texts_give_alone(whole):
    rows = [whole.expected[f"{case}_ids"][0] for case in ("one", "two", "none", "last")]
    images = whole.expected["images"]
    lengths = [len(row) for row in rows]
    inputs = {
        "token_ids": np.concatenate(rows)[None].astype("int32"),
        "segment_ids": np.repeat(np.arange(4), lengths)[None],
        "positions": np.concatenate([np.arange(n) for n in lengths])[None],
        "images": np.stack([images[0], images[0], images[1], images[0]])[None],
    }
    found = to_numpy(whole.model(inputs))[0]
    expected = np.concatenate([whole.logits(case) for case in ("one", "two", "none", "last")])
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT)


def test_greedy_tokens_are_transformers(whole):
    inputs = whole.inputs(*CASES)
    new = len(whole.expected["one_greedy"])
    found = whole.model.generate(inputs, max_new_tokens=new, stop_token_ids=None)["token_ids"]
    for row, case in zip(found, CASES, strict=True):
        start = len(whole.logits(case))
        np.testing.assert_array_equal(row[start : start + new], whole.expected[f"{case}_greedy"])


@pytest.mark.parametrize("case", ["two", "last"])
def test_logits_in_bfloat16_are_as_close_as_transformers(references, whole, case):
    model = Gemma3ImageTextLM.from_preset(whole.path, dtype="bfloat16")
    exact = whole.expected[f"{case}_logits64"]
    found = model.predict(whole.inputs(case), verbose=0)[:, -exact.shape[1] :]
    ours = np.abs(found - exact).mean()
    assert ours < 1.1 * np.abs(whole.expected[f"{case}_logits16"] - exact).mean()


def test_adapters_of_peft_both_ways(references, whole, tmp_path):
    folder = references / "gemma3_vision"
    expected = read_npz(folder / "adapter.npz")["logits"]
    model = Gemma3ImageTextLM.from_preset(folder / "model")
    model.load_adapter(folder / "adapter")
    found = model.predict(whole.inputs("two"), verbose=0)[:, -expected.shape[1] :]
    limit = LIMIT * max(1, np.abs(expected).max())
    assert np.abs(expected[0] - whole.logits("two")).max() > 100 * limit
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)
    model.save_adapter(tmp_path)
    written, read = (
        read_safetensors(place / "adapter_model.safetensors")
        for place in (tmp_path, folder / "adapter")
    )
    assert set(written) == set(read) and any("vision_tower" in name for name in read)
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name].read(), tensor.read())
