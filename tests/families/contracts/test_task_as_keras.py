"""A task's methods are Keras' own: parameters by place and by name, batches, scaling, settings."""

import inspect

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import models
from kmodels.generation import Sampler
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTImageClassifier
from kmodels.models.gemma.presets import PRESETS
from kmodels.task import Task
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from kmodels.training import AdamW, TrainStep
from tolerances import tolerance

GENERATOR = np.random.default_rng(0)
PICTURES = GENERATOR.integers(0, 256, (6, 20, 20, 3)).astype("uint8")
LABELS = np.arange(6) % 3
TEXTS = ["the cat sat", "a dog ran over the hill", "two birds", "one more"]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FIELDS = {**PRESETS["gemma_debug"], "vocabulary_size": 420}
METHODS = (
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    *("save", "save_weights", "load_weights"),
)
TASKS = [
    found
    for name in models.__all__
    if inspect.isclass(found := getattr(models, name)) and issubclass(found, Task)
]


def classifier(**settings):
    keras.utils.set_random_seed(4)
    model = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=3, num_layers=1, preprocessor=_preprocessor(), **settings
    )
    model.compile(keras.optimizers.SGD(0.1), LOSS, weighted_metrics=["accuracy"])
    return model


def _preprocessor():
    return models.ViTImageClassifierPreprocessor((16, 16))


@pytest.fixture(scope="module")
def text_preprocessor():
    tokenizer = train_tokenizer(demo.texts(), 400)
    return models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)


def gemma(preprocessor=None, **settings):
    keras.utils.set_random_seed(4)
    lm = GemmaCausalLM(GemmaBackbone(**FIELDS, **settings), preprocessor)
    lm.compile(keras.optimizers.SGD(0.1))
    return lm


def parameters(method):
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


def test_parameters_are_keras_own():
    assert len(TASKS) >= 3
    compiles = parameters(keras.Model.compile)
    for task in TASKS:
        for name in METHODS:
            wanted = parameters(getattr(keras.Model, name))
            assert parameters(getattr(task, name)) == wanted, (task, name)
        # The order is Keras'; defaults are the task's, and what keras-hub adds goes by name.
        ours = parameters(task.compile)
        assert [row[:2] for row in ours[: len(compiles)]] == [row[:2] for row in compiles]
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in ours[len(compiles) :])
    for name in ("fit", "evaluate"):
        assert parameters(getattr(TrainStep, name)) == parameters(getattr(keras.Model, name))


def test_by_place_is_by_name(capsys):
    found = []
    for by_place in (True, False):
        model = classifier()
        if by_place:
            history = model.fit(PICTURES, LABELS, 4, 2, 0, None, 0.34)
            loss = model.evaluate(PICTURES, LABELS, 4, 0)
            outputs = model.predict(PICTURES, 4, 0)
        else:
            history = model.fit(
                x=PICTURES, y=LABELS, batch_size=4, epochs=2, verbose=0, validation_split=0.34
            )
            loss = model.evaluate(x=PICTURES, y=LABELS, batch_size=4, verbose=0)
            outputs = model.predict(x=PICTURES, batch_size=4, verbose=0)
        assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
        assert len(history.history["loss"]) == 2
        found.append((history.history["loss"], loss, outputs))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not capsys.readouterr().out
    with pytest.raises(TypeError, match="batchsize"):
        classifier().fit(PICTURES, LABELS, batchsize=4)


def assert_a_batch_is_a_fit(by_fit, by_batch, *given):
    """All samples of `given` are one batch."""
    atol = tolerance("losses")
    wanted = by_fit.fit(*given, batch_size=6, verbose=0, shuffle=False).history
    logs = by_batch.train_on_batch(*given, return_dict=True)
    for name, value in logs.items():
        np.testing.assert_allclose(value, wanted[name][0], atol=atol)
    for one, other in zip(by_batch.variables, by_fit.variables, strict=True):
        np.testing.assert_allclose(to_numpy(one.value), to_numpy(other.value), atol=atol)
    evaluated = by_fit.evaluate(*given, batch_size=6, verbose=0)
    np.testing.assert_allclose(by_batch.test_on_batch(*given), evaluated, atol=atol)
    predicted = by_fit.predict(given[0], batch_size=6, verbose=0)
    found = by_batch.predict_on_batch(given[0])
    np.testing.assert_allclose(found, predicted, atol=tolerance("logits"))


@pytest.mark.nightly("tensorflow")
@pytest.mark.each_backend
def test_a_step_on_a_batch_is_fit_on_it():
    for raw, labels, dtype in (
        (PICTURES, LABELS, "float32"),
        (list(PICTURES), LABELS, "mixed_bfloat16"),
    ):
        by_fit, by_batch = classifier(dtype=dtype), classifier(dtype=dtype)
        assert by_batch.preprocessor is not None
        assert_a_batch_is_a_fit(by_fit, by_batch, raw, labels)


@pytest.mark.parametrize("kind", ["texts", "records"])
def test_a_step_on_a_batch_of_texts(kind, text_preprocessor):
    given, dtype = TEXTS, "mixed_bfloat16"
    if kind == "records":
        given, dtype = {"prompts": TEXTS, "responses": TEXTS[::-1]}, "float32"
    by_fit, by_batch = (gemma(text_preprocessor, dtype=dtype) for _ in range(2))
    assert_a_batch_is_a_fit(by_fit, by_batch, given)


@pytest.mark.parametrize(
    ("policy", "by_preset"),
    [("mixed_float16", True), ("mixed_float16", False), ("mixed_bfloat16", True)],
)
def test_the_policy_asked_for_is_the_tasks_own(policy, by_preset):
    scaled = keras.optimizers.LossScaleOptimizer
    if by_preset:
        vit = ViTImageClassifier.from_preset("vit_debug", num_classes=3, dtype=policy)
        lm = GemmaCausalLM.from_preset("gemma_debug", dtype=policy, preprocessor=None)
    else:
        backbone = models.ViTBackbone.from_preset("vit_debug", num_layers=1, dtype=policy)
        vit = ViTImageClassifier(backbone, num_classes=3)
        lm = gemma(dtype=policy)
    for model in (vit, lm):
        assert model.dtype_policy.name == policy
        model.compile(optimizer=AdamW(1e-3), loss=LOSS)
        assert isinstance(model.optimizer, scaled) == (policy == "mixed_float16")
        model.compile(optimizer=AdamW(1e-3), loss=LOSS, auto_scale_loss=False)
        assert not isinstance(model.optimizer, scaled)
    # The head's policy stays what it was.
    assert vit.head_dtype.name == "float32"


def test_float16_keeps_a_head_in_float32():
    """Under a mixed policy the outer model must not have its float32 head computed in half."""
    wide = ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1)
    half = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=3, num_layers=1, dtype="mixed_bfloat16"
    )
    assert {str(v.dtype) for v in half.trainable_variables} == {"float32"}
    half.set_weights(wide.get_weights())
    x = GENERATOR.normal(size=(2, 16, 16, 3)).astype("float32")
    head = half.get_layer("logits")
    assert keras.backend.standardize_dtype(half.backbone(x).dtype) == "bfloat16"
    pooled = to_numpy(keras.Model(half.input, head.input)(x)).astype("float64")
    wanted = pooled @ to_numpy(head.kernel).astype("float64") + to_numpy(head.bias)
    found = to_numpy(half(x))
    np.testing.assert_allclose(found, wanted, atol=tolerance("dense"))
    assert found.dtype == np.float32 and 0 < np.abs(found - to_numpy(wide(x))).max() < 0.03


@pytest.mark.nightly("tensorflow")
@pytest.mark.each_backend
def test_compile_settings_travel_in_a_keras_file(tmp_path):
    lm = gemma()
    sampler = Sampler(temperature=0.7, top_k=3, seed=5)
    lm.compile(
        keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
        weighted_metrics=[],
        sampler=sampler,
        auto_scale_loss=False,
    )
    ids = np.random.default_rng(0).integers(3, 320, (2, 6)).astype("int32")
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}, np.roll(ids, -1, 1)
    lm.train_on_batch(*inputs)
    lm.save(tmp_path / "lm.keras")
    found = keras.saving.load_model(tmp_path / "lm.keras")
    assert found.generator.sampler == sampler
    assert found.get_compile_config() == lm.get_compile_config()
    assert found.get_compile_config()["jit_compile"] == "auto"
    assert found.get_compile_config()["auto_scale_loss"] is False
    assert found.loss.reduction == "sum"
    np.testing.assert_allclose(
        found.train_on_batch(*inputs), lm.train_on_batch(*inputs), atol=tolerance("losses")
    )
    named = gemma()
    named.compile(sampler="top_p", jit_compile=False)
    again = GemmaCausalLM.from_config(named.get_config())
    again.compile_from_config(named.get_compile_config())
    assert again.generator.sampler == named.generator.sampler
    assert again.generator.jit_compile is False
    assert [metric.name for metric in again.metrics] == [metric.name for metric in named.metrics]
    settings = lm.get_compile_config()
    lm.save(tmp_path / "lm.h5")
    assert lm.get_compile_config() == settings


def test_a_loss_of_probabilities_meets_logits():
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1)
    for loss, name in (
        ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy"),
        ("categorical_crossentropy", "CategoricalCrossentropy"),
        (keras.losses.binary_crossentropy, "BinaryCrossentropy"),
        (keras.losses.CategoricalFocalCrossentropy(), "CategoricalFocalCrossentropy"),
        ([keras.losses.SparseCategoricalCrossentropy()], "SparseCategoricalCrossentropy"),
    ):
        wanted = rf"gives logits, and the loss .* give keras.losses.{name}\(from_logits=True\)"
        with pytest.warns(UserWarning, match=wanted):
            model.compile("sgd", loss)
    # Warnings are errors here, so these give none.
    for loss in (LOSS, "mse", None, keras.losses.CategoricalCrossentropy(from_logits=True)):
        model.compile("sgd", loss)
    chosen = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=3, num_layers=1, activation="softmax"
    )
    chosen.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(UserWarning, match="GemmaCausalLM gives logits"):
        gemma().compile(loss="sparse_categorical_crossentropy")
