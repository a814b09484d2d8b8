"""Keras' conventions, held by every backbone and task of kmodels."""

import copy
import importlib
import inspect
import json
import pickle

import keras
import numpy as np
import pytest

from arrays import to_numpy
from forked_python import quick_python
from kmodels import models, presets, registration, transforms
from kmodels.core.errors import InputError
from kmodels.task import Backbone, Task
from kmodels.text.training import train_tokenizer
from public_models import CASES, EACH_BACKEND, HELD, IMAGES, cases, outermost, random
from python_process import run_python
from refusals import refused
from tolerances import tolerance


def test_every_backbone_and_task_has_a_case():
    found = {
        value
        for value in vars(models).values()
        if inspect.isclass(value) and issubclass(value, Backbone | Task)
    }
    lacking = {cls.__name__ for cls in found - set(CASES)}
    assert not lacking, f"add a case for {sorted(lacking)}"


def changed(model):
    """A model with kernels in few bits, adapters, rows, and parts that are frozen or not, drawn."""
    model.quantize("int8")
    backbone = getattr(model, "backbone", model)
    text = getattr(backbone, "text_encoder", backbone)
    rows = {} if text.token_embedding is None else {"trainable_token_indices": [5, 2]}
    model.enable_lora(2, alpha=3.0, targets=("query", "down"), dora=True, **rows)
    block = backbone.blocks[0]
    block.attention.query_dense.trainable = False
    block.mlp_norm.trainable = True
    block.mlp_norm.scale.trainable = True
    model.layers[-1].trainable = False
    rng = np.random.default_rng(1)
    held = model.get_weights()
    drawn = [w if w.dtype == "int8" else rng.normal(0.2, 0.3, w.shape) for w in held]
    model.set_weights(drawn)
    return model


def named(model, x):
    """What a plain functional model takes without a warning."""
    given = getattr(model, "input", None)
    return {next(iter(given)): x} if isinstance(given, dict) and not isinstance(x, dict) else x


def check(others, model, x):
    """The same weights, as trainable, and the same numbers once they are set."""
    wanted = to_numpy(model(named(model, x)))
    for other in others:
        kinds = [[(w.name, tuple(w.shape), w.trainable) for w in m.weights] for m in (other, model)]
        assert kinds[0] == kinds[1]
        assert not {id(w) for w in other.weights} & {id(w) for w in model.weights}
        places = [[id(w) for w in m.weights] for m in (other, model)]
        trained = [
            [found.index(id(v)) for v in m.trainable_variables]
            for m, found in zip((other, model), places, strict=True)
        ]
        assert trained[0] == trained[1]
        found = to_numpy(other(named(other, x)))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("logits_across"))


def assert_same_model(again, model, x, wanted):
    """The same model in weights of its own, which gives what the other gave for x."""
    assert type(again) is type(model)
    assert [w.path for w in again.weights] == [w.path for w in model.weights]
    assert not {id(w) for w in again.weights} & {id(w) for w in model.weights}
    np.testing.assert_allclose(to_numpy(again(x)), wanted, atol=1e-6)


@pytest.mark.each_time(*(cls.__name__ for cls in CASES if cls not in HELD))
@cases
def test_config_file_and_copies(make, x, tmp_path):
    """Under a policy; `test_clones` has float32, and copies, which Keras makes by such files."""
    model = random(make(dtype="mixed_bfloat16", name="mine"))
    described = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    assert described["registered_name"] == f"kmodels>{type(model).__name__}"
    again = keras.saving.deserialize_keras_object(described)
    assert again.get_config() == model.get_config() and again.name == "mine"
    assert again.dtype_policy == model.dtype_policy
    model.save(tmp_path / "model.keras")
    wanted = to_numpy(model(x))
    assert_same_model(keras.saving.load_model(tmp_path / "model.keras"), model, x, wanted)
    model.save_weights(tmp_path / "model.weights.h5")
    again.load_weights(tmp_path / "model.weights.h5")
    assert_same_model(again, model, x, wanted)
    np.testing.assert_array_equal(to_numpy(model(x)), wanted)


def another(value):
    kinds = {bool: lambda: not value, int: lambda: value + 1, dict: lambda: {"query": "to find"}}
    return kinds.get(type(value), lambda: "another")()


@pytest.mark.once
@cases
def test_a_setting_is_changed_in_files_too_or_refused(make, x):
    model = make()
    for part in {id(one): one for one in (model, getattr(model, "backbone", model))}.values():
        settings = part.settings if isinstance(part, Task) else part.config.to_dict()
        for name, value in dict(settings).items():
            try:
                setattr(part, name, another(value))
            except InputError as error:
                assert "\n" not in str(error)
                assert part.get_config()[name] == value
            else:
                assert part.get_config()[name] == another(value), name


@pytest.mark.once
def test_settings_that_may_change_travel(tmp_path):
    lm = models.GemmaCausalLM.from_preset("gemma3_debug", num_layers=1)
    lm.generation_config = {"top_k": 3}
    lm.generation_config["top_p"] = 0.5
    lm.sampler = "top_p"
    embedder = models.GemmaTextEmbedder.from_preset("embedding_gemma_debug", num_layers=1)
    embedder.prompts = {"query": "to find: "}
    embedder.prompts["document"] = "found: "
    embedder.default_prompt_name, embedder.truncate_dim = "query", 8
    embedder.similarity_fn_name = "dot"
    for model in (lm, embedder):
        model.save(tmp_path / "model.keras")
        model.save_to_preset(tmp_path / type(model).__name__)
        copies = [
            keras.saving.load_model(tmp_path / "model.keras"),
            type(model).from_preset(tmp_path / type(model).__name__),
            copy.deepcopy(model),
        ]
        assert [again.settings for again in copies] == [model.settings] * 3
    assert lm.settings["generation_config"] == {"top_k": 3, "top_p": 0.5}
    assert len(embedder.settings["prompts"]) == 2
    assert type(copy.deepcopy(lm).sampler) is type(lm.sampler)
    for name, value, message in (
        ("prompts", None, "prompts is None; give a dictionary"),
        ("default_prompt_name", "x", "there is no prompt 'x'"),
        ("similarity_fn_name", "x", "similarity_fn_name is 'x'"),
        ("truncate_dim", 999, "truncate_dim is 999"),
        ("pooling", "cls", "pooling of a GemmaTextEmbedder is fixed when the model is made"),
    ):
        refused(message, setattr, embedder, name, value)
    refused("generation_config is 3; give", setattr, lm, "generation_config", 3)
    refused("num_layers of a GemmaBackbone is fixed", setattr, lm.backbone, "num_layers", 2)
    other = models.GemmaBackbone.from_preset("gemma_debug")
    refused("backbone of a GemmaCausalLM is fixed", setattr, lm, "backbone", other)
    refused("head_dtype of a GemmaTextEmbedder", setattr, embedder, "head_dtype", "bfloat16")
    lm.backbone, embedder.head_dtype = lm.backbone, embedder.head_dtype
    for config, message in (({}, "got nothing and no backbone"), ({"x": 1}, "got x and no")):
        refused(message, type(lm).from_config, config)
    refused("config is None; give a dictionary", type(lm).from_config, None)


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


@cases
def test_outputs_are_known_without_masks(make, x):
    model = make()
    if isinstance(x, dict):
        masks = [name for name in getattr(model, "absent", ()) if name.endswith("mask")]
        x = {name: value for name, value in x.items() if name not in masks}
    x = keras.tree.map_structure(keras.ops.convert_to_tensor, x)
    specs, found = model.compute_output_spec(x), model(x)
    keras.tree.assert_same_structure(specs, found)
    for spec, value in zip(keras.tree.flatten(specs), keras.tree.flatten(found), strict=True):
        assert spec.shape == tuple(value.shape)
        assert spec.dtype == keras.backend.standardize_dtype(value.dtype)


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
    done = run_python("-c", ELSEWHERE, tmp_path / "model.keras", python=quick_python())
    assert "ViTImageClassifier" in done.stdout, done.stderr
    # Keras imports no package by itself, and says which one it lacks.
    assert "loaded" not in done.stdout and "kmodels.models.vit.classifier" in done.stderr
    assert "register_keras_serializable" in done.stderr


def test_every_registered_class_is_found_by_its_name():
    modules = [importlib.import_module(name) for name in set(registration.modules().values())]
    assert modules
    known = keras.saving.get_custom_objects()
    ours = {name for name in known if name.startswith("kmodels>")}
    listed = {f"kmodels>{name}" for name in registration.modules()}
    assert ours == listed, f"mend kmodels/registration.py: {sorted(ours ^ listed)}"
    assert not [name for name in ours if not inspect.isclass(known[name])]


# === Clones, and models around ours ===


@pytest.mark.each_time(
    *("ViTImageClassifier", "EoMTImageSegmenter", "ViTMAEForPreTraining", "ImageTextSimilarity"),
    *("GemmaCausalLM", "Gemma4ImageTextLM", "Gemma3TextEmbedder"),
)
@outermost
def test_clones(make, x, tmp_path):
    model = changed(make())
    clone = keras.models.clone_model(model)
    drawn = {w.path: to_numpy(w) for w in clone.weights}
    differ = [w for w in model.weights if not np.array_equal(to_numpy(w), drawn[w.path])]
    assert len(differ) > len(model.weights) / 2
    values = model.get_weights()
    again = [clone, keras.models.clone_model(clone)]
    again.append(keras.models.clone_model(clone, recursive=True))
    for one in again:
        one.set_weights(values)
    one.save(tmp_path / "clone.keras")
    again[1:] = [copy.deepcopy(again[1]), pickle.loads(pickle.dumps(again[2]))]
    check([*again, keras.saving.load_model(tmp_path / "clone.keras")], model, x)


def test_functions_of_the_user():
    """Each layer is asked for once, also where it is called twice; what is shared stays shared."""
    for cls in (models.ViTImageClassifier, models.GemmaCausalLM):
        make, x = CASES[cls]
        model, asked, called = random(make()), [], []

        def clone(layer, asked=asked):
            asked.append(layer.name)
            return layer.__class__.from_config(layer.get_config())

        def call(layer, *args, called=called, **kwargs):
            called.append(layer.name)
            return layer(*args, **kwargs)

        given = keras.tree.map_structure(
            lambda t: keras.Input(t.shape[1:], dtype=t.dtype, name=t.name), model.input
        )
        settings = {"clone_function": clone, "call_function": call, "input_tensors": given}
        again = keras.models.clone_model(model, **settings)
        again.set_weights(model.get_weights())
        check([again], model, x)
        assert len(asked) == len(set(asked)) and set(asked) == set(called)
        shared = keras.models.clone_model(model, clone_function=lambda layer: layer)
        assert {id(w) for w in shared.weights} == {id(w) for w in model.weights}
        assert len(shared.weights) == len(model.weights)


TASKS = [cls for cls in CASES if issubclass(cls, Task)]
MORE = {
    models.GemmaCausalLM: {"sampler": "top_p"},
    # They have no loss of labels; of their vectors this one is as good as another.
    **{
        cls: {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        for cls in (
            models.CLIPTextModelWithProjection,
            models.EoMTImageSegmenter,
            models.GemmaTextEmbedder,
            models.Gemma3TextEmbedder,
            models.Qwen3TextEmbedder,
            models.ImageTextSimilarity,
            models.ViTMAEForPreTraining,
        )
    },
}


@pytest.mark.parametrize(
    "cls",
    [pytest.param(cls, marks=[pytest.mark.each_backend] * (cls in EACH_BACKEND)) for cls in TASKS],
)
def test_a_step_of_fit(cls):
    """The loss is that of a clone's outputs, and all that is trained moves, and nothing else."""
    make, x = CASES[cls]
    model = random(make())
    model.backbone.blocks[0].mlp.trainable = False
    if cls is models.EoMTImageSegmenter:
        model.attn_mask_probs = 1.0  # between 0 and 1, what queries see is drawn
    # The two Gemmas are one except for their names.
    eager = cls is models.Gemma3CausalLM
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager, **MORE.get(cls, {}))
    clone = keras.models.clone_model(model)
    assert clone.compiled and clone.optimizer.get_config() == model.optimizer.get_config()
    before = model.get_weights()
    clone.set_weights(before)
    found = to_numpy(clone(x))
    if model.gives_logits or "loss" in MORE.get(cls, {}):
        found = np.exp(found - found.max(-1, keepdims=True))
        found /= found.sum(-1, keepdims=True)
    y = np.ones(found.shape[:-1], "int32")
    loss = model.fit(x, y, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, -np.log(found[..., 1]).mean(), atol=tolerance("losses"))
    trained = {id(w) for w in model.trainable_variables}
    assert 0 < len(trained) < len(before)
    for weight, old in zip(model.weights, before, strict=True):
        # Softmax does not see the bias of the keys.
        if not weight.path.endswith("key/bias"):
            assert (id(weight) in trained) == (to_numpy(weight) != old).any(), weight.path


def inner(backbone):
    """The layers of a backbone in a graph of the user's."""
    y = keras.ops.mean(keras.layers.Dense(3)(backbone.output), axis=1)
    return keras.Model(backbone.input, y)


def functional(backbone):
    inputs = backbone.input
    y = keras.layers.Dense(3)(keras.ops.mean(backbone(inputs), axis=1))
    return keras.Model(inputs, y)


def sequential(backbone):
    pool = keras.layers.GlobalAveragePooling1D()
    first = [keras.Input((None,), dtype="int32")] if isinstance(backbone.input, dict) else []
    return keras.Sequential([*first, backbone, pool, keras.layers.Dense(3)])


@keras.saving.register_keras_serializable(package="contracts")
class Own(keras.Model):
    def __init__(self, backbone, block, **kwargs):
        super().__init__(**kwargs)
        self.backbone, self.block = backbone, block

    def call(self, x):
        return self.block(self.backbone(x))

    def get_config(self):
        held = {name: getattr(self, name) for name in ("backbone", "block")}
        held = {name: keras.saving.serialize_keras_object(part) for name, part in held.items()}
        return {**held, "name": self.name}

    @classmethod
    def from_config(cls, config):
        for name in ("backbone", "block"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)


def test_changes_that_wait_for_a_layer_to_be_built_are_not_lost():
    block = changed(CASES[models.ViTBackbone][0]()).blocks[0]
    again = type(block).from_config(block.get_config())
    assert not again.built and again.get_config() == block.get_config()


@pytest.mark.parametrize(
    ("around", "cls"),
    [
        (inner, models.ViTBackbone),
        (functional, models.GemmaBackbone),
        (sequential, models.GemmaBackbone),
        (Own, models.ViTBackbone),
    ],
)
def test_models_of_the_user(around, cls, tmp_path):
    make, x = CASES[cls]
    policy = "mixed_bfloat16" if cls is models.GemmaBackbone else "float32"
    more = [changed(make(dtype=policy)).blocks[0]] if around is Own else []
    model = around(changed(make(dtype=policy)), *more)
    x = x["token_ids"] if around is sequential and isinstance(x, dict) else x
    model(x)
    model.save(tmp_path / "model.keras")
    again = [keras.models.clone_model(model), copy.deepcopy(model)]
    again.append(keras.saving.load_model(tmp_path / "model.keras"))
    for one in again:
        one(x)
        one.set_weights(model.get_weights())
    check(again, model, x)


OF_TEXTS = [
    models.GemmaCausalLM,
    models.Gemma3CausalLM,
    models.Gemma4CausalLM,
    models.GemmaTextEmbedder,
    models.Gemma3TextEmbedder,
    models.Llama3CausalLM,
    models.Qwen3CausalLM,
    models.Qwen3TextEmbedder,
    models.CLIPTextModelWithProjection,
]


@pytest.mark.parametrize("cls", OF_TEXTS)
def test_a_saved_directory_names_a_class_that_reads_it(cls, tmp_path):
    """Also one that a class of keras-hub's name saved, whose preprocessor has more arguments."""
    tokenizer = train_tokenizer(["<start_of_turn> a b c", "hello"], 280)
    name = next(name for name in cls.presets if "debug" in name)
    model = random(cls.from_preset(name, vocabulary_size=tokenizer.vocabulary_size()))
    model.preprocessor = cls.preprocessor_class(tokenizer, sequence_length=8)
    model.save_to_preset(tmp_path / "model")
    again = presets.class_of(tmp_path / "model", whole=True).from_preset(tmp_path / "model")
    rows = [one.preprocessor(["hello", "a b c"]) for one in (again, model)]
    keras.tree.map_structure(lambda *pair: np.testing.assert_array_equal(*pair), *rows)
    for one, two in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
