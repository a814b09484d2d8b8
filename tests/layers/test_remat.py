"""A rematerialised step gives the same numbers as a plain one, random ones included."""

import keras
import numpy as np
import pytest

from differentiate import trainable_gradients
from kmodels import InputError
from kmodels.layers import remat
from kmodels.models import ViTBackbone

IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype("float32")


def model(mode, lora):
    keras.utils.set_random_seed(3)
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    made = ViTBackbone(image_shape=(8, 8, 1), patch_size=4, dropout_rate=0.3, **sizes)
    if lora:
        made.enable_lora(2, dropout=0.3)
        for variable in made.trainable_weights:
            if "lora_b" in variable.path:
                variable.assign(keras.ops.ones(variable.shape))
    remat.rematerialize(made, mode)
    return made


@pytest.mark.parametrize(("mode", "lora"), [("block", True), ("attention", False)])
def test_same_loss_and_gradients(mode, lora):
    results = []
    for chosen in ("none", mode):
        made = model(chosen, lora)
        # Two steps: the random streams have to move on as well.
        results.append([trainable_gradients(made, IMAGES) for _ in range(2)])
    for (loss, gradients), (again, found) in zip(*results, strict=True):
        assert again == pytest.approx(loss, rel=1e-6)
        assert gradients.keys() == found.keys()
        # One bound for all: the bias of the keys has a gradient of zero but for rounding.
        bound = 1e-5 * max(np.abs(gradient).max() for gradient in gradients.values())
        for path, gradient in gradients.items():
            np.testing.assert_allclose(found[path], gradient, rtol=0, atol=bound, err_msg=path)
    assert results[0][0][0] != results[0][1][0]


def test_unknown_mode_is_refused():
    with pytest.raises(InputError, match="remat is 'all'; choose none, block, attention"):
        remat.rematerialize(model("none", False), "all")
