"""Optimizers of optax: equal to a loop of one's own, in checkpoints, on a mesh, and their errors.

Most tests have a transformation of their own, so that they run without optax.
"""

import re
from typing import NamedTuple

import keras
import numpy as np
import pytest

import kmodels
from arrays import assert_equal
from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import state
from kmodels.checkpoint.state import slots
from kmodels.distribution import distribute
from kmodels.models import ViTBackbone, ViTImageClassifier
from kmodels.training import OptaxOptimizer, TrainStep
from refusals import refused
from stopped_runs import Kill, Killed

BACKEND = keras.backend.backend()
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="optax is for JAX")
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
rng = np.random.default_rng(0)
X = rng.normal(size=(40, 8, 8, 3)).astype("float32")
Y = rng.integers(0, 4, 40)
BATCH = 8
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Pair(NamedTuple):
    """What optax calls a GradientTransformation."""

    init: object
    update: object


class State(NamedTuple):
    count: object
    trace: object


def momentum(rate=0.05):
    """Gradient descent with momentum, as optax would write it."""
    import jax
    import jax.numpy as jnp

    def init(params):
        return State(jnp.zeros((), "int32"), jax.tree.map(jnp.zeros_like, params))

    def update(gradients, before, params=None):
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, before.trace, gradients)
        return jax.tree.map(lambda t: -rate * t, trace), State(before.count + 1, trace)

    return Pair(init, update)


def make_model(optimizer=None, dropout=0.0, **compiled):
    keras.utils.set_random_seed(3)
    backbone = ViTBackbone(image_shape=(8, 8, 3), patch_size=4, dropout_rate=dropout, **SIZES)
    model = ViTImageClassifier(backbone, 4)
    if optimizer is not None:
        model.compile(optimizer, LOSS, **compiled)
    return model


def fit(model, epochs=4, callbacks=(), **settings):
    """Makes 5 steps in each epoch."""
    return model.fit(
        X, Y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[*callbacks], **settings
    ).history


def values(variables):
    return {v.path: np.array(state.host_values(v)) for v in variables}


def by_hand(transformation, steps=20):
    """Returns the weights after a loop as in optax's documentation."""
    import jax

    model = make_model()
    paths = [v.path for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    params = {v.path: v.value for v in model.trainable_variables}

    def loss_of(params, others, x, y):
        logits, others = model.stateless_call([params[p] for p in paths], others, x, training=True)
        return LOSS(y, logits), others

    @jax.jit
    def step(params, others, state, x, y):
        (_, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, others, x, y)
        updates, state = transformation.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p + u, params, updates), others, state

    first = transformation.init(params)
    for number in range(steps):
        rows = slice(number * BATCH % 40, number * BATCH % 40 + BATCH)
        params, others, first = step(params, others, first, X[rows], Y[rows])
    return {path: np.asarray(value) for path, value in params.items()}


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has them")
def test_other_backends_refuse():
    pair = Pair(lambda params: (), lambda *args: args)
    message = f"optax computes with JAX, and Keras' backend is {BACKEND}; set KERAS_BACKEND=jax"
    refused(message, make_model, pair)
    refused(message, OptaxOptimizer, pair)
    refused(message, kmodels.train_state, make_model(), pair)


@on_jax
def test_fit_equals_a_loop_of_ones_own():
    model = make_model(momentum())
    fit(model, shuffle=False)
    assert_equal(values(model.trainable_variables), by_hand(momentum()), 1e-6)
    names = slots(model.optimizer)
    assert len(names) == len(model.optimizer.variables)
    assert {"iteration", "count", "block_0/mlp/up/kernel:trace"} <= set(names)
    assert int(names["count"]) == 20


def _optax():
    """Returns transformations by name; masks and labels are made of the paths."""
    import optax

    def kernels(params):
        return {path: path.endswith("kernel") for path in params}

    def parts(params):
        return {path: "adam" if path.startswith("block") else "stay" for path in params}

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20)
    rates = {"adam": optax.adam(1e-2), "stay": optax.set_to_zero()}
    noise = optax.add_noise(0.01, 0.55, key=7)
    return {
        "adamw": optax.adamw(1e-2),
        "schedule": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(schedule)),
        "masked": optax.chain(
            optax.masked(optax.add_decayed_weights(0.1), kernels), optax.sgd(1e-2, 0.9)
        ),
        "multi_transform": optax.multi_transform(rates, parts),
        "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(schedule, b1=0.8),
        "MultiSteps": optax.MultiSteps(optax.adamw(1e-2), 2),
        "random keys": optax.chain(noise, optax.apply_if_finite(optax.sgd(1e-2), 3)),
        "weights in the state": optax.contrib.schedule_free_sgd(1e-2),
    }


@pytest.mark.each_time("adamw", "MultiSteps", "schedule")
@pytest.mark.across("jax")
@pytest.mark.needs("optax")
@pytest.mark.parametrize(
    "name",
    [
        *("adamw", "schedule", "masked", "multi_transform", "inject_hyperparams", "MultiSteps"),
        *("random keys", "weights in the state"),
    ],
)
def test_each_transformation_equals_a_loop_of_ones_own(name):
    model = make_model(_optax()[name], steps_per_execution=2)
    fit(model, shuffle=False)
    assert_equal(values(model.trainable_variables), by_hand(_optax()[name]), 1e-6)
    assert len(slots(model.optimizer)) == len(model.optimizer.variables)


def killed(folder, stop, make, **settings):
    """Returns slots and weights of a run that is killed at a step and made again, if any."""
    for at in (stop, None) if stop else (None,):
        model, checkpoint = make(), Checkpoint(folder, every=3)
        if at is None:
            fit(model, 2, [checkpoint], **settings)
            return values(model.variables) | {
                name: np.array(state.host_values(v)) for name, v in slots(model.optimizer).items()
            }
        with pytest.raises(Killed):
            fit(model, 2, [checkpoint, Kill(at)], **settings)
        checkpoint.wait()
    raise AssertionError


@on_jax
def test_a_killed_run_continues_to_the_bit(tmp_path):
    def make():
        return make_model(OptaxOptimizer(momentum(), use_ema=True, ema_momentum=0.9), dropout=0.1)

    whole = killed(tmp_path / "whole", None, make)
    assert any(name.endswith(":average") for name in whole)
    assert_equal(killed(tmp_path / "killed", 8, make), whole, 0)


@on_jax
def test_a_checkpoint_of_another_transformation_is_refused(tmp_path):
    fit(make_model(momentum()), 1, [Checkpoint(tmp_path)])
    stateless = Pair(lambda params: (), lambda gradients, before, params: (gradients, before))
    message = "belongs to another model or optimizer: optimizer: .* is not in the model"
    refused(message, fit, make_model(stateless), 2, [Checkpoint(tmp_path)])


@on_jax
@pytest.mark.parametrize("mesh", ["data=2", "data=2,fsdp=2"])
def test_slots_lie_as_their_weights_on_a_mesh(mesh):
    alone = make_model(momentum())
    losses = fit(alone, 2, shuffle=False)["loss"]
    try:
        plan = distribute(mesh)
        model = make_model(momentum())
        plan.prepare(model)
        np.testing.assert_allclose(fit(model, 2, shuffle=False)["loss"], losses, atol=1e-5)
        by_path = {v.path: v.value.sharding for v in model.trainable_variables}
        split = 0
        for name, variable in slots(model.optimizer).items():
            path, _, slot = name.partition(":")
            if slot:
                assert variable.value.sharding == by_path[path], name
                split += not variable.value.sharding.is_fully_replicated
            else:
                assert variable.value.sharding.is_fully_replicated, name
        assert bool(split) == ("fsdp" in mesh)
    finally:
        distribute(None)


@on_jax
def test_steps_of_ones_own_equal_fit():
    fitted = make_model(momentum())
    fit(fitted, 1, shuffle=False)

    def loss_fn(model, batch, training):
        x, y = batch
        return LOSS(y, model(x, training=training))

    stepped, looped = make_model(), make_model()
    step = TrainStep(stepped, loss_fn)
    step.compile(momentum())
    step.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    advance = kmodels.train_step(loss_fn)
    with kmodels.train_state(looped, momentum()) as current:
        for first in range(0, 40, BATCH):
            current, _ = advance(current, (X[first : first + BATCH], Y[first : first + BATCH]))
    wanted = values(fitted.variables)
    assert_equal(values(stepped.variables), wanted, 1e-6)
    assert_equal(values(looped.variables), wanted, 1e-6)


@on_jax
def test_only_trained_variables_are_given():
    model = make_model(momentum())
    model.backbone.enable_lora(2)
    before = values(model.backbone.variables)
    fit(model, 1)
    trained = {v.path for v in model.trainable_variables}
    assert {name.partition(":")[0] for name in model.optimizer.by_slot} - {"count"} == trained
    after = values(model.backbone.variables)
    assert {path for path in before if not np.array_equal(before[path], after[path])} <= trained
    model.backbone.trainable = False
    fit(model, 1)
    assert len(model.optimizer.by_slot) == 1 + len(model.trainable_variables) < len(trained)


@on_jax
def test_a_loss_in_half_precision_is_scaled():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(momentum())
        first, *_, last = fit(model, 3)["loss"]
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) and last < first
    assert "block_0/mlp/up/kernel:trace" in slots(model.optimizer)


@on_jax
def test_a_file_has_no_optimizer_and_a_warning_says_so(tmp_path):
    model = make_model(momentum())
    fit(model, 1)
    with pytest.warns(UserWarning, match="the file has no optimizer, loss and metrics, since it"):
        model.save(tmp_path / "model.keras")
    # A classifier is compiled with Adam when it is made, and the file has the slots of optax.
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'adam"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(values(loaded.variables), values(model.variables), 0)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    plain.compile(OptaxOptimizer(momentum()), "mse")
    kmodels.fit(plain, np.ones((8, 3)), np.ones((8, 2)), verbose=0)
    message = "made of functions, which no file can hold; use save_weights or kmodels.callbacks"
    refused(message, plain.save, tmp_path / "plain.keras")


@on_jax
def test_a_rate_that_is_hidden_is_no_number():
    model = make_model(momentum())
    message = r"the optimizer of optax shows 0 learning rates; to read or set one, give optax\.inj"
    for callback in (
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        keras.callbacks.ReduceLROnPlateau(monitor="loss"),
    ):
        refused(message, fit, model, 1, [callback])
    refused(message, float, model.optimizer.learning_rate)
    refused(message, setattr, model.optimizer, "learning_rate", 1.0)


@on_jax
def test_a_checkpoint_names_a_loss_that_is_not_finite(tmp_path):
    model = make_model(momentum(float("inf")))
    message = r"the loss is nan at step \d+ \(learning rate nan\)"
    refused(message, fit, model, 2, [Checkpoint(tmp_path, stop_on_non_finite=True)])


@pytest.mark.across("jax")
@pytest.mark.needs("optax")
def test_an_injected_rate_is_read_set_and_kept(tmp_path, capsys):
    import optax

    def make(rate=0.02):
        return make_model(optax.inject_hyperparams(optax.sgd)(rate, momentum=0.9))

    model = make()
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    log = fit(model, 2, [halved, Checkpoint(tmp_path)])["learning_rate"]
    np.testing.assert_allclose(log, [0.01, 0.005])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.005)
    again = make()
    fit(again, 3, [Checkpoint(tmp_path)])
    assert float(again.optimizer.learning_rate) == pytest.approx(0.005)
    assert "was changed" not in capsys.readouterr().out
    other = make(0.03)
    fit(other, 4, [Checkpoint(tmp_path)])
    assert float(other.optimizer.learning_rate) == pytest.approx(0.03)
    changed = re.search(r"hyperparams/learning_rate was (\S+), is (\S+)", capsys.readouterr().out)
    assert [float(n) for n in changed.groups()] == pytest.approx([0.005, 0.03])
    scheduled = make(optax.linear_schedule(0.1, 0.0, 10))
    fit(scheduled, 1)
    assert float(scheduled.optimizer.learning_rate) == pytest.approx(0.06)
    message = "the learning rate follows a schedule of optax; give inject_hyperparams a number"
    refused(message, setattr, scheduled.optimizer, "learning_rate", 1.0)
