"""CLIP's text tower beside transformers: what tests/family_table.py does not compare."""

import json

import numpy as np
import pytest

from arrays import assert_equal, read_npz, to_numpy
from family_table import row_of
from kmodels.core.errors import InputError
from kmodels.models import (
    CLIPTextConfig,
    CLIPTextEncoder,
    CLIPTextModelWithProjection,
    CLIPVisionEncoder,
    ViTImageClassifier,
)
from kmodels.models.clip import PRESETS
from kmodels.weights import LazyArray, read_safetensors, write_safetensors
from refusals import refused
from tolerances import tolerance

SIZES = {
    "vocabulary_size": 24, "embedding_dim": 16, "hidden_dim": 16, "num_layers": 2, "num_heads": 4,
    "intermediate_dim": 20, "intermediate_activation": "gelu", "intermediate_output_index": None,
    "max_sequence_length": 9,
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 24, (4, 7))


def near(found, expected, what="hidden"):
    found = to_numpy(found)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance(what))


def test_the_rule_of_the_end_token(references):
    """Each rule gives the numbers of its own config, and far other ones for the other's."""
    for name, own, other in (("projected", 40, None), ("legacy", None, 40)):
        row = row_of(f"clip/{name}", references)
        expected, inputs = row.expected["pooled"], row.inputs
        model = row.read(projection_dim=None)
        assert model.backbone.config.end_token_id == own
        near(model(inputs), expected)
        near(model(inputs["token_ids"]), row.expected["pooled_all"])
        # A token in the middle of the first row is masked.
        assert np.abs(expected - row.expected["pooled_all"])[0].max() > 0.05
        wrong = to_numpy(row.read(projection_dim=None, end_token_id=other)(inputs))
        assert np.abs(wrong - expected)[0].max() > 100 * tolerance("hidden")
        # The other rows have one end token, or several of which the first counts, and none above.
        near(wrong[1:], expected[1:])


# === Hugging Face, both ways ===


def test_files_of_transformers_4(references, tmp_path):
    """Bare models had a prefix there, and kept places beside the weights."""
    source = references / "clip" / "bare" / "model"
    old = {f"text_model.{name}": x for name, x in read_safetensors(source).items()}
    places = {"text_model.embeddings.position_ids": np.arange(12)[None]}
    write_safetensors(tmp_path / "model.safetensors", _lazy(places) | old)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    assert_equal(*(CLIPTextEncoder.from_preset(x).weights for x in (source, tmp_path)))


def _lazy(arrays):
    return {name: LazyArray(x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}


def test_unknown_and_missing_tensors_are_named(references, tmp_path):
    source = references / "clip" / "projected" / "model"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = dict(read_safetensors(source))
    write_safetensors(
        tmp_path / "model.safetensors", tensors | _lazy({"text_model.more": np.ones(2, "float32")})
    )
    with pytest.raises(InputError, match=r"1 tensors without a variable: text_model\.more"):
        CLIPTextModelWithProjection.from_preset(tmp_path)
    del tensors["text_model.final_layer_norm.bias"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    refused("1 variables without a tensor: final_norm/bias", CLIPTextEncoder.from_preset, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; the model supports gelu"),
        ({"eos_token_id": [2, 40]}, r"eos_token_id is \[2, 40\]; the model supports one number"),
    ],
)
def test_settings_without_counterpart_are_named(references, tmp_path, change, message):
    text = json.loads((references / "clip" / "bare" / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, **change}))
    refused(message, CLIPTextEncoder.from_preset, tmp_path, load_weights=False)
    with pytest.raises(InputError, match="pools at the highest id where end_token_id is 2"):
        CLIPTextEncoder(**SIZES, end_token_id=2).export_to_transformers(tmp_path / "out")


def test_a_config_of_both_towers_says_all(references, tmp_path):
    """`text_config_dict` counts in place of `text_config`, and what is left out has defaults.

    The same is true of the other tower.
    """
    text = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    description = {"model_type": "clip", "text_config": {"hidden_size": 8}, "projection_dim": 6}
    description |= {"text_config_dict": text, "logit_scale_init_value": 1.5}
    (tmp_path / "config.json").write_text(json.dumps(description))
    model = CLIPTextModelWithProjection.from_preset(tmp_path, load_weights=False)
    assert model.settings == {"projection_dim": 6, "logit_scale": 1.5}
    assert model.backbone.config == CLIPTextConfig(49_408, 32, 32, 1, 4, 2048, end_token_id=49_407)
    description |= {"vision_config_dict": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(description))
    sizes = CLIPVisionEncoder.from_preset(tmp_path, load_weights=False).config
    found = (sizes.hidden_dim, sizes.num_heads, sizes.num_layers, sizes.mlp_dim, sizes.patch_size)
    assert found == (32, 4, 1, 3072, 32)


# === Zero-shot classification ===


@pytest.mark.each_backend
def test_logits_per_image_are_those_of_transformers(references):
    folder = references / "clip" / "both"
    expected = read_npz(folder / "expected.npz")
    with pytest.warns(UserWarning, match="does not say how its images are normalised"):
        images = ViTImageClassifier.from_preset(folder / "model")
    texts = CLIPTextModelWithProjection.from_preset(folder / "model")
    assert texts.logit_scale == 2.0
    given = {name: expected[name].astype("int32") for name in ("token_ids", "padding_mask")}
    logits = texts.logits_per_image(images(expected["images"]), texts(given))
    near(logits, expected["logits_per_image"], "logits")
    embeds = images.predict(expected["images"], verbose=0), texts.predict(given, verbose=0)
    near(texts.logits_per_image(*embeds), expected["logits_per_image"], "logits")


# === As a model of Keras ===


def test_dropout_of_attention_acts_in_training_alone():
    model = CLIPTextEncoder(**SIZES, attention_dropout=0.5)
    outputs = [to_numpy(model(IDS, training=training)) for training in (False, False, True)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert np.abs(outputs[0] - outputs[2]).max() > 1e-3


@pytest.mark.parametrize("index", [1, -1])
def test_an_intermediate_output(index, tmp_path):
    sizes = {**SIZES, "intermediate_output_index": index}
    backbone = CLIPTextEncoder(**sizes)
    found = backbone(IDS)
    assert set(found) == {"sequence_output", "intermediate_output"}
    steps = backbone.intermediates(IDS)
    np.testing.assert_array_equal(
        to_numpy(found["intermediate_output"]), to_numpy(steps["block_1"])
    )
    plain = CLIPTextEncoder(**SIZES)
    plain.set_weights(backbone.get_weights())
    near(found["sequence_output"], to_numpy(plain(IDS)))
    models = [CLIPTextModelWithProjection(x, projection_dim=None) for x in (backbone, plain)]
    near(models[0](IDS), to_numpy(models[1](IDS)))
    models[0].save_to_preset(tmp_path / "model")
    again = CLIPTextModelWithProjection.from_preset(tmp_path / "model")
    assert again.backbone.config == backbone.config
    near(again(IDS), to_numpy(models[0](IDS)))


def test_positional_arguments_are_in_keras_hubs_order():
    backbone = CLIPTextEncoder(*SIZES.values())
    assert {name: getattr(backbone.config, name) for name in SIZES} == SIZES
    assert {name: getattr(backbone, name) for name in SIZES} == SIZES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_dim": 8}, "embedding_dim is 8 and hidden_dim 16"),
        ({"num_heads": 3}, "3 heads do not divide the width of 16"),
        ({"intermediate_activation": "relu"}, "intermediate_activation is 'relu'; choose one of"),
        ({"intermediate_output_index": 2}, "index is 2; give one of the 2 blocks, from -2 to 1"),
        ({"attention_dropout": 1.0}, r"attention_dropout is 1\.0; give a rate"),
        ({"end_token_id": -1}, "end_token_id is -1; give at least 0"),
        ({"num_positions": 3}, "takes no num_positions"),
    ],
)
def test_a_config_is_checked(change, message):
    refused(message, CLIPTextEncoder, **{**SIZES, **change})


def test_wrong_inputs_are_refused():
    backbone = CLIPTextEncoder(**SIZES)
    with pytest.raises(InputError, match=r"a row of 10 tokens is longer than the 9 positions"):
        backbone(np.zeros((1, 10), "int32"))
    refused("it needs token_ids, and takes padding_mask too", backbone, {"padding_mask": IDS})


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Those of transformers' models of the published configs, with their projections.
    [
        ("clip_text_base", 63_428_096),
        ("clip_text_large", 123_650_304),
        ("clip_text_huge", 354_032_640),
        ("clip_text_bigg", 694_659_840),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
    fields = dict(PRESETS[name])
    width = fields.pop("task_projection_dim")
    c = CLIPTextConfig(**fields)
    block = 4 * width * (width + 1) + c.intermediate_dim * (2 * width + 1) + 5 * width
    tables = (c.vocabulary_size + c.max_sequence_length) * width
    assert tables + c.num_layers * block + 2 * width + width * width == parameters
    debug = CLIPTextModelWithProjection.from_preset("clip_text_debug")
    assert debug.count_params() < 100_000 and debug(IDS).shape == (4, 32)
