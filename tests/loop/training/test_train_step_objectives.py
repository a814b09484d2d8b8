"""Several objectives in one step: the order of their turns, their optimizers, an exact resume."""

import keras
import numpy as np
import pytest

import kmodels
from arrays import assert_equal, to_numpy
from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import manager, state
from kmodels.training import TrainStep
from stopped_runs import Kill, Killed
from tolerances import tolerance

ops = keras.ops
rng = np.random.default_rng(0)
REAL = rng.normal(size=(24, 4)).astype("float32") + 1.0
NOISE = rng.normal(size=(24, 3)).astype("float32")
BATCH, STEPS, EPOCHS = 4, 6, 2


def d_loss(models, batch, training):
    """Least squares (Mao et al. 2017), which NumPy differentiates in a line."""
    real, noise = batch
    fake = models["generator"](noise, training=training)
    on_real = models["discriminator"](real, training=training)
    on_fake = models["discriminator"](fake, training=training)
    return ops.mean((on_real - 1) ** 2) + ops.mean(on_fake**2), {"seen": ops.mean(on_real)}


def g_loss(models, batch, training):
    fake = models["generator"](batch[1], training=training)
    return ops.mean((models["discriminator"](fake, training=training) - 1) ** 2)


def linear(size, units, name):
    return keras.Sequential([keras.Input((size,)), keras.layers.Dense(units)], name=name)


def arrays(model):
    return [np.array(state.host_values(v), "float64") for v in model.weights]


def by_fit(models, losses, optimizers):
    step = TrainStep(models, losses)
    step.compile(optimizers)
    return step.fit(REAL, NOISE, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


def by_loop(models, losses, optimizers):
    """What `fit` tells of the same steps."""
    step, told = kmodels.train_step(losses), []
    with kmodels.train_state(models, optimizers) as held:
        for start in (*range(0, 24, BATCH),) * 2:
            held, logs = step(held, tuple(part[start : start + BATCH] for part in (REAL, NOISE)))
            told.append({name: to_numpy(value) for name, value in logs.items()})
    rows = {name: [logs[name] for logs in told] for name in told[0]}
    return {name: np.reshape(row, (2, STEPS)).mean(1) for name, row in rows.items()}


@pytest.mark.parametrize("train", [by_fit, by_loop])
def test_each_turn_sees_what_the_one_before_changed(train):
    """A linear GAN, by hand in NumPy float64."""
    keras.utils.set_random_seed(1)
    models = {"generator": linear(3, 4, "g"), "discriminator": linear(4, 1, "d")}
    (a, b), (w, c) = (arrays(model) for model in models.values())
    rates = {"discriminator": 0.05, "generator": 0.2}
    optimizers = {name: keras.optimizers.SGD(rate) for name, rate in rates.items()}
    history = train(models, {"discriminator": d_loss, "generator": g_loss}, optimizers)
    losses = {"d": [], "g": []}
    for start in (*range(0, 24, BATCH),) * 2:
        x, z = (part[start : start + BATCH].astype("float64") for part in (REAL, NOISE))
        fake = z @ a + b
        on_real, on_fake = x @ w + c, fake @ w + c
        losses["d"].append(((on_real - 1) ** 2).mean() + (on_fake**2).mean())
        up, down = 2 * (on_real - 1) / BATCH, 2 * on_fake / BATCH
        w = w - rates["discriminator"] * (x.T @ up + fake.T @ down)
        c = c - rates["discriminator"] * (up + down).sum(0)
        on_fake = fake @ w + c
        losses["g"].append(((on_fake - 1) ** 2).mean())
        slope = 2 * (on_fake - 1) / BATCH @ w.T
        a, b = a - rates["generator"] * z.T @ slope, b - rates["generator"] * slope.sum(0)
    limit = tolerance("optimizer")
    for name, short in (("discriminator", "d"), ("generator", "g")):
        means = np.reshape(losses[short], (2, STEPS)).mean(1)
        np.testing.assert_allclose(history[f"{name}_loss"], means, rtol=0, atol=limit)
    both = np.add(history["discriminator_loss"], history["generator_loss"])
    np.testing.assert_allclose(history["loss"], both, rtol=1e-6)
    weights = [weight for model in models.values() for weight in model.weights]
    assert_equal(weights, (a, b, w, c), limit)


def test_moving_statistics_follow_in_the_turns_of_others_too():
    """As in a loop of plain torch, where a generator in training mode makes the fakes of both."""
    norm = keras.layers.BatchNormalization(momentum=0.8)
    generator = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(4)])
    models = {"generator": generator, "discriminator": linear(4, 1, "d")}
    step = TrainStep(models, {"discriminator": d_loss, "generator": g_loss})
    step.compile({name: keras.optimizers.SGD(0.1) for name in models})
    step.fit(REAL, NOISE, batch_size=BATCH, shuffle=False, verbose=0)
    mean, variance = 0.0, 1.0
    for batch in np.repeat(np.split(NOISE, STEPS), 2, axis=0):
        mean = 0.8 * mean + 0.2 * batch.mean(0)
        variance = 0.8 * variance + 0.2 * batch.var(0)
    found = norm.moving_mean, norm.moving_variance
    assert_equal(found, (mean, variance), tolerance("optimizer"))


_MADE = []


def make_gan():
    """Batch norm, dropout, noise of a generator's own; made once, since compiling takes time."""
    if not _MADE:
        keras.utils.set_random_seed(7)
        inputs = keras.Input((3,))
        x = keras.layers.Dense(8, name="first")(inputs)
        x = keras.layers.BatchNormalization(name="norm")(x)
        x = keras.layers.Dense(4, name="last")(keras.layers.ReLU()(x))
        generator = keras.Model(inputs, x)
        inputs = keras.Input((4,))
        x = keras.layers.Dense(8, activation="relu", name="first")(inputs)
        x = keras.layers.Dropout(0.2, name="drop")(x)
        discriminator = keras.Model(inputs, keras.layers.Dense(1, name="last")(x))
        noise = keras.random.SeedGenerator(5, name="noise")
        models = {"generator": generator, "discriminator": discriminator, "noise": noise}

        def with_noise(loss):
            def drawn(models, real, training):
                noise = keras.random.normal((ops.shape(real)[0], 3), seed=models["noise"])
                return loss(models, (real, noise), training)

            return drawn

        losses = {"discriminator": with_noise(d_loss), "generator": with_noise(g_loss)}
        step = TrainStep(models, losses)
        step.compile(
            {
                "discriminator": keras.optimizers.Adam(0.02, clipnorm=1.0),
                "generator": keras.optimizers.AdamW(
                    keras.optimizers.schedules.CosineDecay(0.05, 12), use_ema=True
                ),
            }
        )
        step.evaluate(REAL, batch_size=BATCH, verbose=0)
        held = [*step.variables, *step.optimizer.variables]
        _MADE.extend([step, [(v, np.array(state.host_values(v))) for v in held]])
    step, first = _MADE
    for variable, array in first:
        state.put(variable, array)
    keras.utils.set_random_seed(7)
    return step


def run(folder, stops=()):
    """Trains to the end, in as many parts as there are stops; each part is a process's worth."""
    for stop in (*stops, None):
        step = make_gan()
        callbacks = [Checkpoint(folder, every=4)]
        settings = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
        if stop is None:
            history = step.fit(REAL, callbacks=callbacks, **settings).history
            return step, history
        with pytest.raises(Killed):
            step.fit(REAL, callbacks=[*callbacks, Kill(stop)], **settings)
        callbacks[0].wait()
    raise AssertionError


def test_a_gan_stopped_within_epochs_ends_with_the_same_bits(tmp_path, backend):
    step, history = run(tmp_path / "a")
    first = dict(zip(map(id, step.variables), (v for _, v in _MADE[1]), strict=False))
    moved = {v.path: not np.array_equal(state.host_values(v), first[id(v)]) for v in step.variables}
    # Moving statistics and seeds too; on torch Keras' dropout draws from torch's own generator.
    still = {name for name, changed in moved.items() if not changed}
    assert len(still) == (backend == "torch") and all("seed" in name for name in still), still
    digest = state.weights_digest(step)
    slots = state.slots(step.optimizer)
    assert {"discriminator/iteration", "generator/iteration"} <= set(slots)
    kept = {name: np.array(state.host_values(v)) for name, v in slots.items()}
    step, again = run(tmp_path / "b", (5, 6))
    assert (state.weights_digest(step), again) == (digest, history)
    assert_equal(state.slots(step.optimizer), kept)
    # For evaluation the average takes the place of the generator's weights alone.
    manager.restore_newest(tmp_path / "b", step)
    average = state.slots(step.optimizer)["generator/first/kernel:average"]
    assert_equal(step.held["generator"].weights[:1], [average])
