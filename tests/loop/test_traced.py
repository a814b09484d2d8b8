"""Compiled code follows the model: adapters, merging, quantization, freezing, generic ops."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest

import kmodels
from arrays import assert_equal, to_numpy
from kmodels import lora
from kmodels.core import dispatch
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTImageClassifier
from kmodels.models.gemma.presets import PRESETS
from kmodels.training import TrainStep
from pool import pool
from stopped_runs import JIT
from tolerances import tolerance

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(4, 16, 16, 3)).astype("float32")
LABELS = np.array([0, 1, 2, 1])
CLOSE = {"rtol": 0, "atol": tolerance("logits")}
# Compiled, XLA rounds to bfloat16 less often than Python does.
NARROW = {"rtol": 0, "atol": tolerance("logits", "bfloat16")}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(dtype="float32"):
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1, dtype=dtype)
    model.compile(keras.optimizers.SGD(0.1), LOSS, weighted_metrics=[])
    return model


@pytest.fixture
def model():
    with pool(classifier) as lent:
        yield lent


def far(model):
    for variable in model.variables:
        if variable.name == "lora_b":
            variable.assign(np.ones(variable.shape, "float32"))


def called(model, inputs=IMAGES):
    """What Python gives now, nothing compiled."""
    return to_numpy(model(keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)))


def compiled(model):
    """What each of Keras' compiled functions gives: logits, twice, and the loss, twice."""
    predicted = model.predict(IMAGES, verbose=0)
    on_batch = model.predict_on_batch(IMAGES)
    losses = model.evaluate(IMAGES, LABELS, verbose=0), model.test_on_batch(IMAGES, LABELS)
    np.testing.assert_allclose(losses[0], losses[1], **CLOSE)
    return predicted, on_batch, float(losses[0])


def assert_follows(model):
    predicted, on_batch, loss = compiled(model)
    wanted = called(model)
    close = CLOSE if model.compute_dtype == "float32" else NARROW
    np.testing.assert_allclose(predicted, wanted, **close)
    np.testing.assert_allclose(on_batch, wanted, **close)
    wide = np.asarray(wanted, "float64")
    softmax = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    cross = -np.log(softmax[np.arange(4), LABELS]).mean()
    np.testing.assert_allclose(loss, cross, **close)
    return wanted


@pytest.mark.nightly("tensorflow")
def test_predict_and_evaluate_follow_what_was_done_to_the_backbone(model):
    before = assert_follows(model)
    model.backbone.enable_lora(2, targets="all-linear")
    far(model)
    adapted = assert_follows(model)
    assert np.abs(adapted - before).max() > 0.1
    with lora.disabled(model):
        np.testing.assert_allclose(assert_follows(model), before, **CLOSE)
    np.testing.assert_allclose(assert_follows(model), adapted, **CLOSE)
    model.backbone.merge_lora()
    assert_follows(model)
    model.backbone.unmerge_lora()
    np.testing.assert_allclose(assert_follows(model), adapted, **CLOSE)


def test_predict_follows_a_quantized_backbone(model):
    before = assert_follows(model)
    model.backbone.quantize("nf4")
    assert np.abs(assert_follows(model) - before).max() > 1e-4


def test_what_is_traced_with_adapters_disabled_stays_inside(model):
    """In `predict`, and in a function of one's own that `jit` compiles."""
    jitted = kmodels.transforms.jit(lambda x: model(x))
    x = keras.ops.convert_to_tensor(IMAGES)
    base = called(model)
    np.testing.assert_allclose(to_numpy(jitted(x)), base, **CLOSE)
    model.enable_lora(2)
    far(model)
    with lora.disabled(model):
        np.testing.assert_allclose(model.predict(IMAGES, verbose=0), base, **CLOSE)
    adapted = assert_follows(model)
    assert np.abs(adapted - base).max() > 0.01
    np.testing.assert_allclose(to_numpy(jitted(x)), adapted, **CLOSE)


@pytest.mark.nightly("tensorflow")
def test_two_tasks_of_one_backbone_both_follow():
    first = classifier("mixed_bfloat16")
    second = ViTImageClassifier(first.backbone, num_classes=3)
    second.compile("sgd", LOSS)
    before = assert_follows(first), assert_follows(second)
    first.enable_lora(2)
    far(first)
    for model, former in zip((first, second), before, strict=True):
        assert np.abs(assert_follows(model) - former).max() > 2 * NARROW["atol"]


def test_a_model_of_ones_own_around_a_backbone_follows():
    model, backbone, _ = around(False)
    before = model.predict(IMAGES, verbose=0)
    backbone.enable_lora(2)
    far(backbone)
    adapted = model.predict(IMAGES, verbose=0)
    assert np.abs(adapted - before).max() > 0.01
    np.testing.assert_allclose(adapted, called(model), **CLOSE)
    with lora.disabled(backbone):
        np.testing.assert_allclose(model.predict(IMAGES, verbose=0), before, **CLOSE)


def around(nested, jit_compile="auto"):
    """A model of one's own around a backbone, which is its graph or a layer of it."""
    backbone = ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1).backbone
    tokens = backbone(backbone.input) if nested else backbone.output
    model = keras.Model(backbone.input, keras.layers.Dense(3, name="head")(tokens[:, 0]))
    return model, backbone, jit_compile


def task(dtype):
    model = classifier(dtype)
    return model, model.backbone, None


def build(model):
    """Makes the slots, since TensorFlow traces a step of Keras that makes some twice."""
    model.optimizer.build(model.trainable_variables)


@pytest.mark.each_time("own model", "task", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    ("make", "steps_before", "method"),
    [
        (lambda: task("float32"), 0, "fit"),
        (lambda: task("mixed_bfloat16"), 0, "train_on_batch"),
        (lambda: task("float32"), 1, "fit"),
        (lambda: around(False), 1, "fit"),
        (lambda: around(True, JIT), 1, "fit"),
    ],
    ids=["task", "task by batches", "task after a step", "own model", "own model, nested"],
)
def test_fit_after_enable_lora_is_fit_after_compile(make, steps_before, method, caplog):
    """Keras would stop at variables that the optimizer does not know, with an error of its own."""
    found = []
    for again in (False, True):
        keras.utils.set_random_seed(3)
        model, backbone, jit_compile = make()
        settings = {} if jit_compile is None else {"jit_compile": jit_compile}
        quiet = {"verbose": 0, "shuffle": False} if method == "fit" else {}
        model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), LOSS, **settings)
        for _ in range(steps_before):
            build(model)
            model.fit(IMAGES, LABELS, **quiet)
        backbone.enable_lora(2)
        if jit_compile is not None:
            assert "has slots for other variables than functional" in caplog.text
        if again:
            model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), LOSS, **settings)
            build(model)
        frozen = [
            (v, to_numpy(v)) for v in backbone.non_trainable_variables if "seed" not in v.path
        ]
        # An optimizer that has made steps begins anew for other variables.
        says = steps_before and not again and jit_compile is None
        message = "made 1 steps .* start over; call compile"
        with pytest.warns(UserWarning, match=message) if says else nullcontext():
            getattr(model, method)(IMAGES, LABELS, **quiet)
        for _ in range(2):
            getattr(model, method)(IMAGES, LABELS, **quiet)
        assert int(model.optimizer.iterations) == 3
        assert_equal(*zip(*frozen, strict=True))
        # Nothing that is frozen has slots, and what was put in trains.
        slots = [v for v in model.optimizer.variables if v.shape != ()]
        assert len(slots) == len(model.trainable_variables)
        found.append({v.path: to_numpy(v.value) for v in model.variables})
    moved = [np.abs(v).max() > 0 for path, v in found[0].items() if path.endswith("lora_b")]
    assert len(moved) == 2 and all(moved)
    assert_equal(*found, CLOSE["atol"])


def test_freezing_after_compile_holds_at_once_and_slots_go_on():
    keras.utils.set_random_seed(3)
    model = classifier()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS)
    model.fit(IMAGES, LABELS, verbose=0)
    momentum = {v.path.split("/", 1)[1]: to_numpy(v.value) for v in model.optimizer.variables}
    model.backbone.trainable = False
    frozen = [to_numpy(v.value) for v in model.backbone.variables]
    head = {v.path: to_numpy(v.value) for v in model.trainable_variables}
    model.fit(IMAGES, LABELS, verbose=0)
    assert_equal(model.backbone.variables, frozen)
    assert int(model.optimizer.iterations) == 2
    # A step with momentum: what it moved is 0.9 of the last step and the new one's.
    for variable in model.trainable_variables:
        name = variable.path.replace("/", "_") + "_momentum"
        now = next(v for v in model.optimizer.variables if v.path.endswith(name))
        moved = to_numpy(variable.value) - head[variable.path]
        np.testing.assert_allclose(moved, to_numpy(now.value), **CLOSE)
        new = to_numpy(now.value) - 0.9 * momentum[name]
        assert np.abs(new).max() > 0


def test_generic_ops_are_followed_by_a_traced_predict(model):
    model.predict(IMAGES, verbose=0)
    before = dispatch.decisions()["attention"]["generic"]
    with kmodels.generic_only():
        model.predict(IMAGES, verbose=0)
    assert dispatch.decisions()["attention"]["generic"] > before


def loss(model, batch, training):
    x, y = batch
    logits = model(x, training=training)
    return LOSS(y, logits), {"mean": keras.ops.mean(logits)}


def test_train_step_follows_and_trains_the_adapters():
    model = classifier("mixed_bfloat16")
    model.build(IMAGES.shape)
    step = TrainStep(model, loss)
    step.compile(keras.optimizers.SGD(0.5))
    step.fit(IMAGES, LABELS, verbose=0)
    model.backbone.enable_lora(2)
    far(model)
    wanted = float(LOSS(LABELS, called(model)))
    found = step.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(found, wanted, **NARROW)
    frozen = [to_numpy(v.value) for v in model.non_trainable_variables]
    adapters = {v.path: to_numpy(v.value) for v in model.trainable_variables}
    with pytest.warns(UserWarning, match="start over"):
        step.fit(IMAGES, LABELS, verbose=0)
    assert_equal(model.non_trainable_variables, frozen)
    assert any(
        np.abs(to_numpy(v.value) - adapters[v.path]).max() > 1e-5
        for v in model.trainable_variables
        if v.name == "lora_b"
    )


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_loop_follows_disabled_adapters_and_names_new_variables(model):
    model.enable_lora(2)
    far(model)
    step = kmodels.train_step(loss)
    adapted = called(model).mean()
    with lora.disabled(model):
        base = called(model).mean()
    with kmodels.train_state(model, keras.optimizers.SGD(1e-9)) as state:
        state, logs = step(state, (IMAGES, LABELS))
        np.testing.assert_allclose(float(logs["mean"]), adapted, **CLOSE)
        state.write_back()
        with lora.disabled(model):
            state, logs = step(state, (IMAGES, LABELS))
        np.testing.assert_allclose(float(logs["mean"]), base, **CLOSE)
    bare = classifier()
    with (
        pytest.raises(InputError, match="other variables than the state, as after enable_lora"),
        kmodels.train_state(bare, keras.optimizers.SGD(0.1)) as state,
    ):
        state, _ = step(state, (IMAGES, LABELS))
        bare.enable_lora(2)
        step(state, (IMAGES, LABELS))
    assert np.isfinite(called(bare)).all()


@pytest.mark.nightly("tensorflow")
@pytest.mark.parametrize(
    "policy", [pytest.param("float32", marks=pytest.mark.once), "mixed_bfloat16"]
)
def test_generate_follows_disabled_adapters(policy):
    keras.utils.set_random_seed(1)
    lm = GemmaCausalLM(GemmaBackbone(**PRESETS["gemma_debug"], dtype=policy))
    ids = np.random.default_rng(0).integers(3, 320, (2, 6)).astype("int32")
    prompt = {"token_ids": ids, "padding_mask": np.ones_like(ids)}

    def texts():
        return lm.generate(prompt, max_length=12, stop_token_ids=None)["token_ids"]

    base = texts()
    lm.backbone.enable_lora(2, targets="all-linear")
    rng = np.random.default_rng(5)
    for variable in lm.backbone.variables:
        if variable.name == "lora_b":
            variable.assign(rng.normal(size=variable.shape).astype("float32"))
    adapted = texts()
    assert (adapted != base).any()
    with lora.disabled(lm):
        np.testing.assert_array_equal(texts(), base)
    np.testing.assert_array_equal(texts(), adapted)
