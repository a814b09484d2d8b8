"""A Gemma 3 with its vision encoder in use: directories, training, adapters, what it refuses."""

import json
import shutil

import keras
import numpy as np
import pytest

from arrays import read_npz, to_numpy
from kmodels import presets
from kmodels.core.errors import InputError
from kmodels.layers import remat
from kmodels.models import (
    Gemma3ImageTextBackbone,
    Gemma3ImageTextConfig,
    Gemma3ImageTextLM,
    Gemma3VisionEncoder,
    GemmaCausalLM,
)
from kmodels.tools import plan
from kmodels.weights import read_safetensors, write_safetensors
from tolerances import tolerance

LIMIT = tolerance("logits")
IMAGE, EACH = 320, 4


def batch(rows=2, images=1, length=15, seed=0):
    """Texts that begin with a token and the images behind it."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, 320, (rows, length)).astype("int32")
    for number in range(images):
        ids[:, 1 + number * (EACH + 1) : 1 + number * (EACH + 1) + EACH] = IMAGE
    return {
        "token_ids": ids,
        "padding_mask": np.ones_like(ids),
        "images": draw.normal(size=(rows, images, 16, 16, 3)).astype("float32"),
        "vision_mask": (ids == IMAGE).astype("int32"),
    }


def fresh(**settings):
    keras.utils.set_random_seed(3)
    return Gemma3ImageTextLM.from_preset("gemma3_vision_debug", preprocessor=None, **settings)


def labelled(inputs):
    labels = np.roll(inputs["token_ids"], -1, axis=1)
    weights = (labels != IMAGE).astype("float32")
    return {"x": inputs, "y": np.minimum(labels, 319), "sample_weight": weights}


def logits(model, inputs):
    return model.predict(inputs, verbose=0)


@pytest.fixture
def folder(references, tmp_path):
    shutil.copytree(references / "gemma3_vision" / "model", tmp_path / "model")
    return tmp_path / "model"


def test_sizes():
    backbone = fresh().backbone
    assert backbone.count_params() < 100_000
    encoder = backbone.vision_encoder
    assert isinstance(encoder, Gemma3VisionEncoder) and encoder.num_vision_tokens_per_image == EACH
    assert [w.path for w in encoder.weights] == [
        w.path for w in backbone.weights if w.path.startswith("vision_encoder/")
    ]


@pytest.mark.across("torch")
def test_transformers_gives_its_own_logits_from_an_export(references, tmp_path):
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    folder = references / "gemma3_vision"
    expected = read_npz(folder / "expected.npz")
    Gemma3ImageTextLM.from_preset(folder / "model").export_to_transformers(tmp_path / "out")
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    ids = torch.as_tensor(expected["two_ids"])
    pixels = torch.as_tensor(expected["images"][:2]).permute(0, 3, 1, 2)
    with torch.no_grad():
        found = theirs(
            input_ids=ids, pixel_values=pixels, token_type_ids=(ids == 160).long()
        ).logits.numpy()
    np.testing.assert_array_equal(found, expected["two_logits"])


def test_what_is_exported_and_read_again_is_the_same(references, tmp_path):
    model = Gemma3ImageTextLM.from_preset(references / "gemma3_vision" / "model")
    model.export_to_transformers(tmp_path / "out")
    # Transformers 5 leaves out a level of the tower's names.
    published = {
        name.replace("vision_tower.vision_model.", "vision_tower."): tensor
        for name, tensor in read_safetensors(tmp_path / "out").items()
    }
    written = read_safetensors(references / "gemma3_vision" / "model")
    assert set(published) == set(written)
    for name, tensor in written.items():
        np.testing.assert_array_equal(published[name].read(), tensor.read())
    again = Gemma3ImageTextLM.from_preset(tmp_path / "out")
    for ours, theirs in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))


def test_modules_of_transformers_5_are_read_by_their_own_names(folder, tmp_path):
    expected = Gemma3ImageTextLM.from_preset(folder)
    tensors = {
        name if not name.startswith("language_model.model.") else
        "language_model." + name.removeprefix("language_model.model."): tensor
        for name, tensor in read_safetensors(folder).items()
    }  # fmt: skip
    (tmp_path / "modules").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "modules")
    write_safetensors(
        tmp_path / "modules" / "model.safetensors",
        {f"model.{name}": tensor for name, tensor in tensors.items()},
    )
    found = Gemma3ImageTextLM.from_preset(tmp_path / "modules")
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))


def test_a_text_model_says_which_class_sees(folder):
    with pytest.warns(UserWarning, match="takes only text, Gemma3ImageTextLM takes images too"):
        model = GemmaCausalLM.from_preset(folder)
    assert model.backbone.left_out == ["vision_tower", "multi_modal_projector"]


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("vision_config", {"hidden_act": "gelu"}, "hidden_act='gelu' of the vision tower"),
        ("vision_config", {"model_type": "clip_vision_model"}, "model_type='clip_vision_model'"),
        (None, {"mm_tokens_per_image": 8}, "mm_tokens_per_image=8"),
        (None, {"mm_tokens_per_image": 16}, "mm_tokens_per_image=16"),
    ],
)
def test_settings_without_counterpart_are_named(folder, where, change, message):
    held = json.loads((folder / "config.json").read_text())
    (held[where] if where else held).update(change)
    (folder / "config.json").write_text(json.dumps(held))
    with pytest.raises(InputError, match=message) as raised:
        Gemma3ImageTextLM.from_preset(folder, load_weights=False)
    assert "\n" not in str(raised.value)


def test_a_tensor_that_is_missing_is_named(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["multi_modal_projector.mm_soft_emb_norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"variables without a tensor.*soft_embedding_norm"):
        Gemma3ImageTextLM.from_preset(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_encoder": None}, "vision_encoder is missing"),
        ({"use_bidirectional_attention": True}, "a model of texts and images is causal"),
        ({"vision_encoder": {"image_size": 10, "patch_size": 4}}, "a multiple of patch_size"),
    ],
)
def test_configs_that_do_not_fit(change, message):
    given = fresh(load_weights=False).backbone.config.to_dict()
    with pytest.raises(InputError, match=message):
        Gemma3ImageTextConfig(**{**given, **change})


def test_more_tokens_than_features_are_refused():
    inputs = batch(images=2)
    inputs["images"] = inputs["images"][:, :1]
    with pytest.raises(InputError, match="a row has 8 tokens for images, and its 1 images have 4"):
        fresh()(inputs)


def test_fit_learns_and_every_part_gets_a_gradient():
    model, inputs = fresh(), batch(rows=4)
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


def test_parts_may_be_frozen_or_adapted_alone():
    model = fresh()
    model.backbone.vision_encoder.trainable = False
    assert not any("vision_encoder" in w.path for w in model.trainable_weights)
    adapted = fresh()
    adapted.backbone.enable_lora(rank=2, targets=r"vision_encoder/.*/(query|value)")
    assert len(adapted.trainable_weights) == 8
    assert all(w.path.startswith("vision_encoder/") for w in adapted.trainable_weights)
    adapted = fresh()
    adapted.backbone.enable_lora(rank=2, targets=r"block_\d+/.*")
    assert not any("vision_encoder" in w.path for w in adapted.trainable_weights)
    everywhere = fresh()
    everywhere.backbone.enable_lora(rank=2, targets="all-linear")
    paths = {w.path.rpartition("/")[0] for w in everywhere.trainable_weights}
    # PEFT knows the projection as a parameter, and not as a linear layer.
    assert "vision_encoder/block_1/mlp/up" in paths
    assert not any("input_projection" in path for path in paths)


def test_remat_changes_no_number():
    inputs = batch()
    plain, saving = fresh(), fresh()
    saving.set_weights(plain.get_weights())
    remat.rematerialize(saving, "block")
    for model in (plain, saving):
        model.compile(optimizer=keras.optimizers.SGD(0.1))
    losses = [
        model.fit(**labelled(inputs), epochs=2, verbose=0).history["loss"]
        for model in (plain, saving)
    ]
    np.testing.assert_allclose(*losses, rtol=0, atol=tolerance("losses"))


def test_beams_and_drafts_see_the_images():
    model, inputs = fresh(), batch(images=2, seed=4)
    given = {name: inputs[name] for name in ("token_ids", "images")}
    alone = [
        model.generate(
            {name: x[row : row + 1] for name, x in given.items()},
            max_new_tokens=6,
            stop_token_ids=None,
        )["token_ids"][0]
        for row in range(2)
    ]
    drafted = model.generate(
        given, max_new_tokens=6, stop_token_ids=None, prompt_lookup_num_tokens=2
    )["token_ids"]
    np.testing.assert_array_equal(drafted, alone)
    from kmodels.generation import BeamSampler

    model.compile(sampler=BeamSampler(num_beams=1))
    beams = model.generate(given, max_new_tokens=6, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(beams, alone)
    model.compile(sampler="contrastive")
    with pytest.raises(InputError, match="ContrastiveSampler reads no images here"):
        model.generate(given, max_new_tokens=6, stop_token_ids=None)


def test_a_text_alone_is_a_text_of_the_decoder():
    model = fresh()
    ids = batch()["token_ids"] % 320
    empty = np.zeros((2, 0, 16, 16, 3), "float32")
    np.testing.assert_array_equal(
        logits(model, ids), logits(model, {"token_ids": ids, "images": empty})
    )


def test_more_rows_of_the_table_leave_the_images_as_they_are():
    model, inputs = fresh(), batch()
    before = logits(model, inputs)
    model.resize_token_embeddings(330)
    after = logits(model, inputs)
    np.testing.assert_allclose(after[..., :320], before, rtol=0, atol=LIMIT)
    again = Gemma3ImageTextBackbone.from_config(model.backbone.get_config())
    assert again.config.vocabulary_size == 330


def test_the_plan_of_memory_says_that_it_counts_no_images():
    with pytest.raises(InputError, match="the memory of images is not planned"):
        plan.Plan("gemma3_vision_debug", plan.Setup(2, 16))


def test_a_chat_reads_the_tower(folder):
    assert presets.find.causal_lm_of(folder) is GemmaCausalLM
    assert presets.find.causal_lm_of(folder, whole=True) is Gemma3ImageTextLM
