"""Without keras-hub and keras-cv one line says what to install."""

import sys

import pytest

from kmodels.core.errors import InputError
from kmodels.interop import keras_cv, keras_hub, keras_nlp
from kmodels.models import ViTBackbone


@pytest.fixture
def model():
    return ViTBackbone.from_preset("vit_debug")


def test_keras_nlp_is_the_former_name():
    assert keras_nlp is keras_hub


def test_keras_hub_is_named_where_it_is_missing(model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    advice = r"needs keras-hub, which is not installed: pip install 'kmodels\[hub\]'"
    with pytest.raises(InputError, match=advice):
        keras_hub.to_hub(model)
    with pytest.raises(InputError, match=advice):
        keras_hub.from_hub(tmp_path)
    with pytest.raises(InputError, match=advice):
        keras_hub.read_lora(model, tmp_path / "any.lora.h5")


def test_other_models_have_no_counterpart(model):
    with pytest.raises(InputError, match="object of object has no counterpart; Gemma4Backbone"):
        keras_hub.from_hub(object())


def test_keras_cv_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_cv", None)
    with pytest.raises(InputError, match=r"needs (keras-cv|TensorFlow).*'kmodels\[cv\]'"):
        keras_cv.layers()


def test_keras_cv_needs_tensorflow_on_each_backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(InputError, match=r"keras-cv needs TensorFlow .* pip install tensorflow"):
        keras_cv.Augmentation(None)
