"""Inside lora.disabled a model with adapters is its frozen base."""

import keras
import numpy as np
import pytest

from kmodels import lora
from kmodels.checkpoint import state
from kmodels.core.errors import InputError
from kmodels.models import ViTImageClassifier

IMAGES = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")


def logits(model):
    return keras.ops.convert_to_numpy(model(keras.ops.convert_to_tensor(IMAGES)))


def test_adapters_are_away_and_back():
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    # Frozen, as below: on torch what keeps nothing for a backward pass runs by other kernels.
    model.backbone.trainable = False
    base = logits(model)
    model.backbone.trainable = True
    model.enable_lora(rank=2)
    for variable in model.trainable_variables:
        if variable.name == "lora_b":
            state.put(variable, np.ones(variable.shape, "float32"))
    adapted = logits(model)
    assert np.abs(adapted - base).max() > 1e-3
    with pytest.raises(ZeroDivisionError), lora.disabled(model):
        np.testing.assert_array_equal(logits(model), base)
        raise ZeroDivisionError
    np.testing.assert_array_equal(logits(model), adapted)


def test_a_model_without_adapters_is_told():
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    with pytest.raises(InputError, match="found no LoRA adapters"), lora.disabled(model):
        pass
