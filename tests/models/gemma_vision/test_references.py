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
LIMIT = tolerance("logits")
IMAGE, TOKENS = 160, 9


class Reference:
    def __init__(self, folder):
        self.path = folder / "model"
        self.expected = read_npz(folder / "expected.npz")
        self.model = Gemma3ImageTextLM.from_preset(self.path)

    def inputs(self, *cases, room=0):
        """A batch of cases, each behind some padding, with as many images as the most have."""
        rows = [self.expected[f"{case}_ids"][0] for case in cases]
        length = max(map(len, rows)) + room
        counts = [(row == IMAGE).sum() // TOKENS for row in rows]
        images = np.zeros((len(rows), max(counts), 24, 24, 3), "float32")
        ids, mask = (np.zeros((len(rows), length), "int32") for _ in range(2))
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            ids[number, length - len(row) :], mask[number, length - len(row) :] = row, 1
            images[number, :count] = self.expected["images"][:count]
        seen = (ids == IMAGE).astype("int32")
        return {"token_ids": ids, "padding_mask": mask, "images": images, "vision_mask": seen}

    def logits(self, case):
        return self.expected[f"{case}_logits"][0]


@pytest.fixture(scope="module")
def whole(references):
    return Reference(references / "gemma3_vision")


def test_features_of_images_are_transformers(whole):
    found = to_numpy(whole.model.backbone.vision_encoder(whole.expected["images"][None]))
    expected = whole.expected["features"].reshape(1, -1, found.shape[-1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance("hidden"))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers(whole, case):
    found = to_numpy(whole.model(whole.inputs(case)))[0]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, whole.logits(case), rtol=0, atol=LIMIT)


def test_rows_of_a_batch_are_as_alone(whole):
    found = whole.model.predict(whole.inputs(*CASES, room=3), verbose=0)
    for row, case in zip(found, CASES, strict=True):
        expected = whole.logits(case)
        np.testing.assert_allclose(row[-len(expected) :], expected, rtol=0, atol=LIMIT)


def test_places_of_images_may_come_as_keras_hub_gives_them_or_not_at_all(whole):
    inputs = whole.inputs("two", "one")
    mask = inputs.pop("vision_mask")
    expected = to_numpy(whole.model({**inputs, "vision_mask": mask}))
    places = np.zeros((2, 2 * TOKENS), "int32")
    for row, there in zip(places, mask, strict=True):
        row[: there.sum()] = np.flatnonzero(there)
    np.testing.assert_array_equal(to_numpy(whole.model(inputs)), expected)
    np.testing.assert_array_equal(
        to_numpy(whole.model({**inputs, "vision_indices": places})), expected
    )


def test_each_rule_of_who_sees_whom_counts(whole, monkeypatch):
    inputs = whole.inputs("two")
    right = to_numpy(whole.model(inputs))

    def far(other):
        return np.abs(to_numpy(other) - right).max() > 100 * LIMIT

    assert far(whole.model({**inputs, "images": inputs["images"][:, ::-1].copy()}))
    assert far(whole.model({**inputs, "images": 0 * inputs["images"]}))
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
    inputs = whole.inputs(*CASES, room=2)
    new = len(whole.expected["one_greedy"])
    found = whole.model.generate(inputs, max_new_tokens=new, stop_token_ids=None)["token_ids"]
    for row, case in zip(found, CASES, strict=True):
        start = len(whole.logits(case))
        np.testing.assert_array_equal(row[start : start + new], whole.expected[f"{case}_greedy"])


@pytest.mark.parametrize("case", ["two", "last"])
def test_logits_in_bfloat16_are_as_close_as_transformers(references, whole, case):
    model = Gemma3ImageTextLM.from_preset(whole.path, dtype="bfloat16")
    exact = whole.expected[f"{case}_logits64"]
    ours = np.abs(to_numpy(model(whole.inputs(case))) - exact).mean()
    assert ours < 1.1 * np.abs(whole.expected[f"{case}_logits16"] - exact).mean()


def test_adapters_of_peft_both_ways(references, whole, tmp_path):
    folder = references / "gemma3_vision"
    expected = read_npz(folder / "adapter.npz")["logits"]
    model = Gemma3ImageTextLM.from_preset(folder / "model")
    model.load_adapter(folder / "adapter")
    found = to_numpy(model(whole.inputs("two")))
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
