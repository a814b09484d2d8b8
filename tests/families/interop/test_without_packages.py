"""Without keras-hub and keras-cv one line says what to install."""

import sys

import pytest

from kmodels.interop import keras_cv, keras_hub, keras_nlp
from kmodels.models import ViTBackbone
from refusals import refused


def test_keras_nlp_is_the_former_name():
    assert keras_nlp is keras_hub


def test_keras_hub_is_named_where_it_is_missing(monkeypatch, tmp_path):
    model = ViTBackbone.from_preset("vit_debug")
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    advice = r"needs keras-hub, which is not installed: pip install 'kmodels\[hub\]'"
    for call in (
        lambda: keras_hub.to_hub(model),
        lambda: keras_hub.from_hub(tmp_path),
        lambda: keras_hub.read_lora(model, tmp_path / "any.lora.h5"),
    ):
        refused(advice, call)


def test_other_models_have_no_counterpart():
    refused("object of object has no counterpart; Gemma4Backbone", keras_hub.from_hub, object())


@pytest.mark.parametrize(
    ("package", "call", "message"),
    [
        ("keras_cv", keras_cv.layers, r"needs (keras-cv|TensorFlow).*'kmodels\[cv\]'"),
        (
            "tensorflow",
            lambda: keras_cv.Augmentation(None),
            "keras-cv needs TensorFlow .* pip install tensorflow",
        ),
    ],
)
def test_what_keras_cv_needs_is_named(monkeypatch, package, call, message):
    monkeypatch.setitem(sys.modules, package, None)
    refused(message, call)
