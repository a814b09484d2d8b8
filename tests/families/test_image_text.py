"""Models of texts and images in use, Gemma 3 and both kinds of Gemma 4."""

import keras
import numpy as np
import pytest

from kmodels import models
from kmodels.generation import BeamSampler
from kmodels.tools import plan
from refusals import refused
from tolerances import tolerance

LIMIT = tolerance("logits")
# Task, encoder, and the token of images, of each preset.
KINDS = {
    "gemma3_vision_debug": (models.Gemma3ImageTextLM, models.Gemma3VisionEncoder, 320),
    "gemma4_unified_debug": (models.Gemma4ImageTextLM, models.Gemma4VisionEmbedder, 310),
    "gemma4_vision_debug": (models.Gemma4ImageTextLM, models.Gemma4VisionEncoder, 310),
}
# (rows, columns) of the pieces of the images.
SHAPES = ((2, 3), (1, 4))
kinds = pytest.mark.parametrize("name", KINDS)
# The encoder with blocks, and none.
beams = pytest.mark.parametrize("name", ["gemma3_vision_debug", "gemma4_unified_debug"])


def batch(name, rows=2, images=1, seed=0):
    """Texts that begin with a token and the images behind it, with padding among patches."""
    draw = np.random.default_rng(seed)
    image = KINDS[name][-1]
    ids = draw.integers(3, 310, (rows, 18)).astype("int32")
    factor, side = (1, 4) if "unified" in name else (2, 2)
    pixels = np.zeros((rows, images, 8 * factor**2, side**2 * 3), "float32")
    places = np.full((rows, images, 8 * factor**2, 2), -1, "int32")
    at = 1
    for number in range(images):
        down, across = (2, 2) if name == "gemma3_vision_debug" else SHAPES[number]
        ids[:, at : at + down * across] = image
        at += down * across + 1
        count = down * across * factor**2
        pixels[:, number, :count] = draw.random((rows, count, side**2 * 3))
        numbers = np.arange(count)
        columns = across * factor
        places[:, number, :count] = np.stack([numbers % columns, numbers // columns], -1)
    seen = {"pixel_values": pixels, "pixel_position_ids": places}
    if name == "gemma3_vision_debug":
        seen = {"images": draw.normal(size=(rows, images, 16, 16, 3)).astype("float32")}
    mask = (ids == image).astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids), **seen, "vision_mask": mask}


def fresh(name):
    keras.utils.set_random_seed(3)
    return KINDS[name][0].from_preset(name, preprocessor=None)


def logits(model, inputs):
    return model.predict(inputs, verbose=0)


@kinds
def test_sizes_and_no_plan_of_memory(name):
    backbone = fresh(name).backbone
    assert backbone.count_params() < 100_000
    assert isinstance(backbone.vision_encoder, KINDS[name][1])
    assert [w.path for w in backbone.vision_encoder.weights] == [
        w.path for w in backbone.weights if w.path.startswith("vision_encoder/")
    ]
    refused("the memory of images is not planned", plan.Plan, name, plan.Setup(2, 16))


@kinds
def test_parts_may_be_frozen_or_adapted_alone(name):
    model = fresh(name)
    model.backbone.vision_encoder.trainable = False
    assert not any("vision_encoder" in w.path for w in model.trainable_weights)

    def adapted(targets):
        model = fresh(name)
        model.backbone.enable_lora(rank=2, targets=targets)
        return [w.path.rpartition("/")[0] for w in model.trainable_weights]

    paths = adapted(r"vision_encoder/.*")
    assert paths and all(path.startswith("vision_encoder/") for path in paths)
    assert not any("vision_encoder" in path for path in adapted(r"block_\d+/.*"))
    everywhere = set(adapted("all-linear"))
    if name == "gemma3_vision_debug":
        assert len(adapted(r"vision_encoder/.*/(query|value)")) == 8
        assert "vision_encoder/block_1/mlp/up" in everywhere
        assert not any("input_projection" in path for path in everywhere)
    else:
        assert {
            *("vision_encoder/input_projection", "vision_encoder/patch_embedding")
        } <= everywhere
        assert "unified" in name or "vision_encoder/block_1/gate" in everywhere


@beams
def test_beams_and_drafts_see_the_images(name):
    model = fresh(name)
    inputs = batch(name, images=2, seed=4)
    pixels = "images" if "images" in inputs else "pixel_values"
    given = {key: x for key, x in inputs.items() if key not in ("padding_mask", "vision_mask")}

    def generate(given=given, **more):
        return model.generate(given, max_new_tokens=6, stop_token_ids=None, **more)["token_ids"]

    alone = generate()
    for row in range(2):
        one = generate({key: x[row : row + 1] for key, x in given.items()})
        np.testing.assert_array_equal(one[0], alone[row])
    assert (generate({**given, pixels: 0 * given[pixels]}) != alone).any()
    np.testing.assert_array_equal(generate(prompt_lookup_num_tokens=2), alone)
    np.testing.assert_array_equal(generate(num_return_sequences=2)[::2], alone)
    model.compile(sampler=BeamSampler(num_beams=1))
    np.testing.assert_array_equal(generate(), alone)
    model.compile(sampler="contrastive")
    refused("ContrastiveSampler reads no images here", generate)


@kinds
def test_a_text_alone_is_a_text_of_the_decoder_and_more_rows_leave_images_alone(name):
    model, inputs = fresh(name), batch(name)
    ids = np.minimum(inputs["token_ids"], 309)
    names = {"images", "pixel_values", "pixel_position_ids"} & set(inputs)
    empty = {key: inputs[key][:, :0] for key in names}
    np.testing.assert_array_equal(logits(model, ids), logits(model, {"token_ids": ids, **empty}))
    before = logits(model, inputs)
    model.resize_token_embeddings(330)
    np.testing.assert_allclose(logits(model, inputs)[..., :320], before, rtol=0, atol=LIMIT)
    again = type(model.backbone).from_config(model.backbone.get_config())
    assert again.config == model.backbone.config and again.config.vocabulary_size == 330
