"""A rematerialised step gives the same numbers as a plain one, random ones included."""

import functools
from typing import Any

import keras
import numpy as np
import pytest

from gradients import trainable_gradients
from kmodels import InputError
from kmodels.layers import remat
from kmodels.models import GemmaBackbone, ViTBackbone
from tolerances import tolerance

BACKEND = keras.backend.backend()
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype("float32")


def model(mode, lora=False, dtype="float32", rate=0.3):
    keras.utils.set_random_seed(3)
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    random: dict[str, Any] = {
        "dropout_rate": rate,
        "attention_dropout": rate,
        "drop_path_rate": rate,
    }
    made = ViTBackbone(image_shape=(8, 8, 1), patch_size=4, dtype=dtype, **sizes, **random)
    if lora:
        made.enable_lora(2, dropout=rate, targets=("query", "value", "up"))
        for variable in made.trainable_weights:
            if "lora_b" in variable.path:
                variable.assign(keras.ops.ones(variable.shape))
    remat.rematerialize(made, mode)
    return made


@functools.cache
def two_steps(mode, **settings):
    """Loss and gradients of two steps: the random streams have to move on as well."""
    step = trainable_gradients(model(mode, **settings))
    return [step(IMAGES) for _ in range(2)]


@pytest.mark.each_time("block-settings0", "mlp-settings4", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("block", {"lora": True}),
        pytest.param("block", {"rate": 0.0}, marks=pytest.mark.once),
        pytest.param("block", {"dtype": "mixed_bfloat16"}, marks=pytest.mark.once),
        ("attention", {}),
        ("mlp", {}),
        ("mlp", {"lora": True, "dtype": "mixed_bfloat16"}),
    ],
)
def test_same_loss_and_gradients(mode, settings):
    results = [two_steps(chosen, **settings) for chosen in ("none", mode)]
    # Under XLA a part that is computed again is rounded to bfloat16 in other places.
    rounded = settings.get("dtype") and BACKEND == "jax"
    within = tolerance("remat", "bfloat16" if rounded else "float32")
    for (loss, gradients), (again, found) in zip(*results, strict=True):
        assert again == pytest.approx(loss, rel=within)
        assert gradients.keys() == found.keys()
        # One bound for all: the bias of the keys has a gradient of zero except for rounding.
        largest = max(np.abs(gradient).max() for gradient in gradients.values())
        bound = within * largest
        for path, gradient in gradients.items():
            np.testing.assert_allclose(found[path], gradient, rtol=0, atol=bound, err_msg=path)
    (_, first), (_, second) = results[0]
    moved = any(np.abs(first[path] - second[path]).max() > 0 for path in first)
    assert moved == (settings.get("rate") != 0.0)


def test_a_part_of_a_gated_block_is_computed_again():
    """Gemma's MLP does the same in training, so it is not told whether it is."""
    keras.utils.set_random_seed(3)
    made = GemmaBackbone.from_preset("gemma3_debug", num_layers=1)
    inputs: Any = {"token_ids": np.arange(3, 15)[None], "padding_mask": np.ones((1, 12), "int32")}
    plain = trainable_gradients(made)(inputs)
    remat.rematerialize(made, "mlp")
    counted = []
    mlp = made.get_layer("block_0").mlp
    mlp.gate.call = lambda x, own=mlp.gate.call, **more: counted.append(0) or own(x, **more)
    loss, gradients = trainable_gradients(made)(inputs)
    # JAX traces once, and computes again what it traced.
    assert len(counted) == (1 if BACKEND == "jax" else 2)
    assert loss == pytest.approx(plain[0], rel=1e-6)
    for path, gradient in plain[1].items():
        bound = tolerance("remat") * np.abs(gradient).max()
        np.testing.assert_allclose(gradients[path], gradient, rtol=0, atol=bound, err_msg=path)


@pytest.mark.once
def test_unknown_mode_is_refused():
    with pytest.raises(InputError, match="remat is 'all'; choose one of none, block"):
        remat.rematerialize(model("none"), "all")
