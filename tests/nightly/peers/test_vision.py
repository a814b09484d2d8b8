"""What keras-hub's tests of ViT, DeiT, DINOv2, DINOv3 and SigLIP's image tower assert."""

import keras
import numpy as np
import pytest
from hub_case import assert_close, run_task_test, run_vision_backbone_test

from kmodels import models
from kmodels.core.errors import InputError
from kmodels.models import (
    DeiTBackbone,
    DINOV2Backbone,
    DINOV3Backbone,
    SigLIPVisionEncoder,
    ViTBackbone,
    ViTImageClassifier,
)
from refusals import refused

pytestmark = pytest.mark.across

TINY = {"num_layers": 2, "hidden_dim": 16, "num_heads": 2, "intermediate_dim": 16 * 4}
SMALL = {"image_shape": (28, 28, 3), "num_layers": 3, "hidden_dim": 48, "num_heads": 6}
VIT = {**SMALL, "patch_size": (4, 4), "mlp_dim": 48 * 4, "use_mha_bias": True}
DEIT = {**SMALL, "patch_size": 4, "intermediate_dim": 48 * 4, "use_mha_bias": True}
DINOV2 = {
    **TINY,
    "patch_size": 14,
    "layer_scale_init_value": 1.0,
    "num_register_tokens": 0,
    "use_swiglu_ffn": False,
    "image_shape": (70, 70, 3),
    "name": "dinov2_backbone",
}
DINOV3 = {
    **TINY,
    "patch_size": 16,
    "layer_scale_init_value": 1.0,
    "num_register_tokens": 4,
    "use_gated_mlp": False,
    "image_shape": (64, 64, 3),
    "name": "dinov3_backbone",
}
# keras-hub's tests give these by position, in this order; its images have 224 pixels.
NAMES = ("patch_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim")
SIGLIP = {
    **dict(zip(NAMES, (16, 64, 2, 2, 128), strict=True)),
    "image_shape": (64, 64, 3),
    "name": "sig_lip_vision_encoder",
}


def _ones(*shape):
    return np.ones(shape, "float32")


IMAGES = _ones(2, 28, 28, 3)
DINO_INPUT = {"images": _ones(2, 70, 70, 3)}
DINOV3_INPUT = {"pixel_values": _ones(2, 64, 64, 3)}
SIGLIP_INPUT = {"images": _ones(2, 64, 64, 3)}
# Class, arguments, input and output shape; an output of 3 axes is of patches and special tokens.
BACKBONES = {
    "vit": (ViTBackbone, VIT, IMAGES, (2, 49 + 1, 48)),
    "vit_patches": (ViTBackbone, {**VIT, "use_class_token": False}, IMAGES, (2, 49, 48)),
    "deit": (DeiTBackbone, DEIT, IMAGES, (2, 49 + 2, 48)),
    "dinov2": (DINOV2Backbone, DINOV2, DINO_INPUT, (2, 25 + 1, 16)),
    "dinov2_registers": (
        DINOV2Backbone,
        {**DINOV2, "num_register_tokens": 4, "use_swiglu_ffn": True},
        DINO_INPUT,
        (2, 25 + 5, 16),
    ),
    "dinov3": (DINOV3Backbone, DINOV3, DINOV3_INPUT, (2, 16 + 5, 16)),
    "dinov3_gated": (
        DINOV3Backbone,
        {**DINOV3, "use_gated_mlp": True, "hidden_activation": "silu"},
        DINOV3_INPUT,
        (2, 16 + 5, 16),
    ),
    "siglip": (SigLIPVisionEncoder, SIGLIP, SIGLIP_INPUT, (2, 64)),
    "siglip2": (SigLIPVisionEncoder, {**SIGLIP, "hidden_dim": 128}, SIGLIP_INPUT, (2, 128)),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_backbone_basics(name):
    """On every path of keras-hub's helper; `pyramid_outputs` of DINO has each block's output."""
    cls, sizes, data, shape = BACKBONES[name]
    pyramid = {}
    if name.startswith("dino"):
        pyramid["expected_pyramid_output_keys"] = ["stem", "stage1", "stage2"]
        pyramid["expected_pyramid_image_sizes"] = [shape[1:]] * 3
    run_vision_backbone_test(cls, sizes, data, shape, **pyramid)


# === Classifiers ===


@pytest.fixture(params=["ViT", "DeiT"])
def classifier(request):
    kind = request.param
    converter = getattr(models, f"{kind}ImageConverter")(image_size=(28, 28), scale=1 / 255.0)
    preprocessor = getattr(models, f"{kind}ImageClassifierPreprocessor")(image_converter=converter)
    cls, sizes, _, _ = BACKBONES[kind.lower()]
    arguments = {"backbone": cls(**sizes), "num_classes": 2, "preprocessor": preprocessor}
    return getattr(models, f"{kind}ImageClassifier"), arguments


@pytest.mark.filterwarnings("ignore:float images have no value above 1")  # as theirs feeds
def test_classifier_basics(classifier):
    """Predicts and trains without a call of `compile`, also on what `map` preprocessed."""
    run_task_test(*classifier, (IMAGES, [0, 1]), (2, 2))


def test_head_dtype(classifier):
    """`head_dtype` is the policy of the layer that gives the logits."""
    cls, arguments = classifier
    assert cls(**arguments, head_dtype="bfloat16").output_dense.compute_dtype == "bfloat16"


def test_a_checkpoint_without_distillation_token_is_no_deit():
    refused("without it take ViTBackbone", DeiTBackbone.from_preset, "vit_debug")


# === DINOv2 and DINOv3 ===


def test_a_table_of_positions_of_another_size_is_refused():
    with pytest.raises(InputError, match=r"position_embedding_shape is \(518, 518, 3\)"):
        DINOV2Backbone(**DINOV2, position_embedding_shape=(518, 518, 3))


@pytest.mark.parametrize("name", ["dinov2", "dinov3"])
def test_pyramid_with_the_final_norm(name):
    cls, sizes, data, _ = BACKBONES[name]
    model = cls(**sizes, apply_layernorm=True)
    again = cls.from_config(model.get_config())
    last = keras.Model(again.inputs, again.pyramid_outputs["stage2"])
    again.set_weights(model.get_weights())
    assert_close(last(list(data.values())), model(data))


# === SigLIP ===


def test_an_activation_that_is_not_there():
    with pytest.raises(InputError, match="intermediate_activation is 'tanh'; choose one of gelu"):
        SigLIPVisionEncoder(**SIGLIP, intermediate_activation="tanh")


def test_the_encoder_is_a_classifier_without_head_that_pools_by_attention(tmp_path):
    fields = SigLIPVisionEncoder(**SIGLIP).config.to_dict()
    task = ViTImageClassifier.from_preset("siglip_base_patch16_224", num_classes=0, **fields)
    task.save_to_preset(tmp_path / "task")
    read = SigLIPVisionEncoder.from_preset(tmp_path / "task")
    assert_close(read(SIGLIP_INPUT), task(SIGLIP_INPUT["images"]))
    read.save_to_preset(tmp_path / "encoder")
    again = SigLIPVisionEncoder.from_preset(tmp_path / "encoder")
    assert_close(again(SIGLIP_INPUT), read(SIGLIP_INPUT))
    refused("SigLIPVisionEncoder gives no tokens; give a ViTBackbone", ViTImageClassifier, read, 2)
