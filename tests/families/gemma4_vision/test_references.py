"""Gemma 4 with images, beside transformers' on texts with no, one and two images of any shape."""

import numpy as np
import pytest

from arrays import read_npz, to_numpy
from gemma4_vision_case import CASES, IMAGE, LENGTH, Reference
from kmodels.models import Gemma4ImageTextLM
from kmodels.models.common.image_text import images as image_places
from kmodels.weights import read_safetensors
from tolerances import tolerance

LIMIT = tolerance("logits")
# Two of the models have parts for sounds too, which are left out; see test_model.py.
once = pytest.mark.once
pytestmark = pytest.mark.filterwarnings("ignore:.*the model takes only text and images")


@pytest.fixture(scope="module")
def held(references):
    return {}


@pytest.fixture
def read(references, held):
    """Reads a model once for the whole module."""

    def one(name):
        if name not in held:
            held[name] = Reference(references, name)
        return held[name]

    return one


@pytest.mark.parametrize(
    "name", ["unified", "tower", "tower_small", pytest.param("unified_causal", marks=once)]
)
def test_features_logits_and_greedy_tokens_are_transformers(read, name):
    whole = read(name)
    inputs = whole.inputs(*CASES)
    found = whole.found(inputs)
    assert found.dtype == np.float32
    for row, case in zip(found, CASES, strict=True):
        expected = whole.logits(case)
        np.testing.assert_allclose(row[-len(expected) :], expected, rtol=0, atol=LIMIT)
    if name == "unified_causal":
        return
    pixels, places = whole.expected["pixel_values"][None], whole.expected["places"][None]
    features = to_numpy(whole.model.backbone.vision_encoder(pixels, places.astype("int32")))[0]
    expected = np.concatenate([whole.expected[f"features_{number}"] for number in range(3)])
    np.testing.assert_allclose(
        features[: len(expected)],
        expected,
        rtol=0,
        atol=tolerance("hidden") * np.abs(expected).max(),
    )
    new = len(whole.expected["one_greedy"])
    rows = whole.model.generate(inputs, max_new_tokens=new, stop_token_ids=None)["token_ids"]
    for row, case in zip(rows, CASES, strict=True):
        start = len(whole.logits(case))
        np.testing.assert_array_equal(row[start : start + new], whole.expected[f"{case}_greedy"])


@pytest.mark.parametrize("name", [pytest.param("unified", marks=once), "tower_small"])
def test_a_packed_row_gives_what_its_texts_give_alone(read, name):
    whole, cases = read(name), ("one", "two", "none", "last")
    rows = [whole.expected[f"{case}_ids"][0] for case in cases]
    pictures = [whole.pictures(case) for case in cases]
    lengths = [len(row) for row in rows]
    inputs = {
        "token_ids": np.concatenate(rows)[None].astype("int32"),
        "segment_ids": np.repeat(np.arange(4), lengths)[None].astype("int32"),
        "positions": np.concatenate([np.arange(n) for n in lengths])[None].astype("int32"),
        "pixel_values": np.concatenate([pixels for pixels, _ in pictures])[None],
        "pixel_position_ids": np.concatenate([x for _, x in pictures])[None].astype("int32"),
    }
    found = whole.found(inputs)[0]
    expected = np.concatenate([whole.logits(case) for case in cases])
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT)


@once
def test_places_of_tokens_may_come_as_keras_hub_gives_them_or_not_at_all(read):
    whole = read("tower")
    inputs = whole.inputs("two", "one")
    mask = inputs.pop("vision_mask")
    expected = whole.found({**inputs, "vision_mask": mask})
    places = np.zeros((2, 2 * 14), "int32")
    for row, there in zip(places, mask, strict=True):
        row[: there.sum()] = np.flatnonzero(there)
    np.testing.assert_array_equal(whole.found(inputs), expected)
    np.testing.assert_array_equal(whole.found({**inputs, "vision_indices": places}), expected)


@pytest.mark.once  # whether the reference would tell
@once
@pytest.mark.parametrize("name", ["unified", "tower", "tower_small"])
def test_each_rule_counts(read, name, monkeypatch):
    whole = read(name)
    inputs = whole.inputs("two")
    right, there = whole.logits("two"), slice(LENGTH - len(whole.logits("two")), None)

    def far(**changes):
        found = to_numpy(whole.model({**inputs, **changes}))[0, there]
        return np.abs(found - right).max() > 100 * LIMIT

    assert not far()
    pixels, places = inputs["pixel_values"], inputs["pixel_position_ids"]
    assert far(pixel_values=pixels[:, ::-1].copy(), pixel_position_ids=places[:, ::-1].copy())
    assert far(pixel_values=0 * pixels)
    assert far(pixel_position_ids=np.where(places < 0, -1, places[..., ::-1]))
    # What padding holds reaches nothing.
    filled = np.where((places < 0).all(-1)[..., None], 7.0, pixels).astype("float32")
    assert not far(pixel_values=filled)
    steps = whole.model.backbone._steps
    looks = list(steps.looks)
    assert any(looks) == (name != "tower_small")
    if name == "tower_small":
        return
    for other in ([True] * 4, [False] * 4):  # global layers look ahead as well, or none does
        steps.looks[:] = other
        assert far()
    steps.looks[:] = looks
    with monkeypatch.context() as patched:  # both images are one block
        block_ids = image_places.block_ids
        patched.setattr(image_places, "block_ids", lambda mask: block_ids(mask) * 0 + mask - 1)
        assert far()
    assert not far()


@once
def test_images_that_see_as_texts_do_need_no_rule(read):
    # Where nothing looks ahead, the plain forward of transformers gives the same numbers.
    whole = read("unified_causal")
    for case in CASES:
        np.testing.assert_array_equal(whole.expected[f"{case}_plain"][0], whole.logits(case))


@pytest.mark.parametrize("name", [pytest.param("unified", marks=once), "tower_small"])
def test_logits_in_bfloat16_are_as_close_as_transformers(read, name):
    whole = read(name)
    model = Gemma4ImageTextLM.from_preset(whole.path, dtype="bfloat16")
    found = model.predict(whole.inputs(*CASES), verbose=0)
    ours = theirs = 0.0
    for row, case in zip(found, CASES, strict=True):
        exact = whole.expected[f"{case}_logits64"][0]
        ours += np.abs(row[-len(exact) :] - exact).sum()
        theirs += np.abs(whole.expected[f"{case}_logits16"][0] - exact).sum()
    assert ours < 1.1 * theirs


@once
@pytest.mark.parametrize("name", ["unified", "tower", "tower_small"])
def test_adapters_of_peft_both_ways(read, name, tmp_path):
    whole = read(name)
    expected = read_npz(whole.folder / "adapter.npz")["logits"]
    model = Gemma4ImageTextLM.from_preset(whole.path)
    model.load_adapter(whole.folder / "adapter")
    found = model.predict(whole.inputs("two"), verbose=0)[:, -expected.shape[1] :]
    assert np.abs(expected[0] - whole.logits("two")).max() > 100 * LIMIT
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT)
    model.save_adapter(tmp_path)
    written, theirs = (
        read_safetensors(place / "adapter_model.safetensors")
        for place in (tmp_path, whole.folder / "adapter")
    )
    assert set(written) == set(theirs)
    assert {"vision" in key for key in theirs} == {True, False}
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(written[key].read(), tensor.read())


@once
def test_the_window_ends_within_an_image(read):
    whole = read("unified")
    window = whole.model.backbone.config.sliding_window_size
    count = int((whole.expected["two_ids"][0] == IMAGE).sum())
    assert window < count // 2
