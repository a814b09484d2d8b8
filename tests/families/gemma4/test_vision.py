"""Gemma 4 with images: whether the references tell its rules, what it refuses, its layers alone."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from family_table import FAMILIES, IMAGE_TEXT_CASES
from forked_python import quick_python
from kmodels.core.errors import InputError
from kmodels.models import (
    Gemma4ImageTextBackbone,
    Gemma4ImageTextConfig,
    Gemma4ImageTextLM,
    Gemma4VisionEncoder,
)
from kmodels.models.blocks import decoder
from kmodels.models.gemma_vision.gemma4_encoder import ClippedDense
from kmodels.weights import read_safetensors
from python_process import run_python
from refusals import refused
from tolerances import tolerance

LIMIT = tolerance("logits")
NAMES = ("gemma4_unified_debug", "gemma4_vision_debug")


@pytest.fixture
def row(references):

    def of(name):
        (found,) = [row for row in FAMILIES if row.name == f"gemma4_vision/{name}"]
        found.root = references
        return found

    return of


def test_it_may_be_the_first_model_of_a_process():
    """Its backbone inherits from another one in two ways."""
    program = "from kmodels.models import Gemma4ImageTextLM as LM; LM.from_preset({!r})"
    done = run_python("-c", program.format(NAMES[0]), python=quick_python())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["unified", "tower", "tower_small"])
def test_each_rule_counts(row, name, monkeypatch):
    """Without a rule the logits are not those of the reference, which would tell."""
    whole = row(name)
    model, inputs, right = whole.read(), whole.inputs("two"), whole.expected["two_logits"][0]

    def far(**changes):
        found = to_numpy(model({**inputs, **changes}))[0, -len(right) :]
        return np.abs(found - right).max() > 100 * LIMIT

    assert not far()
    pixels, places = inputs["pixel_values"], inputs["pixel_position_ids"]
    assert far(pixel_values=pixels[:, ::-1].copy(), pixel_position_ids=places[:, ::-1].copy())
    assert far(pixel_values=0 * pixels)
    assert far(pixel_position_ids=np.where(places < 0, -1, places[..., ::-1]))
    # What padding holds reaches nothing.
    filled = np.where((places < 0).all(-1)[..., None], 7.0, pixels).astype("float32")
    assert not far(pixel_values=filled)
    adapter = read_safetensors(whole.path.parent / "adapter" / "adapter_model.safetensors")
    assert {"vision" in key for key in adapter} == {True, False}
    steps = model.backbone._steps
    looks = list(steps.looks)
    assert any(looks) == (name != "tower_small")
    if name == "tower_small":
        return
    for other in ([True] * 4, [False] * 4):  # global layers look ahead as well, or none does
        steps.looks[:] = other
        assert far()
    steps.looks[:] = looks
    with monkeypatch.context() as patched:  # both images are one block
        block_ids = decoder.block_ids
        patched.setattr(decoder, "block_ids", lambda mask: block_ids(mask) * 0 + mask - 1)
        assert far()
    assert not far()


def test_windows_end_within_an_image_and_images_that_see_as_texts_do_need_no_rule(row):
    whole = row("unified")
    count = int((whole.expected["two_ids"][0] == whole.image).sum())
    assert whole.model.backbone.config.sliding_window_size < count // 2
    # Where nothing looks ahead, the plain forward of transformers gives the same numbers.
    expected = row("unified_causal").expected
    for case in IMAGE_TEXT_CASES:
        np.testing.assert_array_equal(expected[f"{case}_plain"], expected[f"{case}_logits"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_encoder": None}, "vision_encoder is missing; give the arguments of Gemma4Vision"),
        ({"use_bidirectional_attention": True}, "set use_vision_bidirectional_attention"),
        ({"vision_encoder": {"hidden_dim": 8, "pool_size": 0}}, "pool_size is 0; give at least 1"),
        ({"vision_encoder": {"head_dim": 6}}, "head_dim is 6; .* a multiple of 4"),
        ({"vision_encoder": {"num_key_value_heads": 3}}, "3 key/value heads do not divide 2 query"),
    ],
)
def test_configs_that_do_not_fit(change, message):
    config = {**Gemma4ImageTextLM.presets[NAMES[1]]}
    encoder = change.get("vision_encoder")
    if encoder and "pool_size" not in encoder:
        change = {"vision_encoder": {**config["vision_encoder"], **encoder}}
    refused(message, Gemma4ImageTextConfig, **{**config, **change})


def test_inputs_that_do_not_fit(row):
    whole = row("unified")
    inputs = whole.inputs("two")
    pixels, places = inputs["pixel_values"], inputs["pixel_position_ids"]
    for change, message in (
        ({"pixel_values": None}, "the model got pixel_position_ids alone; give pixel_values and"),
        ({"pixel_values": pixels[..., :12]}, "have patches of 12 numbers, and the"),
        (
            {"pixel_position_ids": np.where(np.arange(14)[:, None] > 10, -1, places)},
            "row 0 has 22 tokens for images, and its images have 21 pieces; give as many",
        ),
    ):
        refused(message, whole.model, {**inputs, **change})
    config = whole.model.backbone.get_config()
    with pytest.raises(InputError, match="vision_encoder is 3; give a vision encoder"):
        Gemma4ImageTextBackbone(**{**config, "vision_encoder": 3})


def test_the_names_of_presets():
    # The names of the texts alone are those of keras-hub, which has both under one.
    for text in ("gemma4_12b", "gemma4_31b", "gemma4_26b_a4b", "gemma4_e2b", "gemma4_e4b"):
        config = Gemma4ImageTextConfig(**Gemma4ImageTextLM.presets[text])
        assert config.vocabulary_size == 262_144
        assert config.use_vision_bidirectional_attention == (text[:8] != "gemma4_e")


def test_layers_alone(row, tmp_path):
    """Bounds bite and are kept, and each layer is made again from its config."""
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
    dense = ClippedDense(5)
    y = to_numpy(dense(x))
    np.testing.assert_allclose(y, x @ to_numpy(dense.kernel), atol=tolerance("hidden"))
    for name, value in (("input_min", -0.3), ("input_max", 0.4), ("output_max", 0.2)):
        getattr(dense, name).assign(value)
    wanted = np.minimum(np.clip(x, -0.3, 0.4) @ to_numpy(dense.kernel), 0.2)
    np.testing.assert_allclose(to_numpy(dense(x)), wanted, atol=tolerance("hidden"))
    assert np.abs(wanted - y).max() > 0.1
    inputs = keras.Input((8,))
    model = keras.Model(inputs, dense(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(to_numpy(again(x)), to_numpy(model(x)))
    assert len(again.trainable_weights) == 1 and len(again.weights) == 5
    small = Gemma4ImageTextLM.from_preset(NAMES[1], preprocessor=None)
    given = [row("tower").inputs("two")[name] for name in ("pixel_values", "pixel_position_ids")]
    for layer in (
        small.backbone.vision_encoder,
        Gemma4VisionEncoder(
            None, 2, 4, 8, 1, 12, 4, 6, num_key_value_heads=2, pool_size=2, dropout=0.2
        ),
    ):
        other = type(layer).from_config(layer.get_config())
        found = layer(*given)
        assert found.shape == layer.compute_output_shape(*(x.shape for x in given))
        other.build(*(x.shape for x in given))
        other.set_weights(layer.get_weights())
        np.testing.assert_array_equal(to_numpy(other(*given)), to_numpy(found))
