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


def source_of(folder: Path) -> Path:
    return folder / "model" if (folder / "model").is_dir() else folder / "model.npz"


def expected_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "expected.npz") as held:
        return dict(held)


# One per origin and layout of the positions; transformers itself resizes from squares alone.


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
