"""A Gemma 4 with images in use: directories, training, adapters, what it refuses."""

import json
import shutil

import keras
import numpy as np
import pytest

from arrays import to_numpy
from gemma4_vision_case import MODELS, Reference
from kmodels import presets
from kmodels.core.errors import InputError
from kmodels.generation import BeamSampler
from kmodels.layers import remat
from kmodels.models import (
    Gemma4ImageTextBackbone,
    Gemma4ImageTextConfig,
    Gemma4ImageTextLM,
    Gemma4VisionEmbedder,
    Gemma4VisionEncoder,
    GemmaCausalLM,
)
from kmodels.models.vit.gemma4.blocks import ClippedDense
from kmodels.tools import plan
from kmodels.weights import read_safetensors
from tolerances import tolerance

LIMIT = tolerance("logits")
IMAGE = 310
NAMES = ("gemma4_unified_debug", "gemma4_vision_debug")
# (rows, columns) of the pieces of the images.
SHAPES = ((2, 3), (1, 4))
SOUNDLESS = "ignore:.*the model takes only text and images"


def batch(name, rows=2, images=1, length=18, seed=0):
    """Texts that begin with a token and the images behind it, with padding among the patches."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, IMAGE, (rows, length)).astype("int32")
    factor, side = (1, 4) if "unified" in name else (2, 2)
    pixels = np.zeros((rows, images, 8 * factor**2, side**2 * 3), "float32")
    places = np.full((rows, images, 8 * factor**2, 2), -1, "int32")
    at = 1
    for number in range(images):
        down, across = SHAPES[number]
        ids[:, at : at + down * across] = IMAGE
        at += down * across + 1
        count = down * across * factor**2
        pixels[:, number, :count] = draw.random((rows, count, side**2 * 3))
        numbers = np.arange(count)
        columns = across * factor
        places[:, number, :count] = np.stack([numbers % columns, numbers // columns], -1)
    return {
        "token_ids": ids,
        "padding_mask": np.ones_like(ids),
        "pixel_values": pixels,
        "pixel_position_ids": places,
        "vision_mask": (ids == IMAGE).astype("int32"),
    }


def fresh(name, **settings):
    keras.utils.set_random_seed(3)
    return Gemma4ImageTextLM.from_preset(name, preprocessor=None, **settings)


def labelled(inputs):
    labels = np.roll(inputs["token_ids"], -1, axis=1)
    weights = (labels != IMAGE).astype("float32")
    return {"x": inputs, "y": labels, "sample_weight": weights}


def logits(model, inputs):
    return model.predict(inputs, verbose=0)


@pytest.fixture
def folder(references, tmp_path):
    def copied(name):
        shutil.copytree(references / "gemma4_vision" / name / "model", tmp_path / name)
        return tmp_path / name

    return copied


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_sizes(name):
    backbone = fresh(name).backbone
    assert backbone.count_params() < 100_000
    kind = Gemma4VisionEmbedder if "unified" in name else Gemma4VisionEncoder
    assert isinstance(backbone.vision_encoder, kind)
    assert [w.path for w in backbone.vision_encoder.weights] == [
        w.path for w in backbone.weights if w.path.startswith("vision_encoder/")
    ]


@pytest.mark.across("torch")
@pytest.mark.filterwarnings(SOUNDLESS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_its_own_logits_from_an_export(references, tmp_path, name):
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    from references import gemma4_vision

    whole = Reference(references, name)
    whole.model.backbone.left_out = ()  # sounds are not written
    whole.model.export_to_transformers(tmp_path / "out")
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    ids = torch.as_tensor(whole.expected["two_ids"]).long()
    pixels, places = whole.pictures("two")
    seen = {
        "pixel_values": torch.as_tensor(pixels),
        "image_position_ids": torch.as_tensor(places).long(),
    }
    inputs = gemma4_vision.given(theirs, ids, [0, 1], seen)
    with torch.no_grad():
        found = theirs(**gemma4_vision.masked(theirs, inputs)).logits.numpy()
    np.testing.assert_array_equal(found, whole.expected["two_logits"])


@pytest.mark.once
@pytest.mark.filterwarnings(SOUNDLESS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_and_read_again_is_the_same(references, tmp_path, name):
    path = references / "gemma4_vision" / name / "model"
    model = Gemma4ImageTextLM.from_preset(path)
    model.backbone.left_out = ()
    model.export_to_transformers(tmp_path / "out")
    published, written = read_safetensors(tmp_path / "out"), read_safetensors(path)
    sounds = {key for key in written if "audio" in key}
    assert set(published) == set(written) - sounds
    for key, tensor in published.items():
        np.testing.assert_array_equal(tensor.read(), written[key].read())
    again = Gemma4ImageTextLM.from_preset(tmp_path / "out")
    assert again.backbone.config == model.backbone.config
    for ours, theirs in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))


@pytest.mark.once
def test_a_text_model_says_which_class_sees(folder):
    path = folder("tower_small")
    with pytest.warns(UserWarning, match="takes only text, Gemma4ImageTextLM takes images too"):
        model = GemmaCausalLM.from_preset(path)
    parts = {"vision_tower", "embed_vision", "audio_tower", "embed_audio"}
    assert set(model.backbone.left_out) == parts
    with pytest.warns(UserWarning, match="takes only text, Gemma4ImageTextLM takes images too"):
        GemmaCausalLM.from_preset(folder("unified"))


@pytest.mark.once
def test_parts_for_sounds_are_named(folder):
    path, said = folder("tower_small"), "audio_tower, embed_audio of the checkpoint are left out"
    with pytest.warns(UserWarning, match=f"{said}; the model takes only text and images$"):
        model = Gemma4ImageTextLM.from_preset(path)
    assert model.backbone.left_out == ["audio_tower", "embed_audio"]
    with pytest.raises(InputError, match="audio_tower, embed_audio"):
        model.export_to_transformers(path.parent / "out")


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "where", "change", "message"),
    [
        ("tower", "vision_config", {"hidden_activation": "silu"}, "hidden_activation='silu' of"),
        ("tower", "vision_config", {"model_type": "siglip"}, "model_type='siglip' of the vision_"),
        ("tower", "vision_config", {"attention_bias": True}, "attention_bias of the vision tower"),
        (
            "tower",
            "vision_config",
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_type='linear' of the vision tower",
        ),
        ("unified", "vision_config", {"output_proj_dims": 24}, "output_proj_dims=24, which is to"),
        ("unified", "vision_config", {"model_type": "gemma4_vision"}, "model_type='gemma4_vision'"),
        ("unified", "text_config", {"use_bidirectional_attention": "all"}, "attention='all'"),
    ],
)
def test_settings_without_counterpart_are_named(folder, name, where, change, message):
    path = folder(name)
    held = json.loads((path / "config.json").read_text())
    held[where].update(change)
    (path / "config.json").write_text(json.dumps(held))
    with pytest.raises(InputError, match=message) as raised:
        Gemma4ImageTextLM.from_preset(path, load_weights=False)
    assert "\n" not in str(raised.value)


@pytest.mark.once
def test_a_tensor_that_is_missing_is_named(folder):
    path = folder("tower")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.vision_tower.std_bias"]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"variables without a tensor.*std_bias"):
        Gemma4ImageTextLM.from_preset(path)


@pytest.mark.once
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
    given = fresh(NAMES[1], load_weights=False).backbone.config.to_dict()
    encoder = change.get("vision_encoder")
    if encoder and "pool_size" not in encoder:
        change = {"vision_encoder": {**given["vision_encoder"], **encoder}}
    with pytest.raises(InputError, match=message):
        Gemma4ImageTextConfig(**{**given, **change})


@pytest.mark.once
def test_inputs_that_do_not_fit():
    model, inputs = fresh(NAMES[0]), batch(NAMES[0], images=2)
    places = inputs["pixel_position_ids"]
    for change, message in (
        ({"pixel_values": None}, "the model got pixel_position_ids alone; give pixel_values and"),
        ({"pixel_values": inputs["pixel_values"][..., :12]}, "have patches of 12 numbers, and the"),
        (
            {"pixel_position_ids": np.where(np.arange(8)[:, None] > 4, -1, places)},
            "row 0 has 10 tokens for images, and its images have 9 pieces; give as many",
        ),
    ):
        with pytest.raises(InputError, match=message):
            model({**inputs, **change})
    with pytest.raises(InputError, match="vision_encoder is 3; give a vision encoder"):
        Gemma4ImageTextBackbone(**{**model.backbone.get_config(), "vision_encoder": 3})


@pytest.mark.parametrize("name", NAMES)
def test_fit_learns_and_every_part_gets_a_gradient(name):
    model, inputs = fresh(name), batch(name, rows=4)
    before = [to_numpy(weight).copy() for weight in model.trainable_weights]
    model.compile(optimizer=keras.optimizers.Adam(3e-3))
    history = model.fit(**labelled(inputs), batch_size=2, epochs=6, verbose=0).history
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    still = [
        weight.path
        for weight, held in zip(model.trainable_weights, before, strict=True)
        if np.array_equal(to_numpy(weight), held)
    ]
    assert not still
    assert not any("input_min" in weight.path for weight in model.trainable_weights)


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_parts_may_be_frozen_or_adapted_alone(name):
    model = fresh(name)
    model.backbone.vision_encoder.trainable = False
    assert not any("vision_encoder" in w.path for w in model.trainable_weights)
    adapted = fresh(name)
    adapted.backbone.enable_lora(rank=2, targets=r"vision_encoder/.*")
    assert adapted.trainable_weights
    assert all(w.path.startswith("vision_encoder/") for w in adapted.trainable_weights)
    adapted = fresh(name)
    adapted.backbone.enable_lora(rank=2, targets=r"block_\d+/.*")
    assert not any("vision_encoder" in w.path for w in adapted.trainable_weights)
    everywhere = fresh(name)
    everywhere.backbone.enable_lora(rank=2, targets="all-linear")
    paths = {w.path.rpartition("/")[0] for w in everywhere.trainable_weights}
    assert {"vision_encoder/input_projection", "vision_encoder/patch_embedding"} <= paths
    assert "unified" in name or "vision_encoder/block_1/gate" in paths


@pytest.mark.once
def test_remat_changes_no_number():
    name = NAMES[1]
    inputs = batch(name)
    plain, saving = fresh(name), fresh(name)
    saving.set_weights(plain.get_weights())
    remat.rematerialize(saving, "block")
    for model in (plain, saving):
        model.compile(optimizer=keras.optimizers.SGD(0.1))
    losses = [
        model.fit(**labelled(inputs), epochs=2, verbose=0).history["loss"]
        for model in (plain, saving)
    ]
    np.testing.assert_allclose(*losses, rtol=0, atol=tolerance("losses"))


@pytest.mark.once
def test_beams_and_drafts_see_the_images():
    name = NAMES[0]
    model, inputs = fresh(name), batch(name, images=2, seed=4)
    names = ("token_ids", "pixel_values", "pixel_position_ids")
    given = {key: inputs[key] for key in names}
    settings = {"max_new_tokens": 6, "stop_token_ids": None}
    alone = model.generate(given, **settings)["token_ids"]
    dark = {**given, "pixel_values": 0 * given["pixel_values"]}
    assert (model.generate(dark, **settings)["token_ids"] != alone).any()
    drafted = model.generate(given, **settings, prompt_lookup_num_tokens=2)["token_ids"]
    np.testing.assert_array_equal(drafted, alone)
    several = model.generate(given, **settings, num_return_sequences=2)["token_ids"]
    np.testing.assert_array_equal(several[::2], alone)
    model.compile(sampler=BeamSampler(num_beams=1))
    beams = model.generate(given, **settings)["token_ids"]
    np.testing.assert_array_equal(beams, alone)
    model.compile(sampler="contrastive")
    with pytest.raises(InputError, match="ContrastiveSampler reads no images here"):
        model.generate(given, **settings)


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_a_text_alone_is_a_text_of_the_decoder(name):
    model, inputs = fresh(name), batch(name)
    ids = np.minimum(inputs["token_ids"], IMAGE - 1)
    empty = {key: inputs[key][:, :0] for key in ("pixel_values", "pixel_position_ids")}
    np.testing.assert_array_equal(logits(model, ids), logits(model, {"token_ids": ids, **empty}))
    before = logits(model, inputs)
    model.resize_token_embeddings(330)
    np.testing.assert_allclose(logits(model, inputs)[..., :320], before, rtol=0, atol=LIMIT)
    again = Gemma4ImageTextBackbone.from_config(model.backbone.get_config())
    assert again.config == model.backbone.config and again.config.vocabulary_size == 330


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_presets(name, tmp_path):
    model, inputs = fresh(name), batch(name, images=2)
    model.save_to_preset(tmp_path / "own")
    again = Gemma4ImageTextLM.from_preset(tmp_path / "own")
    np.testing.assert_array_equal(logits(again, inputs), logits(model, inputs))
    with pytest.raises(InputError, match="the memory of images is not planned"):
        plan.Plan(name, plan.Setup(2, 16))
    # The names of the texts alone are those of keras-hub, which has both under one.
    for text in ("gemma4_12b", "gemma4_31b", "gemma4_26b_a4b", "gemma4_e2b", "gemma4_e4b"):
        fields = presets.find.named(Gemma4ImageTextLM)[text]
        config = Gemma4ImageTextConfig(**fields)
        assert config.vocabulary_size == 262_144
        assert config.use_vision_bidirectional_attention == (text[:8] != "gemma4_e")


@pytest.mark.once
def test_a_chat_reads_the_vision_half(folder):
    for name in ("unified", "tower_small"):
        path = folder(name)
        assert presets.find.causal_lm_of(path) is GemmaCausalLM
        assert presets.find.causal_lm_of(path, whole=True) is Gemma4ImageTextLM


def test_layers_alone(tmp_path):
    """Bounds bite and are kept, and each layer is made again from its config."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(3, 8)).astype("float32")
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
    patches = batch(NAMES[1])
    given = patches["pixel_values"], patches["pixel_position_ids"]
    for layer in (
        fresh(NAMES[1]).backbone.vision_encoder,
        Gemma4VisionEncoder(2, 4, 8, 1, 12, 4, 6, num_key_value_heads=2, pool_size=2, dropout=0.2),
    ):
        other = type(layer).from_config(layer.get_config())
        found = layer(*given)
        assert found.shape == layer.compute_output_shape(*(x.shape for x in given))
        other.build(*(x.shape for x in given))
        other.set_weights(layer.get_weights())
        np.testing.assert_array_equal(to_numpy(other(*given)), to_numpy(found))


@pytest.mark.needs("gguf")
def test_a_gguf_file_holds_the_text_alone(tmp_path):
    pytest.importorskip("gguf")
    model = fresh(NAMES[0])
    for settings in ({}, {"mmproj": tmp_path / "mmproj.gguf"}):
        with pytest.raises(InputError, match=r"no file of llama\.cpp here; give text_only=True"):
            model.export_to_gguf(tmp_path / "text.gguf", **settings)
    model.export_to_gguf(tmp_path / "text.gguf", text_only=True, dtype="float32")
    text = GemmaCausalLM.from_preset(tmp_path / "text.gguf")
    ids = np.minimum(batch(NAMES[0])["token_ids"], IMAGE - 1)
    np.testing.assert_allclose(logits(text, ids), logits(model, ids), rtol=0, atol=LIMIT)
