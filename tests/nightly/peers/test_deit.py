"""What keras-hub's tests of DeiT assert, with the classes of kmodels."""

import numpy as np
import pytest
from hub_case import (
    run_backbone_test,
    run_model_saving_test,
    run_task_test,
)

from kmodels.core.errors import InputError
from kmodels.models import (
    DeiTBackbone,
    DeiTImageClassifier,
    DeiTImageClassifierPreprocessor,
    DeiTImageConverter,
)

pytestmark = pytest.mark.across

SIZES = {
    "image_shape": (28, 28, 3),
    "patch_size": 4,
    "num_layers": 3,
    "hidden_dim": 48,
    "num_heads": 6,
    "intermediate_dim": 48 * 4,
    "use_mha_bias": True,
}
IMAGES = np.ones((2, 28, 28, 3), "float32")


@pytest.fixture
def classifier():
    converter = DeiTImageConverter(image_size=(28, 28), scale=1 / 255.0)
    preprocessor = DeiTImageClassifierPreprocessor(image_converter=converter)
    return {"backbone": DeiTBackbone(**SIZES), "num_classes": 2, "preprocessor": preprocessor}


def test_backbone_basics():
    """Tokens of 49 patches, the class token and the distillation token."""
    run_backbone_test(DeiTBackbone, SIZES, IMAGES, (2, 51, 48))


def test_saved_model_of_the_backbone(tmp_path):
    """A .keras file gives the backbone back; `test_saved_model` of keras-hub's backbone."""
    run_model_saving_test(DeiTBackbone, SIZES, IMAGES, tmp_path)


def test_classifier_basics(classifier):
    """Predicts and trains without a call of `compile`, also on what `map` preprocessed."""
    run_task_test(DeiTImageClassifier, classifier, (IMAGES, [0, 1]), (2, 2))


def test_head_dtype(classifier):
    """`head_dtype` is the policy of the layer that gives the logits."""
    model = DeiTImageClassifier(**classifier, head_dtype="bfloat16")
    assert model.output_dense.compute_dtype == "bfloat16"


def test_saved_model(classifier, tmp_path):
    """A .keras file gives the classifier back."""
    run_model_saving_test(DeiTImageClassifier, classifier, IMAGES, tmp_path)


def test_a_checkpoint_without_distillation_token_is_no_deit():
    with pytest.raises(InputError, match="without it take ViTBackbone"):
        DeiTBackbone.from_preset("vit_debug")
