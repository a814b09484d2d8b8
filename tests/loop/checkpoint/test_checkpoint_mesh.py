"""A run whose weights are spread over devices is saved whole, and goes on over others."""

import keras
import numpy as np
import pytest

from arrays import assert_equal
from kmodels.callbacks import Checkpoint
from kmodels.checkpoint.state import host_values, named, slots
from kmodels.distribution import distribute, layout
from kmodels.layers import Dense
from kmodels.layers.quantized import Quantization
from kmodels.training import AdamW
from refusals import refused
from tolerances import tolerance

LAYOUT = {
    **{r".*(?:up|down)/kernel": (None, "heads"), r".*(?:up|down)/bias": ("heads",)},
    r"base/kernel_nf4": (None, "heads"),
}
MESHES = ("data=2,model=2", "data=1,model=4", "data=4", None)
rng = np.random.default_rng(0)
X = rng.normal(size=(32, 8)).astype("float32")
Y = rng.normal(size=(32, 4)).astype("float32")


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    monkeypatch.setattr(layout, "_RULES", LAYOUT)
    yield
    distribute(None)


def make(mesh):
    distribute(mesh)
    keras.utils.set_random_seed(5)
    base, inputs = Dense(8, name="base"), keras.Input((8,))
    x = keras.layers.Dense(16, activation="gelu", name="up")(base(inputs))
    x = keras.layers.Dropout(0.1, name="dropout")(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="down")(x))
    base.quantize_kernel(Quantization("nf4"))
    base.enable_lora(2)
    model.compile(AdamW(0.01, ema=0.9, accumulate=2), "mse")
    return model


def fit(model, folder, epochs):
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, epochs=epochs, callbacks=[Checkpoint(folder, keep=9)], **settings)
    return history.history["loss"]


def values(model):
    held = named(model.variables) | {f"slot {k}": v for k, v in slots(model.optimizer).items()}
    return {name: np.array(host_values(variable)) for name, variable in held.items()}


def shard(model):
    """Shape of a device's part of the first float kernel and of its slots."""
    held = slots(model.optimizer)
    wanted = [model.get_layer("up").kernel, held["up/kernel:momentum"], held["up/kernel:average"]]
    return {variable.value.addressable_shards[0].data.shape for variable in wanted}


def test_it_goes_on_over_another_mesh_and_on_one_device(backend, tmp_path):
    if backend != "jax":
        refused("needs 4 devices and there are", make, MESHES[0])
        return
    saved = make(MESHES[0])
    fit(saved, tmp_path / "run", 2)
    assert shard(saved) == {(8, 8)}
    expected = values(saved)
    assert np.abs(expected["slot up/kernel:average"] - expected["up/kernel"]).max() > 0
    alone = make(None)
    whole = fit(alone, tmp_path / "whole", 3)
    parts = {"data=2,model=2": (8, 8), "data=1,model=4": (8, 4)}
    for mesh in MESHES:
        model = make(mesh)
        Checkpoint(tmp_path / "run").prepare(model)
        assert_equal(values(model), expected)
        (part,) = shard(model)
        assert part == parts.get(mesh, (8, 16))
        packed = model.get_layer("base").quantized.variables[0]
        assert packed.value.addressable_shards[0].data.shape == (4, part[1] // 2)
        # Dropout draws the same numbers however many devices there are.
        assert abs(fit(model, tmp_path / "run", 3)[-1] - whole[-1]) < tolerance("losses")
        last = tmp_path / "run" / "step_00000012"
        last.rename(tmp_path / f"gone {mesh}")
    # One that was saved on one device goes on over a mesh.
    model = make("data=2,model=2")
    Checkpoint(tmp_path / "whole").prepare(model)
    assert shard(model) == {(8, 8)}
    assert_equal(values(model), values(alone))
