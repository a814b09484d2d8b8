"""What keras-hub's tests of DINOv2 assert, with the classes of kmodels."""

import keras
import numpy as np
import pytest
from hub_case import assert_close, run_model_saving_test, run_vision_backbone_test

from kmodels.core.errors import InputError
from kmodels.models import DINOV2Backbone

pytestmark = pytest.mark.across

PLAIN = {
    "patch_size": 14,
    "num_layers": 2,
    "hidden_dim": 16,
    "num_heads": 2,
    "intermediate_dim": 16 * 4,
    "layer_scale_init_value": 1.0,
    "num_register_tokens": 0,
    "use_swiglu_ffn": False,
    "image_shape": (70, 70, 3),
    "name": "dinov2_backbone",
}
REGISTERS = {**PLAIN, "num_register_tokens": 4, "use_swiglu_ffn": True}
INPUT = {"images": np.ones((2, 70, 70, 3), "float32")}


@pytest.mark.parametrize("sizes", [PLAIN, REGISTERS], ids=["plain", "registers"])
def test_backbone_basics(sizes):
    """Tokens of 25 patches, class token and registers; `pyramid_outputs` has each block's."""
    tokens = 25 + 1 + sizes["num_register_tokens"]
    run_vision_backbone_test(
        DINOV2Backbone,
        sizes,
        INPUT,
        (2, tokens, 16),
        expected_pyramid_output_keys=["stem", "stage1", "stage2"],
        expected_pyramid_image_sizes=[(tokens, 16)] * 3,
    )


@pytest.mark.parametrize("sizes", [PLAIN, REGISTERS], ids=["plain", "registers"])
def test_saved_model(sizes, tmp_path):
    """A .keras file gives the backbone back."""
    run_model_saving_test(DINOV2Backbone, sizes, INPUT, tmp_path)


def test_position_embedding_interpolation(tmp_path):
    """A .keras file keeps the positions; a preset is resized for other images."""
    model = DINOV2Backbone(**PLAIN)
    output = model(INPUT)
    model.save(tmp_path / "model.keras")
    assert_close(keras.models.load_model(tmp_path / "model.keras")(INPUT), output)
    model.save_to_preset(tmp_path / "model")
    # keras-hub's test asks for 128 pixels, of which it leaves the last two unseen; that is refused.
    wider = DINOV2Backbone.from_preset(tmp_path / "model", image_shape=(126, 126, 3))
    found = wider({"images": np.ones((2, 126, 126, 3), "float32")})
    assert tuple(found.shape) == (2, 82, 16) != tuple(output.shape)
    with pytest.raises(InputError, match="14 pixels does not divide the image side of 128"):
        DINOV2Backbone.from_preset(tmp_path / "model", image_shape=(128, 128, 3))


def test_pyramid_with_the_final_norm():
    model = DINOV2Backbone(**PLAIN, apply_layernorm=True)
    again = DINOV2Backbone.from_config(model.get_config())
    last = keras.Model(again.inputs, again.pyramid_outputs["stage2"])
    again.set_weights(model.get_weights())
    assert_close(last([INPUT["images"]]), model(INPUT))


def test_a_table_of_positions_of_another_size_is_refused():
    with pytest.raises(InputError, match=r"position_embedding_shape is \(518, 518, 3\)"):
        DINOV2Backbone(**PLAIN, position_embedding_shape=(518, 518, 3))
