"""Missing, extra, misshapen and transposed weights are all named, whatever the format, and swapped
ones are found wherever the format has a hash; the model keeps every bit.

Files of other packages (safetensors, GGUF, `.keras`) carry no hash: two tensors of one shape under
each other's name cannot be told from the right ones there. Safetensors and GGUF are read by rules:
tests/families/weights/test_engine.py.
"""

import json
import shutil
import zipfile
from functools import partial

import h5py
import keras
import numpy as np
import pytest

from kmodels.checkpoint import manager
from kmodels.checkpoint import state as states
from kmodels.checkpoint.state import RunState, digest, named, slots, weights_digest
from kmodels.core.errors import InputError
from kmodels.interop import keras_hub
from kmodels.layers.changes import adapters
from kmodels.models import ViTBackbone, ViTImageClassifier
from kmodels.training import load_keras_file
from kmodels.weights import engine, native, read_safetensors, write_safetensors
from kmodels.weights.files import read_metadata
from kmodels.weights.native import write_manifest
from kmodels.weights.tensors import LazyArray


def backbone():
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
    return ViTBackbone(image_shape=(8, 8, 3), patch_size=4, **sizes)


@pytest.fixture(scope="module")
def model():
    made = ViTImageClassifier(backbone(), 5)
    made.compile("adam", "mse")
    made.optimizer.build(made.trainable_variables)
    return made


def everything(model):
    """A hash of weights, slots and adapters."""
    return weights_digest(model), digest(slots(model.optimizer)), sorted(adapters(model))


def spoil(arrays, missing, misshapen, transposed):
    found = {name: array for name, array in arrays.items() if name != missing}
    found["stray"] = np.zeros(3, "float32")
    found[misshapen] = np.concatenate([found[misshapen], found[misshapen][:1]])
    found[transposed] = np.ascontiguousarray(found[transposed].T)
    return found


def swap(arrays, one, other):
    """Two of one shape under each other's name."""
    assert arrays[one].shape == arrays[other].shape
    assert arrays[one].tobytes() != arrays[other].tobytes()
    return {**arrays, one: arrays[other], other: arrays[one]}


def read(file):
    return {name: tensor.read() for name, tensor in read_safetensors(file).items()}


def write(file, arrays, metadata=None):
    lazy = {k: LazyArray(x.shape, x.dtype, lambda x=x: x) for k, x in arrays.items()}
    write_safetensors(file, lazy, metadata)


def refused(load, model, *names):
    """The line that says why, after a look at the model."""
    before = everything(model)
    with pytest.raises(InputError) as caught:
        load()
    assert everything(model) == before
    text = str(caught.value)
    assert "\n" not in text
    assert [name for name in names if name not in text] == []
    return text


def test_a_saved_model(model, tmp_path):
    folder = model.save_to_preset(tmp_path / "saved")
    file = folder / "model.safetensors"
    description = json.loads((folder / "config.json").read_text())
    arrays = read(file)

    def load():
        found = native.open_checkpoint(folder, description, True)
        engine.load(model, found.tensors, found.rules, origin=folder)

    names = ("logits/bias", "block_0/mlp/up/bias", "logits/kernel")
    write(file, spoil(arrays, *names))
    refused(load, model, "is damaged: model.safetensors has")
    write_manifest(folder)
    refused(load, model, "stray", *names)
    with pytest.raises(InputError, match=r"does not fit the model: 1 tensors without .* stray"):
        ViTImageClassifier.from_preset(folder)
    parts = [f"block_0/attention/{name}/kernel" for name in ("query", "key")]
    folder = model.save_to_preset(folder)
    in_order = {name: arrays[name] for name in engine.variables(model)}
    write(file, swap(in_order, *parts), {"format": "kmodels"})
    refused(load, model, "the content of model.safetensors was changed")


def test_a_checkpoint_of_a_run(model, tmp_path):
    arrays = {part: states.copied(held) for part, held in states.parts(model, False).items()}

    def saved(changed):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return manager.save(tmp_path / "run", RunState(1), {**arrays, "model": changed})

    def load():
        found = manager.newest(tmp_path / "run")
        manager.restore(*found[:2], model)

    names = ("logits/bias", "block_0/mlp/up/bias", "logits/kernel")
    saved(spoil(arrays["model"], *names))
    refused(load, model, "stray", *names)
    path = saved(arrays["model"])
    parts = [f"block_0/attention/{name}/kernel" for name in ("query", "key")]
    write(path / "model.safetensors", swap(arrays["model"], *parts), {"format": "kmodels"})
    refused(load, model, "model.safetensors is not what was written")


def test_a_keras_file(tmp_path):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(6, name="first")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="second")(x))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    file = tmp_path / "model.keras"
    model.save(file)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "inside")
    names = ("layers/dense/vars/1", "layers/dense_1/vars/1", "layers/dense_1/vars/0")
    with h5py.File(tmp_path / "inside" / "model.weights.h5", "r+") as held:
        kept = {name: held[name][()] for name in names}
        changed = {**spoil(kept, *names), "layers/stray/vars/0": np.zeros(3, "float32")}
        for name in names:
            del held[name]
        for name, array in changed.items():
            if name != "stray":
                held[name] = array
    with zipfile.ZipFile(file, "w") as archive:
        for entry in (tmp_path / "inside").iterdir():
            archive.write(entry, entry.name)
    for optimizer in (True, False):
        text = refused(partial(load_keras_file, file, model, optimizer), model, *names)
        assert "layers/stray/vars/0 is not in the model" in text
        assert "layers/dense_1/vars/0 is (3, 6), the model needs (6, 3)" in text


def elsewhere(file, name, link):
    del file[name]
    file[name] = link


def first_array(file):
    names = []
    file.visititems(lambda name, x: names.append(name) if isinstance(x, h5py.Dataset) else None)
    return names[0]


def replaced(file, name, shape, **stored):
    del file[name]
    file.create_dataset(name, shape=shape, dtype="float32", **stored)


# What may stand in place of an array, and the message.
PLACES = {
    "a file": (
        lambda file, name, path: elsewhere(file, name, h5py.ExternalLink(str(path), name)),
        "points to another place",
    ),
    "itself": (
        lambda file, name, path: elsewhere(file, name, h5py.SoftLink(f"/{name}")),
        "points to another place",
    ),
    "bytes of a file": (
        lambda file, name, path: replaced(
            file, name, file[name].shape, external=[(str(path), 0, file[name].nbytes)]
        ),
        "are not in the file",
    ),
    "nothing": (
        lambda file, name, path: replaced(file, name, (2**20, 2**20), chunks=(2**10, 2**10)),
        "is not stored as a whole",
    ),
}


@pytest.mark.parametrize(("change", "message"), PLACES.values(), ids=PLACES)
def test_arrays_that_are_not_in_an_adapter_file(tmp_path, change, message):
    model, hub = backbone(), tmp_path / "hub.lora.h5"
    model.enable_lora(2)
    model.save_lora_weights(own := tmp_path / "own.lora.h5")
    with h5py.File(hub, "w") as file:
        file["lora/vars/rank"] = 2
        for part in "ab":
            file[f"lora/3/vars/lora_kernel_{part}"] = np.zeros((2, 2), "float32")
    for file, read in ((own, backbone().load_lora_weights), (hub, keras_hub._stored)):
        shutil.copy(file, tmp_path / "whole")
        with h5py.File(file, "r+") as opened:
            change(opened, first_array(opened), tmp_path / "whole")
        with pytest.raises(InputError, match=message):
            read(file)


def test_an_adapter(tmp_path):
    model = backbone()
    model.enable_lora(2)
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    for variable in named(model.trainable_weights).values():
        variable.assign(rng.normal(size=variable.shape))
    folder = model.save_adapter(tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    arrays = read(file)
    stems = [f"base_model.model.layers.0.attention.{name}_proj.lora_" for name in "qv"]
    parts, others = ([f"{stem}{part}.weight" for stem in stems] for part in "AB")
    sealed = read_metadata(file)
    write(file, swap(arrays, *parts), sealed)
    refused(lambda: model.load_adapter(folder), model, "settings or weights are not those")
    # Another package's file has no hash, and still everything that does not fit is named.
    write(file, spoil(arrays, parts[0], others[1], parts[1]), {"format": "pt"})
    wanted = ("stray", "query has no lora_A", "value's lora_A", "value's lora_B")
    refused(lambda: model.load_adapter(folder), model, *wanted)
