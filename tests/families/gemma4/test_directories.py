"""Directories of Gemma 4: how a config may be spelled, what is left out, what is refused."""

import json
import shutil

import numpy as np
import pytest

from arrays import read_npz, remove_tensor, to_numpy
from kmodels.core.errors import InputError
from kmodels.models import Gemma4ImageTextLM, GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma import huggingface
from kmodels.presets import find
from kmodels.weights import engine, read_safetensors, write_safetensors
from refusals import refused
from tolerances import tolerance

LOCAL, GLOBAL = "sliding_attention", "full_attention"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(references, tmp_path):
    """Copies a directory of the references, to be damaged."""

    def copied(name):
        return shutil.copytree(references / name / "model", tmp_path / "copied" / name)

    return copied


@pytest.mark.parametrize("name", ["all", "all_experts"])
def test_both_spellings_of_a_config_are_read_and_written(references, tmp_path, name):
    model = GemmaCausalLM.from_preset(references / "gemma4" / name / "model")
    config = model.backbone.config
    if name == "all":
        older = GemmaBackbone.from_preset(references / "gemma4" / "flat", load_weights=False)
        assert older.config == config
    model.export_to_transformers(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    assert text["global_head_dim"] == 12 and text["num_global_key_value_heads"] == 1
    if name == "all_experts":
        assert text["top_k_experts"] == 2 and text["moe_intermediate_size"] == 12
    for left in ("per_layer_config", "global_head_dim"):
        spelled = {key: value for key, value in text.items() if key != left}
        (tmp_path / "config.json").write_text(json.dumps(spelled))
        assert GemmaBackbone.from_preset(tmp_path, load_weights=False).config == config


@pytest.mark.parametrize("kind", ["gemma4_unified", "gemma4_unified_text"])
def test_the_config_of_12b_is_read_by_both_names(tmp_path, kind):
    sizes = {
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    }
    text = sizes if kind.endswith("text") else {"text_config": sizes}
    described = {"model_type": kind, **text}
    (tmp_path / "config.json").write_text(json.dumps(described))
    source = huggingface.FORMAT.open_checkpoint(tmp_path, described, {}, weights=False)
    found = GemmaBackbone.make_config(**source.backbone)
    wanted = GemmaBackbone.make_config(**GemmaBackbone.presets["gemma4_12b"])
    assert [found.block(i) for i in range(48)] == [wanted.block(i) for i in range(48)]
    assert found.vocabulary_size == wanted.vocabulary_size
    assert found.final_logit_soft_cap == wanted.final_logit_soft_cap


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("multimodal", "vision_tower, embed_vision, audio_tower, embed_audio"),
        ("unified", "embed_vision, vision_embedder"),
    ],
)
def test_the_text_part_of_a_multimodal_directory(references, tmp_path, name, left_out):
    folder = references / "gemma4" / name
    message = f"{left_out} of the checkpoint are left out.*takes only text, Gemma4ImageTextLM take"
    with pytest.warns(UserWarning, match=message) as warned:
        model = GemmaCausalLM.from_preset(folder / "model")
    assert len(warned) == 1 and set(model.backbone.left_out) == set(left_out.split(", "))
    expected = read_npz(folder / "expected.npz")
    logits = to_numpy(model(expected["token_ids"].astype("int32")))
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=tolerance("logits"))
    refused("were left out when it was read", model.export_to_transformers, tmp_path / "out")
    model.export_to_transformers(tmp_path / "out", text_only=True)
    again = GemmaCausalLM.from_preset(tmp_path / "out")
    np.testing.assert_array_equal(to_numpy(again(expected["token_ids"].astype("int32"))), logits)


def test_parts_for_sounds_are_named(references, tmp_path):
    path = references / "gemma4_vision" / "tower_small" / "model"
    message = "audio_tower, embed_audio of the checkpoint are left out; the model takes only text a"
    with pytest.warns(UserWarning, match=f"{message}nd images$"):
        model = Gemma4ImageTextLM.from_preset(path)
    assert model.backbone.left_out == ["audio_tower", "embed_audio"]
    refused("audio_tower, embed_audio", model.export_to_transformers, tmp_path / "out")


@pytest.mark.parametrize("name", ["unified", "tower_small"])
def test_a_chat_reads_the_vision_half_and_a_text_model_does_not(references, name):
    path = references / "gemma4_vision" / name / "model"
    assert find.causal_lm_of(path) is GemmaCausalLM
    assert find.causal_lm_of(path, whole=True) is Gemma4ImageTextLM
    with pytest.warns(UserWarning, match="takes only text, Gemma4ImageTextLM takes images too"):
        model = GemmaCausalLM.from_preset(path)
    if name == "tower_small":
        parts = {"vision_tower", "embed_vision", "audio_tower", "embed_audio"}
        assert set(model.backbone.left_out) == parts


def test_keys_and_values_that_shared_layers_do_not_use_are_passed_by(references, folder):
    path = folder("gemma4/all")
    tensors = dict(read_safetensors(references / "gemma4" / "all" / "model"))
    for part in (*path.glob("*.safetensors"), path / INDEX):
        part.unlink()
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = tensors[
            f"model.layers.2.self_attn.{name}.weight"
        ]
    write_safetensors(path / "model.safetensors", tensors)
    expected = read_npz(references / "gemma4" / "all" / "expected.npz")
    logits = to_numpy(GemmaCausalLM.from_preset(path)(expected["token_ids"].astype("int32")))
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=tolerance("logits"))
    tensors["model.layers.3.self_attn.v_proj.weight"] = tensors["model.norm.weight"]
    write_safetensors(path / "new", tensors)
    (path / "new").replace(path / "model.safetensors")
    with pytest.raises(InputError, match=r"1 tensors without a variable: model\.layers\.3\.self"):
        GemmaCausalLM.from_preset(path)


def test_a_file_that_is_missing_or_cut_is_named(folder):
    path = folder("gemma4/all")
    first, *others = sorted(path.glob("*.safetensors"))
    assert others
    first.write_bytes(first.read_bytes()[:-100])
    refused(f"{first.name} is not a whole safetensors file", GemmaCausalLM.from_preset, path)
    first.unlink()
    refused(first.name, GemmaCausalLM.from_preset, path)


@pytest.mark.parametrize(
    ("task", "directory", "name", "message"),
    [
        (GemmaCausalLM, "gemma4/all", "embed_tokens_per_layer.weight", ""),
        (GemmaCausalLM, "gemma4/all", "layers.2.per_layer_projection.weight", ""),
        (GemmaCausalLM, "gemma4/all", "layers.0.layer_scalar", ""),
        (GemmaCausalLM, "gemma4/all", "layers.1.self_attn.k_norm.weight", ""),
        (Gemma4ImageTextLM, "gemma4_vision/tower", "vision_tower.std_bias", ".*std_bias"),
    ],
)
def test_a_tensor_that_is_missing_is_named_and_the_model_stays(
    folder, task, directory, name, message
):
    path = folder(directory)
    model = task.from_preset(path)
    before = [to_numpy(weight).copy() for weight in model.weights]
    remove_tensor(path, f"model.{name}")
    refused(f"variables without a tensor{message}", task.from_preset, path)
    if task is GemmaCausalLM:
        rules = huggingface.rules(model.backbone.config)
        tensors = {key: x for key, x in read_safetensors(path).items() if key != f"model.{name}"}
        refused("variables without a tensor", engine.load, model, tensors, rules)
    for weight, held in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), held)


TEXT, TOWER, UNIFIED = "gemma4/all", "gemma4_vision/tower", "gemma4_vision/unified"
YARN = {GLOBAL: {"rope_type": "dynamic"}}
PARTIAL = {LOCAL: {"rope_type": "proportional", "partial_rotary_factor": 0}}


@pytest.mark.parametrize(
    ("directory", "part", "name", "value", "message"),
    [
        (TEXT, None, "enable_moe_block", True, "num_experts is None"),
        (TEXT, None, "use_bidirectional_attention", "all", "for use_bidirectional_attention='all'"),
        (TEXT, None, "attention_bias", True, "no counterpart for attention_bias"),
        (TEXT, None, "per_layer_config", {"0": {"sliding_window": 3}}, "for sliding_window in per"),
        (TEXT, None, "per_layer_config", {"0": {"head_dim": 6}}, "different heads in full_attenti"),
        (TEXT, None, "rope_parameters", YARN, "rope_type is 'dynamic'"),
        (TEXT, None, "rope_parameters", PARTIAL, "a partial_rotary_factor of sliding_attention"),
        (TOWER, "vision_config", "hidden_activation", "silu", "hidden_activation='silu' of"),
        (TOWER, "vision_config", "model_type", "siglip", "model_type='siglip' of the vision_"),
        (TOWER, "vision_config", "attention_bias", True, "attention_bias of the vision tower"),
        (
            *(TOWER, "vision_config", "rope_parameters", {"rope_type": "linear"}),
            "rope_type='linear' of the vision tower",
        ),
        (UNIFIED, "vision_config", "output_proj_dims", 24, "output_proj_dims=24, which is to"),
        (UNIFIED, "vision_config", "model_type", "gemma4_vision", "model_type='gemma4_vision'"),
        (UNIFIED, "text_config", "use_bidirectional_attention", "all", "attention='all'"),
    ],
)
def test_settings_without_counterpart_are_named(
    references, tmp_path, directory, part, name, value, message
):
    config = json.loads((references / directory / "model" / "config.json").read_text())
    (config[part] if part else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader = GemmaBackbone if directory == TEXT else Gemma4ImageTextLM
    refused(message, reader.from_preset, tmp_path, load_weights=False)
