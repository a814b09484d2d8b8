"""Optimizer variables are known by weight and slot, whatever the class behind the public name."""

import keras
import numpy as np
import pytest

from arrays import assert_equal
from kmodels.checkpoint.state import slots
from kmodels.training import SGD, AdamW, Lamb, MomentumSGD, Muon
from pool import pool

EXPECTED = {
    "AdamW": {"momentum", "velocity"},
    "SGD": {"momentum"},
    "Adafactor": {"r", "c", "velocity"},
    "Lion": {"momentum"},
    "Muon": {"momentum"},
}
SETTINGS = {"SGD": {"momentum": 0.9}, "Muon": {"exclude_embeddings": False}}


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(5, name="first")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="second", use_bias=False)(x))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_variable_has_weight_and_slot(model, name):
    optimizer = getattr(keras.optimizers, name)(0.1, **SETTINGS.get(name, {}))
    optimizer.build(model.trainable_variables)
    found = slots(optimizer)
    assert len(found) == len(optimizer.variables)
    own = {key for key in found if ":" not in key}
    assert own == {"iteration", "learning_rate"}
    for path in ("first/kernel", "second/kernel"):
        assert {key.split(":")[1] for key in found if key.startswith(f"{path}:")} == EXPECTED[name]
    for key, variable in found.items():
        if key.startswith("first/kernel:") and not key.endswith((":r", ":c")):
            assert tuple(variable.shape) == (4, 5)


def test_averages_accumulators_and_a_scaling_optimizer(model):
    inner = keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    optimizer.build(model.trainable_variables)
    found = slots(optimizer)
    assert len(found) == len(optimizer.variables)
    for slot in ("average", "gradient_accumulator", "momentum", "velocity"):
        assert f"first/bias:{slot}" in found
    assert {"step_counter", "dynamic_scale", "iteration", "learning_rate"} <= set(found)


@pytest.mark.parametrize("make", [AdamW, SGD, MomentumSGD, Lamb, Muon])
def test_steps_add_no_variables_so_files_and_further_fits_continue_the_run(make, tmp_path):
    images = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype("float32")
    labels = np.array([0, 1, 2, 0])
    with pool("vit_debug", num_classes=3, num_layers=1) as model:
        model.compile(make(0.01))
        model.optimizer.build(model.trainable_variables)
        count = len(model.optimizer.variables)
        model.fit(images, labels, batch_size=2, verbose=0)
        assert len(model.optimizer.variables) == count
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert_equal(loaded.optimizer.variables, model.optimizer.variables)
        model.fit(images, labels, batch_size=2, shuffle=False, verbose=0)
        loaded.fit(images, labels, batch_size=2, shuffle=False, verbose=0)
        assert_equal(loaded.weights, model.weights)
