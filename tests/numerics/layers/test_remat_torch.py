"""What torch holds under rematerialisation; collects nothing on the other backends."""

import gc
from typing import Any

import keras
import numpy as np
import pytest

from kmodels.layers import remat
from kmodels.models import ViTBackbone

if keras.backend.backend() == "torch":
    import torch

    IMAGES = np.zeros((2, 8, 8, 1), "float32")

    def model(mode):
        sizes: dict[str, Any] = {"num_layers": 3, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 64}
        made = ViTBackbone(image_shape=(8, 8, 1), patch_size=2, dropout_rate=0.1, **sizes)
        remat.rematerialize(made, mode)
        return made

    def step(made):
        loss = made(IMAGES, training=True).mean()
        torch.autograd.grad(loss, [variable.value for variable in made.trainable_weights])

    @pytest.mark.parametrize("mode", ["block", "attention", "mlp"])
    def test_what_was_computed_again_is_free_after_the_step(mode):
        """Tensors in a cycle of references would stay until Python looks for those."""
        made = model(mode)
        step(made)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            step(made)
            gc.collect()
            assert not [thing for thing in gc.garbage if isinstance(thing, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    def test_less_is_kept_for_backward():
        kept = {}
        for mode in remat.MODES:
            made, sizes = model(mode), {}
            weights = {variable.value.data_ptr() for variable in made.weights}

            def keep(tensor, weights=weights, sizes=sizes):
                if tensor.data_ptr() not in weights:
                    sizes[tensor.data_ptr()] = tensor.nbytes
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = made(IMAGES, training=True)
            kept[mode] = sum(sizes.values())
            del output
        assert kept["block"] < min(kept["attention"], kept["mlp"])
        assert max(kept["attention"], kept["mlp"]) < kept["none"]
