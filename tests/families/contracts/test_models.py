"""Keras' conventions, held by every backbone and task of kmodels."""

import copy
import importlib
import inspect
import json
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import models, transforms
from kmodels.core.errors import InputError
from kmodels.core.keras_internals import registration
from kmodels.task import Backbone, Task
from public_models import CASES, IMAGES, case, cases, random


def assert_equal(again, model, x, wanted):
    """The same model in weights of its own, which gives what the other gave for x."""
    assert type(again) is type(model)
    assert [w.path for w in again.weights] == [w.path for w in model.weights]
    assert not {id(w) for w in again.weights} & {id(w) for w in model.weights}
    np.testing.assert_allclose(to_numpy(again(x)), wanted, atol=1e-6)


def test_every_backbone_and_task_has_a_case():
    found = {
        value
        for value in vars(models).values()
        if inspect.isclass(value) and issubclass(value, Backbone | Task)
    }
    lacking = {cls.__name__ for cls in found - set(CASES)}
    assert not lacking, f"add a case for {sorted(lacking)}"


@pytest.mark.parametrize(
    ("make", "x", "policy"),
    [
        *(case(cls, "float32") for cls in CASES),
        *(case(cls, "mixed_bfloat16") for cls in CASES),
    ],
)
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
    wanted = to_numpy(model(x))
    assert_equal(keras.saving.load_model(tmp_path / "model.keras"), model, x, wanted)
    assert_equal(copy.deepcopy(model), model, x, wanted)
    assert_equal(pickle.loads(pickle.dumps(model)), model, x, wanted)
    model.save_weights(tmp_path / "model.weights.h5")
    other = random(make(dtype=policy), seed=2)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(other, model, x, wanted)
    np.testing.assert_array_equal(to_numpy(model(x)), wanted)


def first(shape):
    return first(next(iter(shape.values()))) if isinstance(shape, dict) else shape[0]


@cases
def test_a_batch_of_any_size(make, x):
    model = make()
    # Called as it is, it is on JAX a program for each op and size of a batch.
    jit = keras.backend.backend() == "jax"
    call = transforms.jit(lambda given: model(given)) if jit else model
    for rows in (0, 1):
        part = keras.tree.map_structure(lambda v, rows=rows: v[:rows], x)
        shape = model.compute_output_shape(keras.tree.map_structure(np.shape, part))
        given = keras.tree.map_structure(keras.ops.convert_to_tensor, part)
        found = keras.tree.map_structure(lambda v: tuple(v.shape), call(given))
        assert found == shape and (first(shape) == rows)


@pytest.mark.parametrize("cls", [models.ViTBackbone, models.ViTImageClassifier])
def test_of_no_samples_come_no_predictions(cls):
    model = CASES[cls][0]()
    assert model.predict(IMAGES[:0], verbose=0).shape == model(IMAGES[:0]).shape
    if cls is models.ViTImageClassifier:
        model.preprocessor = cls.preprocessor_class(image_size=(8, 8))
        assert model.predict(IMAGES[:0], verbose=0).shape == (0, 3)
        model.preprocessor = None
        for method in (model.fit, model.evaluate):
            with pytest.raises(InputError, match="the data is empty; give at least one sample"):
                method(IMAGES[:0], np.zeros(0), verbose=0)


def test_feature_models_are_saved(tmp_path):
    task = random(CASES[models.ViTImageClassifier][0](dtype="mixed_bfloat16"))
    for model in (
        task.backbone.feature_model(["tokens", "block_0"]),
        task.feature_model("pooled_output"),
    ):
        model.save(tmp_path / "features.keras")
        again = keras.saving.load_model(tmp_path / "features.keras")
        wanted, found = (keras.tree.flatten(m(IMAGES)) for m in (model, again))
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_allclose(to_numpy(other), to_numpy(one), atol=1e-6)


@pytest.mark.each_backend
def test_a_step_that_fails_leaves_the_model_as_it_was():
    """On JAX Keras' own models have no values from then on, where the first step fails."""
    backbone = models.ViTBackbone.from_preset("vit_debug")
    task = models.ViTImageClassifier(backbone, num_classes=3)
    images, large = np.zeros((2, 16, 16, 3), "float32"), np.zeros((2, 24, 24, 3), "float32")
    expected = [model.predict(images, verbose=0) for model in (backbone, task)]
    for method in (
        lambda: backbone.predict(large, verbose=0),
        lambda: task.predict(large, verbose=0),
        lambda: task.evaluate(large, np.zeros(2), verbose=0),
        lambda: task.fit(large, np.zeros(2), verbose=0),
    ):
        with pytest.raises((ValueError, TypeError), match=r"shape|PatchEmbedding"):
            method()
    for model, outputs in zip((backbone, task), expected, strict=True):
        np.testing.assert_array_equal(model.predict(images, verbose=0), outputs)
    task.fit(images, np.zeros(2), verbose=0)


# A process that loads a file before the import and after it.
ELSEWHERE = """
import sys, traceback
import keras
try:
    print("loaded", keras.saving.load_model(sys.argv[1]))
except Exception:
    traceback.print_exc()
import kmodels
print(type(keras.saving.load_model(sys.argv[1])))
"""


def test_a_new_process_reads_a_file_after_the_import(tmp_path):
    model = CASES[models.ViTImageClassifier][0]()
    model.save(tmp_path / "model.keras")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model.keras")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ViTImageClassifier" in done.stdout, done.stderr
    # Keras imports no package by itself, and says which one it lacks.
    assert "loaded" not in done.stdout and "kmodels.models.vit.classifier" in done.stderr
    assert "register_keras_serializable" in done.stderr


def test_every_registered_class_is_found_by_its_name():
    modules = [importlib.import_module(name) for name in registration.MODULES]
    assert modules
    known = keras.saving.get_custom_objects()
    ours = {name for name in known if name.startswith("kmodels>")}
    listed = {f"kmodels>{name}" for names in registration.MODULES.values() for name in names}
    assert ours == listed, f"mend kmodels/core/registered.py: {sorted(ours ^ listed)}"
    assert not [name for name in ours if not inspect.isclass(known[name])]
