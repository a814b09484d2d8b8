"""Gemma against transformers: hidden states, logits, greedy tokens, and directories both ways."""

import json
import shutil

import keras
import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from decoder_case import DecoderCase
from kmodels.core.errors import InputError
from kmodels.models import Gemma3CausalLM, GemmaBackbone, GemmaCausalLM
from kmodels.weights import read_safetensors
from tolerances import tolerance

CASES = ("gemma", "gemma2", "gemma3")


@pytest.fixture(scope="module", params=CASES)
def case(request, references):
    return DecoderCase(references / "gemma" / request.param, GemmaCausalLM)


def test_hidden_states_layer_by_layer(case):
    case.check_hidden_states()


def test_logits(case):
    case.check_logits()


def test_bfloat16_is_as_close_to_float64_as_transformers(case):
    case.check_bfloat16()


def test_greedy_tokens_with_cache_and_without(case):
    prompts = [case.expected[f"prompt_{j}"] for j in range(3)]
    expected = [case.expected[f"greedy_{j}"] for j in range(3)]
    new = len(expected[0])
    length = max(len(p) for p in prompts) + new
    ids = np.zeros((3, length), "int32")
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    mask = (np.arange(length) < np.array([[len(p)] for p in prompts])).astype("int32")
    inputs = {"token_ids": ids, "padding_mask": mask}
    found = case.model.generate(inputs, stop_token_ids=None)
    whole = {"token_ids": found["token_ids"], "padding_mask": np.ones_like(mask)}
    choice = to_numpy(case.model(whole)).argmax(-1)
    for row, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        begin = len(prompt)
        np.testing.assert_array_equal(found["token_ids"][row, :begin], prompt)
        np.testing.assert_array_equal(found["token_ids"][row, begin : begin + new], tokens)
        # Without a cache each of these tokens is the most likely one behind those before it.
        np.testing.assert_array_equal(choice[row, begin - 1 : begin + new - 1], tokens)


def test_export_is_what_was_read(case, tmp_path):
    case.model.export_to_transformers(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.path)
    again = GemmaCausalLM.from_preset(tmp_path / "out", load_weights=False)
    assert again.backbone.config == case.model.backbone.config


@pytest.mark.across("torch")
def test_transformers_loads_the_export(references, tmp_path):
    for name in CASES:
        DecoderCase(references / "gemma" / name, GemmaCausalLM).check_export(tmp_path / name)


def test_own_directory_and_bare_backbone(case, tmp_path):
    case.model.save_to_preset(tmp_path / "own")
    again = GemmaBackbone.from_preset(tmp_path / "own")
    for left, right in zip(case.model.backbone.weights, again.weights, strict=True):
        assert left.path == right.path
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right))


def test_multimodal_directory_gives_its_text_part(references, tmp_path):
    from kmodels.weights import write_safetensors

    source = references / "gemma" / "gemma3" / "model"
    text = json.loads((source / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = read_safetensors(source)
    tensors = {name.replace("model.", "language_model.model.", 1): t for name, t in tensors.items()}
    first = next(iter(tensors.values()))
    tensors["vision_tower.patch.weight"] = tensors["language_model.lm_head.weight"] = first
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.warns(UserWarning, match="vision_tower of the checkpoint are left out; the model"):
        model = Gemma3CausalLM.from_preset(tmp_path)
    expected = read_npz(references / "gemma" / "gemma3" / "expected.npz")
    ids = expected["token_ids"].astype("int32")
    logits = to_numpy(model({"token_ids": ids, "padding_mask": np.ones_like(ids)}))
    np.testing.assert_allclose(logits, expected["logits"], atol=tolerance("logits"), rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "relu"}, "no counterpart for an activation 'relu'"),
        ({"attention_bias": True, "tie_word_embeddings": False}, "attention_bias, tie_word"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
    ],
)
def test_settings_without_counterpart_are_named(references, tmp_path, change, message):
    source = references / "gemma" / "gemma3" / "model"
    text = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, **change}))
    with pytest.raises(InputError, match=message):
        GemmaBackbone.from_preset(tmp_path, load_weights=False)


def test_layer_types_in_any_order_are_read_and_written(references, tmp_path):
    source = references / "gemma" / "gemma3" / "model"
    text = json.loads((source / "config.json").read_text())
    text["layer_types"] = ["full_attention"] + ["sliding_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(text))
    backbone = GemmaBackbone.from_preset(tmp_path, load_weights=False)
    assert backbone.cache_windows == [None, 5, 5]
    folder = backbone.export_to_transformers(tmp_path / "out")
    written = json.loads((folder / "config.json").read_text())
    assert written["layer_types"] == text["layer_types"]
    again = GemmaBackbone.from_preset(folder, load_weights=False)
    assert again.config == backbone.config


def test_a_missing_tensor_is_named_and_nothing_half_loaded(references, tmp_path):
    shutil.copytree(references / "gemma" / "gemma3" / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["num_hidden_layers"] = 2
    config["layer_types"] = config["layer_types"][:2]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"13 tensors without a variable: model\.layers\.2"):
        GemmaBackbone.from_preset(tmp_path / "model")


def test_export_names_what_transformers_cannot_express(tmp_path):
    sizes = {"num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    backbone = GemmaBackbone(
        vocabulary_size=8, hidden_dim=8, intermediate_dim=8, final_logit_soft_cap=3.0, **sizes
    )
    with pytest.raises(InputError, match="no counterpart for soft caps"):
        backbone.export_to_transformers(tmp_path / "out")
    keras.utils.clear_session()
