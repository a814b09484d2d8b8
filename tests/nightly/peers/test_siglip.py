"""What keras-hub's tests of SigLIP assert of its vision tower, with the class of kmodels."""

import numpy as np
import pytest
from hub_case import assert_close, run_backbone_test, run_model_saving_test

from kmodels.core.errors import InputError
from kmodels.models import SigLIPVisionEncoder, ViTImageClassifier

pytestmark = pytest.mark.across

# keras-hub's tests give these by position, in this order; its images have 224 pixels.
NAMES = ("patch_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim")
FIRST = {**dict(zip(NAMES, (16, 64, 2, 2, 128), strict=True)), "image_shape": (64, 64, 3)}
SECOND = {**FIRST, "hidden_dim": 128}
INPUT = {"images": np.ones((2, 64, 64, 3), "float32")}


@pytest.mark.parametrize("sizes", [FIRST, SECOND], ids=["siglip", "siglip2"])
def test_backbone_basics(sizes):
    """The encoder gives one vector for each image."""
    sizes = {**sizes, "name": "sig_lip_vision_encoder"}
    run_backbone_test(SigLIPVisionEncoder, sizes, INPUT, (2, sizes["hidden_dim"]))


@pytest.mark.parametrize("sizes", [FIRST, SECOND], ids=["siglip", "siglip2"])
def test_saved_model(sizes, tmp_path):
    """A .keras file gives the encoder back."""
    run_model_saving_test(SigLIPVisionEncoder, sizes, INPUT, tmp_path)


def test_arguments_by_position():
    assert SigLIPVisionEncoder(16, 64, 2, 2, 128, image_shape=(64, 64, 3)).hidden_dim == 64
    with pytest.raises(InputError, match="intermediate_activation is 'tanh'; choose one of gelu"):
        SigLIPVisionEncoder(**FIRST, intermediate_activation="tanh")


def test_the_encoder_is_a_classifier_without_head_that_pools_by_attention(tmp_path):
    encoder = SigLIPVisionEncoder(**FIRST)
    fields = encoder.config.to_dict()
    task = ViTImageClassifier.from_preset("siglip_base_patch16_224", num_classes=0, **fields)
    task.save_to_preset(tmp_path / "task")
    read = SigLIPVisionEncoder.from_preset(tmp_path / "task")
    assert_close(read(INPUT), task(INPUT["images"]))
    read.save_to_preset(tmp_path / "encoder")
    assert_close(SigLIPVisionEncoder.from_preset(tmp_path / "encoder")(INPUT), read(INPUT))
    with pytest.raises(InputError, match="SigLIPVisionEncoder gives no tokens; give a ViTBackbone"):
        ViTImageClassifier(encoder, 2)
