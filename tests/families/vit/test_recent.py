"""DINOv3, I-JEPA, MAE, Perception Encoder through the real loaders: features, and the way back."""

import json

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import DINOV3Backbone, ViTBackbone, ViTConfig, ViTImageClassifier
from kmodels.weights import read_safetensors, write_safetensors
from vit_recent import (
    SHIFTED,
    changed,
    differ,
    expected_of,
    model_of,
    near,
    run,
)

# === There ===


def test_a_copy_for_another_size_is_what_the_file_gives_there(references):
    expected = expected_of(references, "dinov3")
    shape = expected["resized_images"].shape[1:3]
    again = model_of(references, "dinov3").backbone.resized(shape)
    near(run(again, expected["resized_images"]), expected["resized_final"], "resized")


# === And back ===


def _bits(folder):
    found = read_safetensors(folder).items()
    return {name: (x.shape, x.read().tobytes()) for name, x in found}


def test_the_encoder_of_a_pretrained_mae_goes_back_with_zeros_for_biases(references, tmp_path):
    model = model_of(references, "mae_pretraining")
    model.export_to_transformers(tmp_path / "out")
    expected = {
        name.removeprefix("vit."): x
        for name, x in _bits(references / "vit_recent" / "mae_pretraining" / "model").items()
        if not name.startswith("decoder.")
    }
    zeros = {name: x for name, x in _bits(tmp_path / "out").items() if name not in expected}
    assert all(name.endswith(("query.bias", "key.bias", "value.bias")) for name in zeros)
    assert len(zeros) == 6 and not any(any(held) for _, held in zeros.values())
    assert _bits(tmp_path / "out") == expected | zeros


def test_the_decoder_of_mae_is_named_where_it_is_left_out(references):
    path = references / "vit_recent" / "mae_pretraining" / "model"
    with pytest.warns(UserWarning, match=r"decoder\.\*, 21 tensors of MAE's pretraining"):
        ViTBackbone.from_preset(path)
    described = json.loads((path / "config.json").read_text())
    assert described["architectures"] == ["ViTMAEForPreTraining"]


def test_what_has_no_class_token_is_told_from_siglip_by_its_gelu(references, tmp_path):
    model = model_of(references, "ijepa_classes")
    fields = model.backbone.config.to_dict()
    for changes, name in (
        ({}, "IJepaForImageClassification"),
        ({"approximate_gelu": True}, "SiglipForImageClassification"),
        ({"position_interpolation": "bicubic_antialias"}, "SiglipForImageClassification"),
    ):
        other = ViTImageClassifier(ViTBackbone(**{**fields, **changes}), 3, pooling="gap")
        other.export_to_transformers(tmp_path / "out")
        described = json.loads((tmp_path / "out" / "config.json").read_text())
        assert described["architectures"] == [name]


def test_names_of_newer_files_have_the_encoder_in_front(references, tmp_path):
    source = references / "vit_recent" / "dinov3" / "model"
    tensors = {
        f"model.{name}" if name.startswith("layer.") else name: x
        for name, x in read_safetensors(source).items()
    }
    described = json.loads((source / "config.json").read_text())
    described["rope_parameters"] = {"rope_theta": described.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(described))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    again = ViTBackbone.from_preset(tmp_path)
    for one, other in zip(
        again.weights, model_of(references, "dinov3").backbone.weights, strict=True
    ):
        assert np.array_equal(to_numpy(one.value), to_numpy(other.value))


def test_our_own_files_keep_every_field(references, tmp_path):
    model = model_of(references, "dinov3_gated")
    model.save_to_preset(tmp_path / "preset")
    again = ViTImageClassifier.from_preset(tmp_path / "preset")
    assert again.backbone.config == model.backbone.config
    model.backbone.save(tmp_path / "model.keras")
    images = expected_of(references, "dinov3_gated")["images"]
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(run(again, images), run(model.backbone, images))


def test_maps_of_attention_turn_too(references):
    expected = expected_of(references, "dinov3")
    backbone = model_of(references, "dinov3").backbone
    first = to_numpy(backbone.attention_maps(expected["images"])[0])
    assert first.shape == (2, 3, 68, 68)
    np.testing.assert_allclose(first.sum(-1), 1, atol=1e-5)
    still = changed(references, "dinov3", rope_theta=None, pos_embed_rescale=None)
    differ(to_numpy(still.attention_maps(expected["images"])[0]), first)


# === What does not fit ===


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "mixed"}, "rope_type is 'mixed'; choose one of dinov3, cat"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; give a number above 0, or None"),
        ({"num_heads": 8}, "multiple of 4; hidden_dim 16 and num_heads 8 give 2"),
        ({"pos_embed_jitter": 0.5}, "pos_embed_jitter is 0.5; give 1 or more, or None"),
        ({"pos_embed_shift": -0.1}, "pos_embed_shift is -0.1; give 0 or more, or None"),
        (
            {"rope_theta": None, "pos_embed_rescale": 2.0},
            "pos_embed_rescale without a rotary embedding; give rope_theta",
        ),
        ({"ref_feat_shape": (0, 4)}, r"ref_feat_shape is \(0, 4\); give \(rows, columns\)"),
        ({"pooling_num_heads": 3}, "3 heads do not divide the width of 16"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be(changes, message):
    with pytest.raises(InputError, match=message):
        ViTConfig(**{**SHIFTED, **changes})


def test_activations_of_kinds():
    with pytest.raises(InputError, match="'gelu' with use_gated_mlp=True; choose one of silu"):
        DINOV3Backbone(use_gated_mlp=True)
    with pytest.raises(InputError, match="'relu' with use_gated_mlp=False; choose one of gelu"):
        DINOV3Backbone(hidden_activation="relu")


def test_a_gate_of_another_activation_is_refused(references, tmp_path):
    source = references / "vit_recent" / "dinov3_gated" / "model"
    described = json.loads((source / "config.json").read_text()) | {"hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match="use_gated_mlp with hidden_act 'gelu'; only 'silu'"):
        ViTBackbone.from_preset(tmp_path)


def test_variants_of_timm_that_are_not_here_are_refused(references, tmp_path):
    source = references / "vit_recent" / "timm_dinov3" / "model"
    tensors = read_safetensors(source)
    described = json.loads((source / "config.json").read_text())
    write_safetensors(tmp_path / "model.safetensors", tensors)
    described["model_args"]["num_kv_heads"] = 1
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match="num_kv_heads=1 has no counterpart in the model"):
        ViTBackbone.from_preset(tmp_path)
    del tensors["blocks.0.attn.qkv.weight"]
    write_safetensors(tmp_path / "vit_small_patch16_dinov3.safetensors", tensors)
    with pytest.raises(InputError, match="is not one of timm's EVAs: it lacks blocks"):
        ViTBackbone.from_preset(tmp_path / "vit_small_patch16_dinov3.safetensors")


def test_what_a_peer_lacks_is_listed(references, tmp_path):
    with pytest.raises(InputError, match="timm's EVA has no counterpart for a mask token"):
        model_of(references, "dinov3").export_to_timm(tmp_path / "out")
    gap = ViTImageClassifier(model_of(references, "dinov3").backbone, 3, pooling="gap")
    with pytest.raises(InputError, match=r"has no counterpart for .*a rotary embedding"):
        gap.export_to_transformers(tmp_path / "out")
    unbiased = ViTBackbone(**{**SHIFTED, "rope_theta": None}, use_key_bias=False)
    with pytest.raises(InputError, match="counterpart for use_position_embedding=False, biases of"):
        unbiased.export_to_timm(tmp_path / "out")
    assert not (tmp_path / "out").exists()
