"""ViTs of other packages through the real loaders: hidden states and logits, also resized."""

import logging
from pathlib import Path

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.models import ViTBackbone, ViTImageClassifier
from tolerances import tolerance

# Bare models without a head, and full-size ones, have tests of their own.
CASES = (
    "hf_bfloat16",
    "hf_oblong",
    "hf_sharded",
    "hf_token",
    "hf_variants",
    "npz_augreg",
    "npz_big_vision",
    "timm_gap",
    "timm_gap_norm",
    "timm_map",
    "timm_oblong",
    "timm_pre_norm",
    "timm_registers",
    "timm_registers_gap",
    "timm_scale",
    "timm_tanh",
    "timm_token",
)
OTHERS = ("base", "hf_model", "small")


def source_of(folder: Path) -> Path:
    return folder / "model" if (folder / "model").is_dir() else folder / "model.npz"


def expected_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "expected.npz") as held:
        return dict(held)


def test_every_reference_has_a_test(references):
    found = [folder.name for folder in (references / "vit").iterdir() if folder.is_dir()]
    assert sorted(found) == sorted(CASES + OTHERS)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits_are_equal(references, case):
    folder = references / "vit" / case
    expected = expected_of(folder)
    model = ViTImageClassifier.from_preset(source_of(folder))
    found = model.backbone.intermediates(expected["images"])
    names = [name for name in found if name in expected]
    assert case.startswith("npz") or len(names) == 3
    for name in names:  # in the order of computation, so the first to differ is the culprit
        np.testing.assert_allclose(
            to_numpy(found[name]), expected[name], atol=tolerance("hidden"), rtol=0, err_msg=name
        )
    if "final" in expected:
        last = to_numpy(list(found.values())[-1])
        np.testing.assert_allclose(last, expected["final"], atol=tolerance("hidden"), rtol=0)
    logits = to_numpy(model(expected["images"]))
    assert np.abs(expected["logits"]).max() > 0.5
    np.testing.assert_allclose(logits, expected["logits"], atol=tolerance("logits"), rtol=0)


# One per origin and layout of the positions; transformers itself resizes from squares alone.
RESIZED = (
    "hf_token",
    "npz_augreg",
    "npz_big_vision",
    "timm_oblong",
    "timm_registers",
    "timm_token",
)


@pytest.mark.parametrize("case", RESIZED)
def test_another_image_size_gives_what_its_origin_gives(references, case):
    folder = references / "vit" / case
    expected = expected_of(folder)
    images = expected["resized_images"]
    model = ViTImageClassifier.from_preset(source_of(folder), image_shape=images.shape[1:])
    assert model.preprocessor.image_size == images.shape[1:3]
    logits = to_numpy(model(images))
    np.testing.assert_allclose(logits, expected["resized_logits"], atol=tolerance("logits"), rtol=0)


@pytest.mark.parametrize("change", [{"approximate_gelu": True}, {"layer_norm_epsilon": 0.05}])
def test_a_wrong_variant_would_be_seen(references, change):
    folder = references / "vit" / "hf_token"
    expected = expected_of(folder)
    logits = to_numpy(
        ViTImageClassifier.from_preset(source_of(folder), **change)(expected["images"])
    )
    assert np.abs(logits - expected["logits"]).max() > 2 * tolerance("logits")


def test_a_bare_model_has_a_pooler_and_no_head(references):
    folder = references / "vit" / "hf_model"
    expected = expected_of(folder)
    backbone = ViTBackbone.from_preset(source_of(folder))
    tokens = to_numpy(backbone(expected["images"]))
    np.testing.assert_allclose(tokens, expected["final"], atol=tolerance("hidden"), rtol=0)
    model = ViTImageClassifier.from_preset(source_of(folder), num_classes=3)
    dense = model.get_layer("pre_logits")
    pooled = np.tanh(to_numpy(dense(keras.ops.convert_to_tensor(expected["final"][:, 0]))))
    np.testing.assert_allclose(pooled, expected["pooled"], atol=tolerance("hidden"), rtol=0)


def test_a_backbone_leaves_the_head_aside(references):
    folder = references / "vit" / "timm_map"
    expected = expected_of(folder)
    backbone = ViTBackbone.from_preset(source_of(folder))
    tokens = to_numpy(backbone(expected["images"]))
    np.testing.assert_allclose(tokens, expected["final"], atol=tolerance("hidden"), rtol=0)


def test_another_number_of_classes_makes_a_new_head_and_says_so(references, caplog):
    folder = references / "vit" / "timm_token"
    with caplog.at_level(logging.INFO, "kmodels"):
        model = ViTImageClassifier.from_preset(source_of(folder), num_classes=9)
    assert "new weights for logits/kernel, logits/bias" in caplog.text
    assert model(expected_of(folder)["images"]).shape == (2, 9)
    assert to_numpy(model.get_layer("logits").kernel).std() > 0.01
    caplog.clear()
    with caplog.at_level(logging.INFO, "kmodels"):
        ViTImageClassifier.from_preset(source_of(folder), num_classes=5)
    assert not caplog.text


@pytest.mark.parametrize(("case", "parameters"), [("base", 86_567_656), ("small", 22_050_664)])
def test_full_size_models_agree_on_one_image(references, case, parameters):
    folder = references / "vit" / case
    expected = expected_of(folder)
    model = ViTImageClassifier.from_preset(source_of(folder))
    assert model.count_params() == parameters
    logits = to_numpy(model(expected["images"]))
    assert np.abs(expected["logits"]).max() > 0.5
    np.testing.assert_allclose(logits, expected["logits"], atol=tolerance("logits"), rtol=0)
