"""Gemma 4 against transformers: each feature alone and all together, and directories both ways."""

import json
import shutil

import keras
import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from decoder_case import DecoderCase
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.weights import read_safetensors, write_safetensors
from tolerances import tolerance

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def forget_value_norms(model):
    for block in model.backbone.blocks:
        block.attention.value_norm = None


def forget_scalars(model):
    for block in model.backbone.blocks:
        block.layer_scalar.assign([1.0])


def forget_tokens_per_layer(model):
    table = model.backbone.per_layer_embedding.table.embeddings
    table.assign(0 * table)


def forget_projection_per_layer(model):
    kernel = model.backbone.per_layer_embedding.model_projection.kernel
    kernel.assign(0 * kernel)


def narrow_shared_mlps(model):
    down = model.backbone.blocks[-1].mlp.down.kernel
    half = to_numpy(down).copy()
    half[half.shape[0] // 2 :] = 0
    down.assign(half)


def forget_what_experts_count(model):
    for block in model.backbone.blocks:
        block.experts.router.expert_scale.assign([1.0] * 6)


def forget_experts(model):
    for block in model.backbone.blocks:
        block.experts_result_norm.scale.assign(0 * block.experts_result_norm.scale)


# What turns a feature off: settings under which the same weights fit, or a change of the model.
WITHOUT = {
    "plain": [
        {"layer_types": [GLOBAL, LOCAL, GLOBAL, GLOBAL]},
        {"query_pre_attention_scalar": None},
        {"norm_offset": 1.0},
        {"sliding_window_size": 6},
        forget_value_norms,
        forget_scalars,
    ],
    "heads": [],
    "key_is_value": [forget_value_norms],
    "shared": [{"layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL]}],
    "double_wide": [narrow_shared_mlps],
    "per_layer": [forget_tokens_per_layer, forget_projection_per_layer],
    "turned": [{"global_rope_partial_rotary_factor": 1.0}],
    "capped": [{"final_logit_soft_cap": None}],
    "experts": [{"num_experts_per_token": 3}, forget_what_experts_count, forget_experts],
    "all": [],
    "all_experts": [],
}


@pytest.fixture(scope="module", params=WITHOUT)
def case(request, references):
    made = DecoderCase(references / "gemma4" / request.param, GemmaCausalLM)
    made.without = WITHOUT[request.param]
    return made


@pytest.fixture(scope="module")
def whole(references):
    return DecoderCase(references / "gemma4" / "all", GemmaCausalLM)


def error(model, case):
    logits = keras.ops.convert_to_numpy(model(case.inputs))
    return np.abs(logits - case.expected["logits"]).max()


def test_logits(case):
    case.check_logits()


@pytest.mark.once  # whether the reference would tell
def test_every_feature_counts(case):
    for change in case.without:
        settings = change if isinstance(change, dict) else {}
        model = GemmaCausalLM.from_preset(case.path, **settings)
        if callable(change):
            change(model)
        assert error(model, case) > 100 * tolerance("logits"), change


def test_hidden_states_layer_by_layer(whole):
    whole.check_hidden_states()


def test_bfloat16_is_as_close_to_float64_as_transformers(whole):
    whole.check_bfloat16()


def test_greedy_tokens_with_cache(whole):
    whole.check_greedy_tokens()


def test_export_is_what_was_read(case, tmp_path):
    case.model.export_to_transformers(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.path)
    again = GemmaCausalLM.from_preset(tmp_path / "out", load_weights=False)
    assert again.backbone.config == case.model.backbone.config


@pytest.mark.across("torch")
def test_transformers_loads_the_export(references, tmp_path):
    for name in WITHOUT:
        DecoderCase(references / "gemma4" / name, GemmaCausalLM).check_export(tmp_path / name)


def test_own_directory_and_bare_backbone(whole, tmp_path):
    whole.model.save_to_preset(tmp_path / "own")
    whole.model.backbone.export_to_transformers(tmp_path / "bare")
    for folder in ("own", "bare"):
        again = GemmaBackbone.from_preset(tmp_path / folder)
        assert again.config == whole.model.backbone.config
        for left, right in zip(whole.model.backbone.weights, again.weights, strict=True):
            assert left.path == right.path
            np.testing.assert_array_equal(to_numpy(left), to_numpy(right))


def test_both_spellings_of_a_config_are_read_and_written(references, whole, tmp_path):
    config = whole.model.backbone.config
    older = GemmaBackbone.from_preset(references / "gemma4" / "flat", load_weights=False)
    assert older.config == config
    whole.model.export_to_transformers(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    assert text["global_head_dim"] == 12 and text["num_global_key_value_heads"] == 1
    for name in ("per_layer_config", "global_head_dim"):
        spelled = {key: value for key, value in text.items() if key != name}
        (tmp_path / "config.json").write_text(json.dumps(spelled))
        assert GemmaBackbone.from_preset(tmp_path, load_weights=False).config == config


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("multimodal", "vision_tower, embed_vision, audio_tower, embed_audio"),
        ("unified", "embed_vision, vision_embedder"),
    ],
)
def test_the_text_part_of_a_multimodal_directory(references, tmp_path, name, left_out):
    folder = references / "gemma4" / name
    with pytest.warns(UserWarning, match=f"{left_out} of the checkpoint are left out") as warned:
        model = GemmaCausalLM.from_preset(folder / "model")
    assert len(warned) == 1
    expected = read_npz(folder / "expected.npz")
    logits = to_numpy(model(expected["token_ids"].astype("int32")))
    limit = tolerance("logits")
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=limit)
    with pytest.raises(InputError, match="were left out when it was read"):
        model.export_to_transformers(tmp_path / "out")
    model.export_to_transformers(tmp_path / "out", text_only=True)
    again = GemmaCausalLM.from_preset(tmp_path / "out")
    np.testing.assert_array_equal(to_numpy(again(expected["token_ids"].astype("int32"))), logits)


def test_keys_and_values_that_shared_layers_do_not_use_are_passed_by(whole, tmp_path):
    shutil.copytree(whole.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").unlink()
    tensors = dict(read_safetensors(whole.path))
    for part in tmp_path.glob("*.safetensors"):
        part.unlink()
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = tensors[
            f"model.layers.2.self_attn.{name}.weight"
        ]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert error(GemmaCausalLM.from_preset(tmp_path), whole) <= tolerance("logits")
    tensors["model.layers.3.self_attn.v_proj.weight"] = tensors["model.norm.weight"]
    write_safetensors(tmp_path / "new", tensors)
    (tmp_path / "new").replace(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"1 tensors without a variable: model\.layers\.3\.self"):
        GemmaCausalLM.from_preset(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True}, "num_experts is None"),
        ({"use_bidirectional_attention": "all"}, "for use_bidirectional_attention='all'"),
        ({"attention_bias": True}, "no counterpart for attention_bias"),
        ({"per_layer_config": {"0": {"sliding_window": 3}}}, "for sliding_window in per_layer"),
        ({"per_layer_config": {"0": {"head_dim": 6}}}, "different heads in full_attention"),
        ({"rope_parameters": {GLOBAL: {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        (
            {"rope_parameters": {LOCAL: {"rope_type": "proportional", "partial_rotary_factor": 0}}},
            "a partial_rotary_factor of sliding_attention",
        ),
    ],
)
def test_settings_without_counterpart_are_named(whole, tmp_path, change, message):
    text = json.loads((whole.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, **change}))
    with pytest.raises(InputError, match=message) as raised:
        GemmaBackbone.from_preset(tmp_path, load_weights=False)
    assert "\n" not in str(raised.value)


def test_adapters_of_peft_both_ways(references, tmp_path):
    folder = references / "gemma4"
    expected = read_npz(folder / "adapter.npz")
    model = GemmaCausalLM.from_preset(folder / "all" / "model")
    ids = expected["inputs"].astype("int32")
    limit = tolerance("logits") * max(1, np.abs(expected["logits"]).max())
    model.load_adapter(folder / "adapter")
    assert np.abs(expected["plain"] - expected["logits"]).max() > 100 * limit
    np.testing.assert_allclose(to_numpy(model(ids)), expected["logits"], rtol=0, atol=limit)
    model.save_adapter(tmp_path / "out")
    written, read = (
        read_safetensors(f / "adapter_model.safetensors")
        for f in (tmp_path / "out", folder / "adapter")
    )
    assert set(written) == set(read)
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name].read(), tensor.read())
