"""What keras-hub's tests of ViT assert, with the classes of kmodels."""

import numpy as np
import pytest
from hub_case import (
    run_backbone_test,
    run_model_saving_test,
    run_task_test,
)

from kmodels.models import (
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageConverter,
)

pytestmark = pytest.mark.across

SIZES = {
    "image_shape": (28, 28, 3),
    "patch_size": (4, 4),
    "num_layers": 3,
    "hidden_dim": 48,
    "num_heads": 6,
    "mlp_dim": 48 * 4,
    "use_mha_bias": True,
}
IMAGES = np.ones((2, 28, 28, 3), "float32")


@pytest.fixture
def classifier():
    converter = ViTImageConverter(image_size=(28, 28), scale=1 / 255.0)
    preprocessor = ViTImageClassifierPreprocessor(image_converter=converter)
    return {"backbone": ViTBackbone(**SIZES), "num_classes": 2, "preprocessor": preprocessor}


def test_backbone_basics():
    """Tokens of 49 patches and the class token, on every path that keras-hub's helper takes."""
    run_backbone_test(ViTBackbone, SIZES, IMAGES, (2, 50, 48))


def test_backbone_basics_without_class_token():
    """The same with the patches alone."""
    run_backbone_test(ViTBackbone, {**SIZES, "use_class_token": False}, IMAGES, (2, 49, 48))


def test_saved_model_of_the_backbone(tmp_path):
    """A .keras file gives the backbone back; `test_saved_model` of keras-hub's backbone."""
    run_model_saving_test(ViTBackbone, SIZES, IMAGES, tmp_path)


def test_classifier_basics(classifier):
    """Predicts and trains without a call of `compile`, also on what `map` preprocessed."""
    run_task_test(ViTImageClassifier, classifier, (IMAGES, [0, 1]), (2, 2))


def test_head_dtype(classifier):
    """`head_dtype` is the policy of the layer that gives the logits."""
    model = ViTImageClassifier(**classifier, head_dtype="bfloat16")
    assert model.output_dense.compute_dtype == "bfloat16"


def test_saved_model(classifier, tmp_path):
    """A .keras file gives the classifier back."""
    run_model_saving_test(ViTImageClassifier, classifier, IMAGES, tmp_path)
