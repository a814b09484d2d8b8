"""DeiT, DINOv2, SigLIP and CLIP through the real loaders: features, logits, and the way back."""

import functools
import json
from pathlib import Path

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core import keras_internals
from kmodels.core.dispatch import generic_only
from kmodels.core.errors import InputError
from kmodels.models import ViTBackbone, ViTImageClassifier
from kmodels.models.vit.presets import PRESETS
from kmodels.weights import LazyArray, read_npz, read_safetensors, write_safetensors
from tolerances import tolerance

# transformers keeps a norm, or attention pooling, that its classifiers do not call.
# What belongs to the text.


def source_of(references: Path, case: str) -> Path:
    folder = references / "vit_kinds" / case
    return folder / "model" if (folder / "model").is_dir() else folder / "model.npz"


@functools.cache
def expected_of(references: Path, case: str) -> dict[str, np.ndarray]:
    with np.load(references / "vit_kinds" / case / "expected.npz") as held:
        return dict(held)


@functools.cache
def model_of(references: Path, case: str) -> ViTImageClassifier:
    return ViTImageClassifier.from_preset(source_of(references, case), **_head(references, case))


def _head(references, case):
    return {} if "logits" in expected_of(references, case) else {"num_classes": 0}


def _run(model, images):
    """What a model gives, as arrays; compiled on JAX, where that takes less than op after op."""
    if keras.backend.backend() == "jax":
        return model.predict(images, verbose=0)
    return keras.tree.map_structure(to_numpy, model(images))


def _near(found, expected, name):
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(found, expected, atol=tolerance("hidden"), rtol=0, err_msg=name)


# === There ===


# One per rule of its origin; the other cases differ from these in their heads.


def test_our_own_files_remember_the_rule_of_their_origin(references, tmp_path):
    for case in ("dinov2_model", "siglip2"):
        expected = expected_of(references, case)
        model_of(references, case).save_to_preset(tmp_path / case)
        again = ViTBackbone.from_preset(
            tmp_path / case, image_shape=expected["resized_images"].shape[1:]
        )
        _near(_run(again, expected["resized_images"]), expected["resized_final"], case)
        other = ViTBackbone.from_preset(
            tmp_path / case,
            image_shape=expected["resized_images"].shape[1:],
            position_interpolation="bicubic_antialias",
        )
        gap = _run(other, expected["resized_images"]) - expected["resized_final"]
        assert np.abs(gap).max() > 10 * tolerance("hidden")


@pytest.mark.parametrize("case", ["clip", "dinov2_giant", "timm_siglip"])
def test_overrides_give_what_the_generic_bodies_give(references, case):
    model, expected = model_of(references, case), expected_of(references, case)
    with generic_only():
        generic = _run(keras.Model(model.input, model.output), expected["images"])
    _near(generic, expected["pooled"], case)


# === Features ===


def test_a_feature_model_is_a_keras_model_over_the_same_weights(references):
    model, expected = model_of(references, "dinov2_model"), expected_of(references, "dinov2_model")
    features = model.feature_model()
    assert isinstance(features, keras.Model)
    _near(features.predict(expected["images"], verbose=0), expected["pooled"], "pooled")
    held = {id(variable) for variable in model.weights}
    assert features.weights and all(id(variable) in held for variable in features.weights)
    tokens = _run(model.backbone.feature_model(), expected["images"])
    _near(tokens, expected["final"], "final")


@pytest.mark.parametrize("outputs", ["block_2", ["block_0", "block_2"], []])
def test_features_that_are_not_there(references, outputs):
    given = "'block_2'" if outputs else "nothing"
    with pytest.raises(InputError, match=f"feature_model got {given}; choose from pooled_output, "):
        model_of(references, "clip").feature_model(outputs)
    with pytest.raises(InputError, match="choose from sequence_output, patch_embedding, tokens"):
        model_of(references, "clip").backbone.feature_model("pooled_output")


# === What does not fit ===


def _damaged(tensors: dict[str, LazyArray], damage: str, name: str, other: str):
    tensors = dict(tensors)
    if damage == "dropped":
        del tensors[name]
    elif damage == "added":
        tensors[name + "_2"] = tensors[name]
    elif damage == "swapped":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    else:
        tensors[name] = tensors[name].map(tensors[name].shape[::-1], np.transpose)
    return tensors


# A weight of each format, another of another shape, and the variable of the first.
DAMAGED = {
    "clip": (
        "encoder.layers.1.mlp.fc1.weight",
        "embeddings.class_embedding",
        "block_1/mlp/up/kernel",
    ),
    "deit": (
        "deit.encoder.layer.1.output.dense.weight",
        "deit.embeddings.distillation_token",
        "block_1/mlp/down/kernel",
    ),
    "dinov2_giant": (
        "encoder.layer.0.mlp.weights_in.weight",
        "encoder.layer.0.layer_scale1.lambda1",
        "block_0/mlp/gate/kernel, block_0/mlp/up/kernel",
    ),
    "npz_siglip": (
        "params/img/MAPHead_0/MlpBlock_0/Dense_1/kernel",
        "params/img/MAPHead_0/probe",
        "pooling/mlp/down/kernel",
    ),
    "siglip": (
        "head.attention.in_proj_weight",
        "head.probe",
        "pooling/attention/query/kernel",
    ),
    "timm_deit": ("blocks.1.mlp.fc1.weight", "dist_token", "block_1/mlp/up/kernel"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_weight_that_is_not_right_is_refused_by_its_name(references, case, tmp_path):
    name, other, path = DAMAGED[case]
    source = source_of(references, case)
    if source.is_dir():
        tensors, file = read_safetensors(source), tmp_path
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    else:
        tensors, file = read_npz(source), tmp_path / source.name
    messages = {
        "dropped": f"variables? without a tensor: {path}",
        "added": f"without a variable: {name}_2",
        "swapped": f"wrong shapes: .*{name} is",
        "transposed": f"wrong shapes: {name} is",
    }
    for damage, message in messages.items():
        damaged = _damaged(tensors, damage, name, other)
        if source.is_dir():
            write_safetensors(tmp_path / "model.safetensors", damaged)
        else:
            np.savez(file, **{name: x.read() for name, x in damaged.items()})
        with pytest.raises(InputError, match=message):
            ViTImageClassifier.from_preset(file, preprocessor=None, **_head(references, case))


def test_a_gated_mlp_of_another_kind_is_refused(references, tmp_path):
    source = source_of(references, "timm_dinov2")
    described = json.loads((source / "config.json").read_text())
    described["architecture"] = "vit_tiny_patch16_224"
    (tmp_path / "config.json").write_text(json.dumps(described))
    write_safetensors(tmp_path / "model.safetensors", read_safetensors(source))
    with pytest.raises(
        InputError, match="has a gated MLP, which is supported only for vit_giant_patch14"
    ):
        ViTImageClassifier.from_preset(tmp_path, num_classes=0)


# === And back ===


def test_what_a_peer_lacks_is_listed(references, tmp_path):
    with pytest.raises(InputError, match="timm's ViT has no counterpart for a mask token"):
        model_of(references, "dinov2_model").export_to_timm(tmp_path / "out")
    with pytest.raises(InputError, match="pooling='token_gap'"):
        model_of(references, "dinov2").export_to_timm(tmp_path / "out")
    with pytest.raises(InputError, match="has no counterpart for pre_norm, final_norm=False, poo"):
        model_of(references, "clip_classes").export_to_transformers(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mask_token_can_be_left_aside_on_the_way_to_timm(references, tmp_path):
    source, expected = (
        source_of(references, "dinov2_model"),
        expected_of(references, "dinov2_model"),
    )
    model = ViTImageClassifier.from_preset(source, num_classes=0, use_mask_token=False)
    model.export_to_timm(tmp_path / "out")
    again = ViTImageClassifier.from_preset(tmp_path / "out", num_classes=0)
    # The classifier's own predict takes images as they come.
    _near(_run(again.feature_model(), expected["images"]), expected["pooled"], "pooled")


# === With the other packages ===


SIZES = {
    "dinov3_vits16": "vit_small_patch16_dinov3_qkvb",
    "dinov3_vits16plus": "vit_small_plus_patch16_dinov3_qkvb",
    "dinov3_vitb16": "vit_base_patch16_dinov3_qkvb",
    "dinov3_vitl16": "vit_large_patch16_dinov3_qkvb",
    "dinov3_vith16plus": "vit_huge_plus_patch16_dinov3_qkvb",
    "dinov3_vit7b16": "vit_7b_patch16_dinov3",
    "pe_core_tiny_patch16_384": "vit_pe_core_tiny_patch16_384",
    "pe_core_small_patch16_384": "vit_pe_core_small_patch16_384",
    "pe_core_base_patch16_224": "vit_pe_core_base_patch16_224",
    "pe_core_large_patch14_336": "vit_pe_core_large_patch14_336",
    "pe_core_gigantic_patch14_448": "vit_pe_core_gigantic_patch14_448",
    "vit_mae_huge_patch14_224": "vit_huge_patch14_224",
    "clip_gigantic_patch14_224": "vit_gigantic_patch14_clip_224",
    "clip_large_patch14_336": "vit_large_patch14_clip_336",
    "deit3_huge_patch14_224": "deit3_huge_patch14_224",
    "deit_small_distilled_patch16_224": "deit_small_distilled_patch16_224",
    "dinov2_giant_patch14_518": "vit_giant_patch14_dinov2",
    "dinov2_small_patch14_518": "vit_small_patch14_dinov2",
    "siglip2_giantopt_patch16_384": "vit_giantopt_patch16_siglip_384",
    "siglip_so400m_patch14_384": "vit_so400m_patch14_siglip_378",
}


@pytest.mark.across
@pytest.mark.filterwarnings("default")  # of the other packages
@pytest.mark.parametrize("preset", SIZES)
def test_presets_have_as_many_parameters_as_timms_models(preset):
    import timm
    import torch

    with torch.device("meta"):
        theirs = timm.create_model(SIZES[preset], num_classes=0)
    fields = {key: x for key, x in PRESETS[preset].items() if not key.startswith("task_")}
    pooling = PRESETS[preset].get("task_pooling", "token")
    counts = []
    for layers in (1, 2):  # the others are as large as the second
        with keras_internals.without_values():
            backbone = ViTBackbone(**{**fields, "num_layers": layers})
            counts.append(ViTImageClassifier(backbone, 0, pooling=pooling).count_params())
    ours = counts[0] + (fields["num_layers"] - 1) * (counts[1] - counts[0])
    assert ours == sum(x.numel() for x in theirs.parameters())
