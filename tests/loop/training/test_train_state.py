"""A loop of your own over train_state and train_step does what `fit` does."""

import os
import signal

import keras
import numpy as np
import pytest

import kmodels
from arrays import assert_equal, to_numpy
from kmodels.checkpoint import state
from kmodels.training import AdamW, TrainStep
from refusals import refused

ops = keras.ops
rng = np.random.default_rng(0)
X = rng.normal(size=(32, 5)).astype("float32")
Y = rng.normal(size=(32, 2))
BATCHES = [{"x": X[i : i + 8], "y": Y[i : i + 8]} for i in range(0, 32, 8)]


def make_model():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((5,))
    x = keras.layers.Dense(6, activation="tanh", name="first")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="second")(x))


def make_optimizer():
    return AdamW(0.05, clip_norm=1.0)


def squares(model, batch, training):
    found = model(batch["x"], training=training)
    return ops.mean((found - batch["y"]) ** 2), {"size": ops.mean(ops.abs(found))}


def values(variables):
    return [np.array(state.host_values(v)) for v in variables]


def check_equal(found, wanted):
    assert_equal(found, wanted, 1e-6)


@pytest.fixture(scope="module")
def fitted():
    """What `fit` makes of four batches: losses, weights, slots."""
    model, optimizer = make_model(), make_optimizer()
    step = TrainStep(model, squares)
    step.compile(optimizer)
    history = step.fit(BATCHES, verbose=0).history
    return history, values(model.variables), values(optimizer.variables)


@pytest.fixture(scope="module")
def step():
    return kmodels.train_step(squares)


def test_a_loop_does_what_fit_does(fitted, step):
    model, optimizer = make_model(), make_optimizer()
    state_ = kmodels.train_state(model, optimizer)
    losses = []
    for number, batch in enumerate(BATCHES):
        state_, logs = step(state_, batch)
        losses.append(logs)
        if number == 1:
            # Looked at on the way: the loop continues from what is there.
            state_.write_back()
            model.predict(X, verbose=0)
    state_.write_back()
    for name in ("loss", "size"):
        check_equal([np.mean([to_numpy(logs[name]) for logs in losses])], fitted[0][name])
    check_equal(values(model.variables), fitted[1])
    check_equal(values(optimizer.variables), fitted[2])


class Interrupted(type(kmodels.train_step(squares))):
    """A step in whose middle an interrupt comes, at its fourth call."""

    calls = 0

    def __call__(self, state, batch):
        advance = self._advance

        def interrupted(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            return advance(*arguments)

        self.calls += 1
        self._advance = interrupted if self.calls == 4 else advance
        try:
            return super().__call__(state, batch)
        finally:
            self._advance = advance


def test_an_interrupt_leaves_the_last_finished_step(fitted):
    model, optimizer, step = make_model(), make_optimizer(), Interrupted(squares)
    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), kmodels.train_state(model, optimizer) as state_:
        for batch in [*BATCHES, *BATCHES]:
            state_, _ = step(state_, batch)
    assert signal.getsignal(signal.SIGINT) is former
    check_equal(values(model.variables), fitted[1])
    check_equal(values(optimizer.variables), fitted[2])
    assert int(values([optimizer.iterations])[0]) == 4


def test_an_interrupt_between_steps_and_any_error_write_back(step):
    model, optimizer = make_model(), make_optimizer()
    with pytest.raises(ZeroDivisionError), kmodels.train_state(model, optimizer) as state_:
        state_, _ = step(state_, BATCHES[0])
        raise ZeroDivisionError
    once = values(model.variables)
    with pytest.raises(KeyboardInterrupt), kmodels.train_state(model, optimizer) as state_:
        os.kill(os.getpid(), signal.SIGINT)
        step(state_, BATCHES[1])
    check_equal(values(model.variables), once)


def test_what_cannot_work_is_told():
    def nothing(model, batch, training):
        return ops.mean(batch["x"])

    state_ = kmodels.train_state(make_model(), make_optimizer())
    message = "does not depend on any of the 6 variables"
    refused(message, kmodels.train_step(nothing), state_, BATCHES[0])
    refused("state is of Functional; give that of", kmodels.train_step(squares), make_model(), X)
    refused(
        "jit_compile is 'yes'; give True, False or \"auto\"", kmodels.train_step, squares, "yes"
    )
    refused("a loss is None; give a function", kmodels.train_step, None)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    refused("not all of them have their variables", kmodels.train_state, unbuilt, "sgd")
    message = "the step has a loss for the only objective, the state opt"
    two = kmodels.train_state({n: make_model() for n in "ab"}, {n: make_optimizer() for n in "ab"})
    refused(message, kmodels.train_step(squares), two, BATCHES[0])


def test_a_state_is_a_pytree_on_jax(backend, step):
    if backend != "jax":
        return
    import jax

    state_ = kmodels.train_state(make_model(), make_optimizer())
    leaves, structure = jax.tree_util.tree_flatten(state_)
    assert len(leaves) == len(state_.objectives.variables) + 2 + 2 * 6
    other = jax.tree_util.tree_unflatten(structure, leaves)
    assert isinstance(other, type(state_)) and other.objectives is state_.objectives
    two = {k: np.stack([b[k].astype("float32") for b in BATCHES[:2]]) for k in ("x", "y")}
    with pytest.raises(RuntimeError, match="deleted"):
        step(state_, BATCHES[0])[0].objectives.variables[0].numpy()
    state_.write_back()
    last, logs = jax.lax.scan(step, kmodels.train_state(make_model(), make_optimizer()), two)
    again = kmodels.train_state(make_model(), make_optimizer())
    for number in range(2):
        again, wanted = step(again, {k: v[number] for k, v in two.items()})
        np.testing.assert_allclose(logs["loss"][number], wanted["loss"], rtol=1e-5)
    check_equal(map(np.asarray, jax.tree.leaves(last)), map(np.asarray, jax.tree.leaves(again)))


def test_a_mesh_gives_what_one_device_gives(backend, fitted):
    if backend != "jax":
        return
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    try:
        model = make_model()
        trained = TrainStep(model, squares)
        trained.compile(make_optimizer())
        history = trained.fit(BATCHES, verbose=0).history
        with kmodels.train_state(make_model(), make_optimizer()) as loop:
            step = kmodels.train_step(squares)
            for batch in BATCHES:
                loop, _ = step(loop, batch)
        found = [values(model.variables), values(loop.objectives.variables)]
    finally:
        keras.distribution.set_distribution(None)
    check_equal(history["loss"], fitted[0]["loss"])
    for arrays in found:
        check_equal(arrays, fitted[1])
