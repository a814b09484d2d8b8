"""TrainStep: what `fit` makes of a loss function, against Keras' own `fit`, NumPy and torch."""

import functools

import keras
import numpy as np
import pytest

from any_data import run
from arrays import assert_equal
from kmodels.checkpoint import state
from kmodels.core.errors import InputError
from kmodels.layers import block_compile as compiling
from kmodels.models import ViTImageClassifier
from kmodels.training import AdamW, TrainStep, WeightAverage
from refusals import refused
from tolerances import tolerance

ops = keras.ops
rng = np.random.default_rng(0)
X = rng.normal(size=(48, 5)).astype("float32")
Y = rng.integers(0, 3, 48)
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(dropout=0.3):
    """What a user might have: batch norm, dropout, a regulariser, nothing of kmodels."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((5,))
    x = keras.layers.Dense(8, activation="tanh", name="first", kernel_regularizer="l2")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(dropout, name="drop")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="second", dtype="float32")(x))


def classify(model, batch, training):
    x, y = batch
    logits = model(x, training=training)
    return crossentropy(y, logits), {"accuracy": (y, logits), "size": ops.mean(ops.abs(logits))}


def accuracy():
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


def values(of):
    """Variables of a model, or slots of an optimizer, by path."""
    named = state.slots(of) if isinstance(of, keras.optimizers.Optimizer) else state.named(of)
    return {k: np.array(state.host_values(v)) for k, v in named.items()}


OPTIMIZERS = {
    "float32": lambda: keras.optimizers.Adam(0.05),
    "mixed_bfloat16": lambda: keras.optimizers.AdamW(0.05, global_clipnorm=0.1, use_ema=True),
    "mixed_float16": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}


@pytest.mark.each_time("mixed_float16", on=("tensorflow",))
@pytest.mark.parametrize("policy", OPTIMIZERS)
def test_fit_is_what_keras_own_is(policy):
    """Bit for bit: weights, moving statistics, seeds, slots, averages, logs, evaluation."""
    before = keras.dtype_policies.get(keras.config.dtype_policy())
    keras.config.set_dtype_policy(policy)
    try:
        found = []
        for ours in (True, False):
            model = make_model()
            if ours:
                trained = TrainStep(model, classify)
                trained.compile(OPTIMIZERS[policy](), metrics=[accuracy()])
            else:
                trained = model
                trained.compile(OPTIMIZERS[policy](), crossentropy, metrics=["accuracy"])
            data = {"validation_data": (X[:16], Y[:16]), "batch_size": 16, "verbose": 0}
            # Torch's loaders and Keras' dropout share a generator, so both see the same loaders.
            fit = trained.fit if ours else functools.partial(run, trained, "fit")
            history = fit(X, Y, epochs=2, shuffle=False, **data).history
            if ours:
                assert history.pop("size") != history.pop("val_size")
            found.append((history, values(model.variables), values(trained.optimizer)))
    finally:
        keras.config.set_dtype_policy(before)
    (history, weights, slots), wanted = found
    assert history == wanted[0]
    assert_equal(weights, wanted[1])
    assert_equal(slots, wanted[2])
    assert weights["norm/moving_mean"].any()
    assert ("dynamic_scale" in " ".join(slots)) == (policy == "mixed_float16")


class Layers(keras.Model):
    """A subclassed model, which has no variables before its first call."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def softmax(z):
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def test_distillation_is_what_numpy_makes_of_it():
    """The teacher stays as it is, its moving statistics too; a named batch goes in as it came."""
    temperature, rate = 2.0, 0.5

    def distill(models, batch, training):
        wanted = ops.softmax(models["teacher"](batch["image"], training=False) / temperature)
        logits = models["student"](batch["image"], training=training) / temperature
        rows = keras.losses.categorical_crossentropy(wanted, logits, from_logits=True)
        return ops.mean(rows) * temperature**2

    teacher, student = make_model(), Layers()
    step = TrainStep({"student": student, "teacher": teacher}, distill, train=["student"])
    step.compile(keras.optimizers.SGD(rate))
    data = [{"image": X[i : i + 16], "label": Y[i : i + 16]} for i in (0, 16, 32)]
    wanted = softmax(np.array(teacher.predict(X, verbose=0), "float64") / temperature)
    step.evaluate(data, verbose=0)
    before = values(teacher.variables)
    kernel, bias = (np.array(state.host_values(v), "float64") for v in student.weights)
    losses = []
    for i in range(0, 48, 16):
        x, p = X[i : i + 16].astype("float64"), wanted[i : i + 16]
        q = softmax((x @ kernel + bias) / temperature)
        losses.append(-(p * np.log(q)).sum(-1).mean() * temperature**2)
        slope = (q - p) * temperature / len(x)
        kernel, bias = kernel - rate * x.T @ slope, bias - rate * slope.sum(0)
    history = step.fit(data, verbose=0).history
    limit = tolerance("optimizer")
    np.testing.assert_allclose(history["loss"], [np.mean(losses)], rtol=0, atol=limit)
    assert_equal(student.weights, (kernel, bias), limit)
    assert_equal(values(teacher.variables), before)
    assert all(variable.trainable for variable in teacher.trainable_variables)
    assert len(step.trainable_variables) == len(step.optimizer._trainable_variables) == 2


@functools.cache
def outside():
    return make_model()


def with_state_outside(model, batch, training):
    return mean(model, batch, training) + ops.mean(outside()(batch[0], training=training))


def small():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])


def mean(model, batch, training):
    return ops.mean(model(batch[0], training=training))


WRONG = {
    "changes norm/moving_mean, which the step does not hold": with_state_outside,
    "returned nothing": lambda model, batch, training: None,
    r"returned shape \(48, 1\)": lambda model, batch, training: model(batch[0]),
    "returned int32": lambda model, batch, training: ops.argmax(model(batch[0])[0]) * 0,
    "returned a list": lambda model, batch, training: [mean(model, batch, training)],
    "logs that are not a dictionary": lambda *a: (mean(*a), 3.0),
    r"does not depend on any of the 2": lambda model, batch, training: ops.mean(
        ops.stop_gradient(model(batch[0]))
    ),
    "does not depend": lambda model, batch, training: ops.mean(batch[0]),
    "'loss' is logged already": lambda *a: (mean(*a), {"loss": mean(*a)}),
    "compile got no metric of that name": lambda *a: (mean(*a), {"a": (1.0, 2.0)}),
    r"'a' is logged with shape \(48, 5\)": lambda model, batch, training: (
        mean(model, batch, training),
        {"a": batch[0]},
    ),
    "draws random numbers without a seed": lambda model, batch, training: mean(
        model, (batch[0] + keras.random.normal((5,)),), training
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_loss_is_told_in_a_line(message):
    outside()
    step = TrainStep(small(), WRONG[message])
    step.compile("sgd")
    refused(message, step.fit, X, Y, batch_size=48, verbose=0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda two: TrainStep(two, mean, train=["c"]), "is to train 'c'; the models are a, b"),
        (lambda two: TrainStep(two, {"a": mean, "c": mean}), "objective c is to train 'c'"),
        (
            lambda two: TrainStep(two, {"a": mean, "b": mean}, train=["a"]),
            "train must name the models of each of a, b",
        ),
        (lambda two: TrainStep(two, mean, train={"a": ["a"]}), "train is named by objective"),
        (lambda two: TrainStep({"a": 3}, mean), "got int as 'a'; give Keras models"),
        (lambda two: TrainStep(small(), "mse"), "a loss is 'mse'; give a function"),
        (lambda two: TrainStep(two, {}), "there is no objective"),
        (lambda two: TrainStep(two, mean, output="a"), "output is 'a'; give a function"),
        (lambda two: TrainStep(two, mean, averages=["a"]), "averages is .*; give a dictionary"),
        (lambda two: TrainStep(two, mean, averages={"a": "b"}), "averages has 'b' for 'a'; give"),
        (lambda two: TrainStep(two, mean, averages={"a": WeightAverage("a")}), "of another model"),
        (lambda two: WeightAverage("a", "0.9"), "momentum is '0.9'; give 0 to 1, or a function"),
        (lambda two: WeightAverage(3), "of is 3; give a text"),
    ],
)
def test_what_no_step_can_be_made_of_is_told(make, message):
    refused(message, make, {"a": small(), "b": small()})


def test_an_output_is_what_predict_returns():
    two = {"a": small(), "b": small()}

    def output(models, inputs, training):
        return keras.ops.concatenate([models["a"](inputs["x"]), inputs["y"]], axis=-1)

    step = TrainStep(two, {"a": mean, "b": mean}, output=output)
    rows = {"x": X, "y": X[:, :1]}
    found = step.predict(rows, batch_size=2, verbose=0)
    expected = np.concatenate([two["a"].predict(X, verbose=0), X[:, :1]], axis=-1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.once
def test_wrong_settings_are_told():
    shared = AdamW()
    step = TrainStep({"a": small(), "b": small()}, {"a": mean, "b": mean})
    for optimizer, message in (
        ({"a": "sgd"}, "give one for each of a, b"),
        ({"a": "sgd", "b": None}, "optimizer is None; give an optimizer, or its name"),
        (shared, "several objectives cannot share"),
        ({"a": shared, "b": shared}, "two objectives have the same optimizer"),
    ):
        refused(message, step.compile, optimizer)
    step.compile("sgd")
    for act, message in (
        (lambda: setattr(step.optimizer, "learning_rate", 0.1), r"set step\.optimizer\.by_player"),
        (lambda: step(X), "holds several models; call one of them"),
        (step.get_config, "holds a Python function"),
        (lambda: step.compile("sgd", metrics=["accuracy"]), r"give a keras\.metrics object"),
    ):
        with pytest.raises(InputError, match=message):  # Keras adds lines where a layer was called
            act()
    frozen = small()
    frozen.trainable = False
    for model, metrics, message in (
        (frozen, [], "has nothing to train: all variables"),
        (small(), [accuracy()], "metric 'accuracy', which no loss function logs"),
    ):
        step = TrainStep(model, mean)
        step.compile("sgd", metrics=metrics)
        refused(message, step.fit, X, Y, verbose=0)


def test_evaluation_may_log_less_and_not_more():
    def fewer(model, batch, training):
        loss = mean(model, batch, training)
        return loss, ({"a": loss, "b": loss} if training else {"a": loss})

    def more(model, batch, training):
        loss = mean(model, batch, training)
        return loss, ({"a": loss} if training else {"a": loss, "b": loss})

    step = TrainStep(small(), fewer)
    step.compile("sgd")
    assert set(step.evaluate(X, Y, verbose=0, return_dict=True)) == {"loss", "a"}
    step = TrainStep(small(), more)
    step.compile("sgd")
    refused("'b' is not among the logs of the first batch in trai", step.evaluate, X, Y, verbose=0)


def test_a_single_model_is_called_and_predicts():
    model = small()
    step = TrainStep(model, mean)
    step.compile("sgd")
    np.testing.assert_array_equal(step.predict(X, verbose=0), model.predict(X, verbose=0))


# torch's compiler warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_on_torch_the_blocks_of_all_models_are_compiled(backend):
    if backend != "torch":
        return
    models = {
        name: ViTImageClassifier.from_preset("vit_debug", num_classes=3, name=name)
        for name in ("student", "teacher")
    }
    step = TrainStep(models, classify, train=["student"])
    for chosen in (True, False):
        step.compile("sgd", jit_compile=chosen)
        assert [compiling.compiled(model) for model in models.values()] == [chosen] * 2
        assert not step.jit_compile  # Keras would compile the whole step, in pieces.
    refused("and these have none", TrainStep(small(), mean).compile, "sgd", jit_compile=True)


def test_a_step_begins_without_the_gradients_of_the_one_before(monkeypatch, backend):
    if backend != "torch":
        return
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1)
    model.compile(keras.optimizers.SGD(0.1), crossentropy)

    def held():
        return sum(v.value.grad is not None for v in model.trainable_variables)

    during, call = [], model.call

    def watched(*args, **kwargs):
        during.append(held())
        return call(*args, **kwargs)

    monkeypatch.setattr(model, "call", watched)
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")
    for _ in range(2):
        model.train_on_batch(images, np.arange(2))
        assert held() == len(model.trainable_variables)
    # Keras builds the model by a call before the first step.
    assert len(during) >= 2 and not any(during)
