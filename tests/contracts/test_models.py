"""Keras' conventions, held by every backbone and task of kmodels."""

import copy
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import models, registered
from kmodels.task import Backbone, Task

GEMMA = {
    "vocabulary_size": 31, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1,
    "hidden_dim": 8, "intermediate_dim": 24, "head_dim": 4,
}  # fmt: skip
VIT = {
    "image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 8,
    "mlp_dim": 12,
}  # fmt: skip
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
IDS = {
    "token_ids": np.arange(10).reshape(2, 5) % 31,
    "padding_mask": np.ones((2, 5), "int32"),
}
CASES = {
    models.ViTBackbone: (lambda **more: models.ViTBackbone(**VIT, **more), IMAGES),
    models.DeiTBackbone: (lambda **more: models.DeiTBackbone(**VIT, **more), IMAGES),
    models.DINOV2Backbone: (lambda **more: models.DINOV2Backbone(**VIT, **more), IMAGES),
    models.SigLIPVisionEncoder: (lambda **more: models.SigLIPVisionEncoder(**VIT, **more), IMAGES),
    models.DeiTImageClassifier: (
        lambda dtype=None, **more: models.DeiTImageClassifier(
            models.DeiTBackbone(**VIT, dtype=dtype), num_classes=3, **more
        ),
        IMAGES,
    ),
    models.GemmaBackbone: (lambda **more: models.GemmaBackbone(**GEMMA, **more), IDS),
    models.Gemma3Backbone: (
        lambda **more: models.Gemma3Backbone(**GEMMA, sliding_window_size=3, **more),
        IDS,
    ),
    models.ViTImageClassifier: (
        lambda dtype=None, **more: models.ViTImageClassifier(
            models.ViTBackbone(**VIT, dtype=dtype), num_classes=3, activation="softmax", **more
        ),
        IMAGES,
    ),
    models.GemmaCausalLM: (
        lambda dtype=None, **more: models.GemmaCausalLM(
            models.GemmaBackbone(**GEMMA, dtype=dtype), **more
        ),
        IDS,
    ),
    models.Gemma3CausalLM: (
        lambda dtype=None, **more: models.Gemma3CausalLM(
            models.Gemma3Backbone(**GEMMA, dtype=dtype), **more
        ),
        IDS,
    ),
}
cases = pytest.mark.parametrize(
    ("make", "x"), list(CASES.values()), ids=[cls.__name__ for cls in CASES]
)


def random(model, seed=1):
    """The model with every weight drawn, so that none hides behind zeros."""
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(0.2, 0.3, w.shape) for w in model.weights])
    return model


def assert_equal(again, model, x):
    assert type(again) is type(model)
    assert [w.path for w in again.weights] == [w.path for w in model.weights]
    assert not {id(w) for w in again.weights} & {id(w) for w in model.weights}
    np.testing.assert_allclose(to_numpy(again(x)), to_numpy(model(x)), atol=1e-6)


def test_every_backbone_and_task_has_a_case():
    found = {
        value
        for value in vars(models).values()
        if inspect.isclass(value) and issubclass(value, Backbone | Task)
    }
    lacking = {cls.__name__ for cls in found - set(CASES)}
    assert not lacking, f"add a case for {sorted(lacking)}"


@cases
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_config_file_and_copies(make, x, policy, tmp_path):
    model = random(make(dtype=policy, name="mine"))
    config = model.get_config()
    again = type(model).from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config and again.name == "mine"
    assert again.dtype_policy == model.dtype_policy
    described = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    assert described["registered_name"] == f"kmodels>{type(model).__name__}"
    assert keras.saving.deserialize_keras_object(described).get_config() == config
    model.save(tmp_path / "model.keras")
    assert_equal(keras.saving.load_model(tmp_path / "model.keras"), model, x)
    assert_equal(copy.deepcopy(model), model, x)
    assert_equal(pickle.loads(pickle.dumps(model)), model, x)
    model.save_weights(tmp_path / "model.weights.h5")
    other = random(make(dtype=policy), seed=2)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(other, model, x)


@pytest.mark.parametrize("cls", [models.ViTBackbone, models.ViTImageClassifier])
def test_clones(cls):
    """Keras makes a plain functional model of a clone, with new weights."""
    make, x = CASES[cls]
    model = make()
    clone = keras.models.clone_model(model)
    drawn = [w for w in model.weights if to_numpy(w).std() > 0]
    others = {w.path: to_numpy(w) for w in clone.weights}
    assert all((to_numpy(w) != others[w.path]).any() for w in drawn)
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(to_numpy(clone(x)), to_numpy(model(x)), atol=1e-6)


@cases
def test_a_batch_of_any_size(make, x):
    model = make()
    for rows in (1, 2):
        part = {k: v[:rows] for k, v in x.items()} if isinstance(x, dict) else x[:rows]
        assert model(part).shape[0] == rows


@keras.saving.register_keras_serializable(package="contracts")
class Own(keras.Model):
    """A user's model around a backbone and a block."""

    def __init__(self, backbone, **kwargs):
        super().__init__(**kwargs)
        self.backbone = backbone
        self.head = keras.layers.Dense(3)

    def call(self, x):
        return self.head(keras.ops.mean(self.backbone(x), axis=1))

    def get_config(self):
        return {"backbone": keras.saving.serialize_keras_object(self.backbone), "name": self.name}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("backbone")), **config)


def functional(backbone):
    inputs = backbone.input
    y = keras.layers.Dense(3)(keras.ops.mean(backbone(inputs), axis=1))
    return keras.Model(inputs, y)


def sequential(backbone):
    pool = keras.layers.GlobalAveragePooling1D()
    return keras.Sequential([backbone, pool, keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("cls", "around"),
    [
        (models.ViTBackbone, functional),
        (models.ViTBackbone, sequential),
        (models.ViTBackbone, Own),
        (models.GemmaBackbone, Own),
    ],
    ids=lambda value: value.__name__,
)
def test_models_of_the_user_around_a_backbone(cls, around, tmp_path):
    make, x = CASES[cls]
    model = around(make())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, np.ones((2, 3)), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(to_numpy(again(x)), to_numpy(model(x)), atol=1e-6)
    losses = [m.fit(x, np.ones((2, 3)), verbose=0).history["loss"] for m in (model, again)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_feature_models_are_saved(tmp_path):
    task = random(CASES[models.ViTImageClassifier][0]())
    for model in (
        task.backbone.feature_model(["tokens", "block_0"]),
        task.feature_model("pooled_output"),
    ):
        model.save(tmp_path / "features.keras")
        again = keras.saving.load_model(tmp_path / "features.keras")
        wanted, found = (keras.tree.flatten(m(IMAGES)) for m in (model, again))
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_allclose(to_numpy(other), to_numpy(one), atol=1e-6)


def load_elsewhere(path, statement):
    """What a new process says that loads a file after a statement."""
    program = f"import keras\n{statement}\nprint(type(keras.saving.load_model({str(path)!r})))"
    source = Path(models.__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_new_process_reads_a_file_after_the_import(tmp_path):
    model = CASES[models.ViTImageClassifier][0]()
    model.save(tmp_path / "model.keras")
    done = load_elsewhere(tmp_path / "model.keras", "import kmodels")
    assert "ViTImageClassifier" in done.stdout, done.stderr
    # Keras imports no package by itself, and says which one it lacks.
    done = load_elsewhere(tmp_path / "model.keras", "")
    assert done.returncode and "kmodels.models.vit.classifier" in done.stderr
    assert "register_keras_serializable" in done.stderr


def test_every_registered_class_is_found_by_its_name():
    modules = [importlib.import_module(name) for name in registered.MODULES]
    assert modules
    known = keras.saving.get_custom_objects()
    ours = {name for name in known if name.startswith("kmodels>")}
    listed = {f"kmodels>{name}" for names in registered.MODULES.values() for name in names}
    assert ours == listed, f"mend kmodels/registered.py: {sorted(ours ^ listed)}"
    assert not [name for name in ours if not inspect.isclass(known[name])]
