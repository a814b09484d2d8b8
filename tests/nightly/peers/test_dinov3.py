"""What keras-hub's tests of DINOv3 assert, with the classes of kmodels."""

import keras
import numpy as np
import pytest
from hub_case import assert_close, run_model_saving_test, run_vision_backbone_test

from kmodels.models import DINOV3Backbone

pytestmark = pytest.mark.across

SIZES = {
    "patch_size": 16,
    "num_layers": 2,
    "hidden_dim": 16,
    "num_heads": 2,
    "intermediate_dim": 16 * 4,
    "layer_scale_init_value": 1.0,
    "num_register_tokens": 4,
    "use_gated_mlp": False,
    "image_shape": (64, 64, 3),
    "name": "dinov3_backbone",
}
GATED = {**SIZES, "use_gated_mlp": True, "hidden_activation": "silu"}
INPUT = {"pixel_values": np.ones((2, 64, 64, 3), "float32")}


@pytest.mark.parametrize("sizes", [SIZES, GATED], ids=["plain", "gated"])
def test_backbone_basics(sizes):
    """Tokens of 16 patches, class token and registers; `pyramid_outputs` has each block's."""
    run_vision_backbone_test(
        DINOV3Backbone,
        sizes,
        INPUT,
        (2, 21, 16),
        expected_pyramid_output_keys=["stem", "stage1", "stage2"],
        expected_pyramid_image_sizes=[(21, 16)] * 3,
    )


@pytest.mark.parametrize("sizes", [SIZES, GATED], ids=["plain", "gated"])
def test_saved_model(sizes, tmp_path):
    """A .keras file gives the backbone back."""
    run_model_saving_test(DINOV3Backbone, sizes, INPUT, tmp_path)


def test_another_size_needs_no_other_weights(tmp_path):
    model = DINOV3Backbone(**SIZES)
    model.save_to_preset(tmp_path / "model")
    wider = DINOV3Backbone.from_preset(tmp_path / "model", image_shape=(48, 80, 3))
    for one, other in zip(wider.weights, model.weights, strict=True):
        assert_close(one.value, other.value)
    found = wider({"pixel_values": np.ones((2, 48, 80, 3), "float32")})
    assert tuple(found.shape) == (2, 20, 16)


def test_pyramid_with_the_final_norm():
    model = DINOV3Backbone(**SIZES, apply_layernorm=True)
    again = DINOV3Backbone.from_config(model.get_config())
    last = keras.Model(again.inputs, again.pyramid_outputs["stage2"])
    again.set_weights(model.get_weights())
    assert_close(last([INPUT["pixel_values"]]), model(INPUT))
