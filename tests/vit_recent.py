"""The models of `references/vit_recent.py`: what they give, and models here made of them."""

import functools
import warnings

import keras
import numpy as np

from arrays import to_numpy
from kmodels.models import ViTBackbone, ViTImageClassifier
from tolerances import tolerance

CASES = (
    *("dinov3", "dinov3_gated", "ijepa", "ijepa_classes", "mae", "mae_pretraining"),
    *("timm_dinov3", "timm_dinov3_gated", "timm_pe", "timm_pe_classes", "timm_pe_lang"),
)
TIMM = tuple(case for case in CASES if case.startswith("timm"))
# The encoder alone is read, and biases that it leaves out become zeros.
UNEQUAL = ("mae_pretraining",)


SHIFTED = {
    "image_shape": (16, 24, 3),
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "mlp_dim": 24,
    "num_register_tokens": 2,
    "use_position_embedding": False,
    "rope_theta": 100.0,
}


@functools.cache
def expected_of(references, case):
    with np.load(references / "vit_recent" / case / "expected.npz") as held:
        return dict(held)


def read(references, case, **more):
    head = {} if "logits" in expected_of(references, case) else {"num_classes": 0}
    with warnings.catch_warnings():
        if case in UNEQUAL:
            warnings.filterwarnings("ignore", ".*tensors of MAE's pretraining alone")
        return ViTImageClassifier.from_preset(
            references / "vit_recent" / case / "model", **head, **more
        )


@functools.cache
def model_of(references, case):
    return read(references, case)


def run(model, images):
    """What a model gives, as arrays; compiled on JAX, where that takes less than op after op."""
    if keras.backend.backend() == "jax":
        return model.predict(images, verbose=0)
    return keras.tree.map_structure(to_numpy, model(images))


def near(found, expected, name):
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(found, expected, atol=tolerance("hidden"), rtol=0, err_msg=name)


def differ(found, expected):
    assert np.abs(found - expected).max() > 20 * tolerance("hidden")


def changed(references, case, **changes):
    """The model of a case with another config, and its weights where both have them."""
    backbone = model_of(references, case).backbone
    other = ViTBackbone(**{**backbone.config.to_dict(), **changes})
    held = {variable.path: variable for variable in backbone.variables}
    for variable in other.variables:
        if (old := held.get(variable.path)) is not None and old.shape == variable.shape:
            variable.assign(to_numpy(old.value))
    return other
