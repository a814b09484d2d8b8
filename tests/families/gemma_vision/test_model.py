"""A Gemma 3 with its vision encoder in use: directories, training, adapters, what it refuses."""

import json
import shutil

import keras
import numpy as np
import pytest

from arrays import assert_equal, remove_tensor
from kmodels.core.errors import InputError
from kmodels.models import Gemma3ImageTextConfig, Gemma3ImageTextLM, GemmaCausalLM
from kmodels.presets import find
from kmodels.weights import read_safetensors, write_safetensors
from refusals import refused

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


def logits(model, inputs):
    return model.predict(inputs, verbose=0)


@pytest.fixture
def folder(references, tmp_path):
    shutil.copytree(references / "gemma3_vision" / "model", tmp_path / "model")
    return tmp_path / "model"


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
    assert_equal(model.weights, again.weights)


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
    assert_equal(found.weights, expected.weights)


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
    refused(message, Gemma3ImageTextLM.from_preset, folder, load_weights=False)


def test_a_tensor_that_is_missing_is_named(folder):
    remove_tensor(folder, "multi_modal_projector.mm_soft_emb_norm.weight")
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
    refused(message, Gemma3ImageTextConfig, **{**given, **change})


def test_more_tokens_than_features_are_refused():
    inputs = batch(images=2)
    inputs["images"] = inputs["images"][:, :1]
    model, labels = fresh(), inputs["token_ids"]
    for call in (model, model.predict, lambda x: model.fit(x, labels)):
        refused("a row has 8 tokens for images, and its 1 images ", call, inputs)


def test_each_image_of_the_preset_takes_four_tokens():
    assert fresh().backbone.vision_encoder.num_vision_tokens_per_image == EACH


def test_a_chat_reads_the_tower(folder):
    assert find.causal_lm_of(folder) is GemmaCausalLM
    assert find.causal_lm_of(folder, whole=True) is Gemma3ImageTextLM
