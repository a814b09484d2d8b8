"""keras-hub's Gemma 3 with its vision encoder: there and back, what it lacks, its arguments."""

from importlib import import_module

import numpy as np
import pytest

import hub_models
from arrays import to_numpy
from kmodels.interop import keras_hub
from kmodels.models import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3ImageTextBackbone,
    Gemma3ImageTextLM,
    Gemma3VisionEncoder,
)
from refusals import refused
from tolerances import tolerance

HUB = [pytest.mark.needs("keras_hub"), pytest.mark.across("torch", "jax", "tensorflow")]
ONCE = [pytest.mark.needs("keras_hub"), pytest.mark.across("torch")]
LIMIT = tolerance("logits")


def marked(marks):
    def mark(test):
        for one in marks:
            test = one(test)
        return test

    return mark


everywhere, once = marked(HUB), marked(ONCE)


@pytest.fixture(scope="module")
def models():
    return import_module("keras_hub").models


@pytest.fixture(scope="module")
def pair(models):
    theirs = hub_models.make("gemma3_vision", models)
    return theirs, keras_hub.from_hub(theirs)


def output(model, x):
    return np.asarray(hub_models.output(model, x), "float32")


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.parametrize(
    "images", [pytest.param(0, marks=ONCE), pytest.param(1, marks=ONCE), pytest.param(2, marks=HUB)]
)
def test_logits_are_keras_hubs(pair, images):
    theirs, ours = pair
    assert type(ours) is Gemma3ImageTextLM
    x = hub_models.with_images(images)
    wanted = output(theirs, x)
    np.testing.assert_allclose(output(ours, x), wanted, rtol=0, atol=LIMIT)
    if images:  # what an image shows, and where, counts
        for name in ("images", "vision_indices"):
            other = {**x, name: x[name][:, ::-1] if images == 2 else x[name] * 0}
            assert np.abs(output(theirs, other) - wanted).max() > 100 * LIMIT
    else:
        without = {**x, "images": x["images"][:, :0]}
        np.testing.assert_allclose(output(ours, without), wanted, rtol=0, atol=LIMIT)


@once
def test_the_text_alone_where_it_is_asked_for(pair):
    theirs, whole = pair
    ours = keras_hub.from_hub(theirs, text_only=True)
    assert type(ours) is Gemma3CausalLM
    keras_hub.compare(ours, theirs)
    x = hub_models.with_images(0)
    text = {name: x[name] for name in ("token_ids", "padding_mask")}
    np.testing.assert_allclose(output(ours, text), output(whole, x), rtol=0, atol=LIMIT)


@once
def test_presets_go_both_ways(pair, tmp_path):
    theirs, ours = pair
    theirs.save_to_preset(str(tmp_path / "theirs"))
    again = keras_hub.from_hub(tmp_path / "theirs")
    keras_hub.compare(again, theirs)
    assert again.backbone.config == ours.backbone.config
    back = keras_hub.to_hub(again)
    back.save_to_preset(str(tmp_path / "ours"))
    x = hub_models.with_images(2)
    held = type(back).from_preset(str(tmp_path / "ours"), preprocessor=None)
    np.testing.assert_array_equal(output(held, x), output(theirs, x))


@once
def test_a_changed_number_of_the_encoder_is_named(models):
    theirs = hub_models.make("gemma3_vision", models)
    ours = keras_hub.from_hub(theirs)
    name = "vision_output_encoder/vision_soft_embedding_norm/scale"
    variable = next(v for v in theirs.weights if v.path.endswith(name))
    variable.assign(to_numpy(variable) + 1e-3)
    refused(f"different: {name}$", keras_hub.compare, ours, theirs)


@pytest.mark.nightly("jax", "tensorflow")
@everywhere
def test_an_encoder_in_float32_stays_so_beside_bfloat16(models):
    theirs = hub_models.gemma_3_vision(models, "bfloat16")
    hub_models.randomize(theirs)
    ours = keras_hub.from_hub(theirs)
    kinds = {w.path.startswith("vision_encoder/"): str(w.dtype) for w in ours.weights}
    assert kinds == {True: "float32", False: "bfloat16"}
    keras_hub.compare(ours, keras_hub.to_hub(ours))
    exact = hub_models.gemma_3_vision(models)
    for one, other in zip(exact.weights, theirs.weights, strict=True):
        one.assign(to_numpy(other))
    x = hub_models.with_images(2)
    wanted = output(exact, x)
    mean = [np.abs(output(model, x) - wanted).mean() for model in (ours, theirs)]
    assert mean[0] < 1.1 * mean[1]
    # One that is bfloat16 throughout keeps that there: the policy is given as an object.
    whole = Gemma3ImageTextLM.from_preset("gemma3_vision_debug", num_layers=1, dtype="bfloat16")
    back = keras_hub.to_hub(whole)
    assert {str(w.dtype) for w in back.weights} == {"bfloat16"}
    again = keras_hub.from_hub(back)
    assert "dtype" not in again.backbone.config.vision_encoder


@once
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"encoder": {"layer_norm_epsilon": 1e-5}}, "layer_norm_epsilon=1e-05 of the vision enc"),
        ({"sliding_window_size": 3}, "images of 4 tokens beside sliding_window_size=3"),
        ({"layer_norm_epsilon": 1e-5}, "for Gemma3Backbone with layer_norm_epsilon=1e-05$"),
    ],
)
def test_what_keras_hub_ignores_or_does_otherwise_is_refused(models, changes, named):
    refused(named, keras_hub.from_hub, hub_models.gemma_3_vision(models, **changes))


ENCODER = {**hub_models.SEEN, "hidden_dim": 24, "intermediate_dim": 40}


@once
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window_pattern": 2}, "sliding_window_pattern=2"),
        ({"global_rope_wavelength": 5e5}, "global_rope_wavelength=500000.0"),
        ({"local_rope_wavelength": 5e5}, "local_rope_wavelength=500000.0"),
        ({"sliding_window_size": 3}, "images of 4 tokens beside sliding_window_size=3"),
        (
            {"vision_encoder": {**ENCODER, "attention_dropout": 0.1}},
            "attention_dropout=0.1 of the vision encoder",
        ),
        (
            {"vision_encoder": {**ENCODER, "layer_norm_epsilon": 1e-5}},
            "layer_norm_epsilon=1e-05 of the vision encoder",
        ),
    ],
)
def test_what_keras_hub_lacks_is_named(changes, named):
    held = {"sliding_window_pattern": 6, "num_layers": 6, **changes}
    ours = Gemma3ImageTextLM.from_preset("gemma3_vision_debug", load_weights=False, **held)
    refused(f"Gemma3Backbone has no counterpart for {named}$", keras_hub.to_hub, ours)


@once
def test_windows_that_cut_an_image_are_why(models):
    """keras-hub's windows do cut it, so that the refusal is not for nothing."""
    theirs = hub_models.gemma_3_vision(models, sliding_window_size=4)
    hub_models.randomize(theirs)
    ours = keras_hub.from_hub(theirs)
    narrow = hub_models.gemma_3_vision(models, sliding_window_size=3)
    for one, other in zip(narrow.weights, theirs.weights, strict=True):
        one.assign(to_numpy(other))
    config = {**ours.backbone.config.to_dict(), "sliding_window_size": 3}
    mine = Gemma3ImageTextLM(Gemma3ImageTextBackbone(**config), preprocessor=None)
    mine.set_weights(ours.get_weights())
    x = hub_models.with_images(1)
    assert np.abs(output(mine, x) - output(narrow, x)).max() > 100 * LIMIT


ARGUMENTS = {**hub_models.GEMMA, "num_layers": 7, "intermediate_dim": 48, "image_size": 16}


@pytest.mark.parametrize("given", ["layer", "serialized", "mapping"])
def test_arguments_are_keras_hubs(given):
    import keras

    layer = Gemma3VisionEncoder(**ENCODER, output_dim=24)
    encoder = {
        "layer": layer,
        "serialized": keras.saving.serialize_keras_object(layer),
        "mapping": ENCODER,
    }[given]
    backbone = Gemma3ImageTextBackbone(
        **ARGUMENTS,
        vision_encoder=encoder,
        query_head_dim_normalize=True,
        use_sliding_window_attention=True,
        is_embedding_model=False,
        pooling_intermediate_dim=None,
        embedding_dim=None,
        dtype="bfloat16",
    )
    config, text = backbone.config, Gemma3Backbone(**ARGUMENTS).config
    assert config.mlp_dim == 48 and config.use_query_key_norm
    assert config.sliding_window_pattern == 6 and config.global_rope_wavelength == 1e6
    assert config.sliding_window_size == text.sliding_window_size == 1024
    assert {str(w.dtype) for w in backbone.weights} == {"bfloat16"}


@once
def test_keras_hubs_own_encoder_and_config(models):
    theirs = hub_models.gemma_3_vision(models).backbone
    held = theirs.get_config()
    encoder = theirs.vision_encoder
    names = ("name", "trainable", "vision_encoder", "dtype")
    more = {name: x for name, x in held.items() if name not in names}
    ours = Gemma3ImageTextBackbone(**more, vision_encoder=encoder)
    assert ours.config == keras_hub.from_hub(theirs).config
    keras_hub.to_hub(ours)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 32}, "image_size is 32 and that of the vision encoder 16"),
        ({"vision_encoder": 1}, "vision_encoder is 1; give a vision encoder"),
        ({"is_embedding_model": True}, "give it to GemmaTextEmbedder"),
    ],
)
def test_arguments_that_do_not_fit(changes, message):
    refused(message, Gemma3ImageTextBackbone, **{**ARGUMENTS, "vision_encoder": ENCODER, **changes})


def test_keras_hubs_one_class_makes_the_one_that_sees():
    backbone = Gemma3Backbone(**ARGUMENTS, vision_encoder=ENCODER)
    assert type(backbone) is Gemma3ImageTextBackbone
    assert type(Gemma3CausalLM(None, backbone)) is Gemma3ImageTextLM
    assert type(Gemma3CausalLM(None, Gemma3Backbone(**ARGUMENTS))) is Gemma3CausalLM


@once
def test_adapters_of_keras_hub_reach_both_halves(models, tmp_path):
    theirs = hub_models.make("gemma3_vision", models)
    ours = keras_hub.from_hub(theirs)
    theirs.backbone.enable_lora(2)
    draw = np.random.default_rng(3)
    for weight in theirs.backbone.weights:
        if "lora_kernel" in weight.path:
            weight.assign(draw.normal(size=tuple(weight.shape)) * 0.3)
    theirs.backbone.save_lora_weights(str(tmp_path / "x.lora.h5"))
    x = hub_models.with_images(2)
    before = output(ours, x)
    keras_hub.read_lora(ours, tmp_path / "x.lora.h5")
    np.testing.assert_allclose(output(ours, x), output(theirs, x), rtol=0, atol=LIMIT)
    assert np.abs(output(ours, x) - before).max() > 100 * LIMIT
    paths = {weight.path.partition("/")[0] for weight in ours.trainable_weights}
    assert {"vision_encoder", "block_0"} <= paths
