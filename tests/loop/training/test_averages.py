"""Averages of weights under accumulation are those of a run with batches k times as large."""

import keras
import numpy as np
import pytest

import kmodels
from arrays import assert_equal, to_numpy
from kmodels import training
from tolerances import tolerance

UPDATES, SMALL, K = 7, 2, 3
rng = np.random.default_rng(1)
X = rng.normal(size=(UPDATES * K * SMALL, 4)).astype("float32")
Y = (X @ rng.normal(size=(4, 1))).astype("float32")


def tiny():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.set_weights([np.linspace(-1, 1, 4, dtype="float32")[:, None], np.zeros(1, "float32")])
    return model


def averages_of(optimizer):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [np.array(to_numpy(v)) for v in inner._model_variables_moving_average]


def assert_near(one, other, dtype="float32"):
    assert_equal(one, other, tolerance("optimizer", dtype))


@pytest.mark.parametrize(("make", "overwrite"), [(training.SGD, 2), (training.AdamW, None)])
def test_our_optimizers(make, overwrite):
    found = []
    for k in (1, K):
        model = tiny()
        optimizer = make(0.1, ema=0.8, accumulate=k, ema_overwrite_frequency=overwrite)
        model.compile(optimizer, "mse")
        model.fit(X, Y, batch_size=SMALL * K // k, shuffle=False, verbose=0)
        found.append([*averages_of(model.optimizer), *model.get_weights()])
    assert_near(*found)


def reference(rate, momentum):
    """Gradient descent on large batches with an average of the weights, in NumPy float64."""
    weight, bias = np.linspace(-1, 1, 4)[:, None], np.zeros(1)
    average = None
    for x, y in zip(np.split(X, UPDATES), np.split(Y, UPDATES), strict=True):
        error = x @ weight + bias - y
        weight = weight - rate * 2 * x.T @ error / len(x)
        bias = bias - rate * 2 * error.mean(0)
        now = [weight, bias]
        if average is None:
            average = now
        average = [momentum * a + (1 - momentum) * w for a, w in zip(average, now, strict=True)]
    return average


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_of_ones_own_with_keras_optimizers(scaled):
    settings = {"use_ema": True, "ema_momentum": 0.8, "gradient_accumulation_steps": K}
    model = tiny()

    def loss(model, batch, training):
        x, y = batch
        return keras.ops.mean(keras.ops.square(model(x, training=training) - y))

    step = kmodels.training.TrainStep(model, loss)
    optimizer = keras.optimizers.SGD(0.1, **settings)
    step.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)
    step.fit(X, Y, batch_size=SMALL, shuffle=False, verbose=0)
    assert_near(averages_of(step.optimizer), reference(0.1, 0.8))
    # Keras puts the average into the model at the end of fit.
    assert_near(model.get_weights(), reference(0.1, 0.8))


def test_a_task_with_keras_optimizers():
    pictures = rng.normal(size=(8, 8, 8, 3)).astype("float32")
    labels = rng.integers(0, 2, 8)
    backbone = kmodels.models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=1, hidden_dim=4, mlp_dim=8,
        dtype="mixed_bfloat16",
    )  # fmt: skip
    start = None
    found = []
    for k in (1, 2):
        model = kmodels.models.ViTImageClassifier(backbone, num_classes=2)
        start = start or model.get_weights()
        model.set_weights(start)
        optimizer = keras.optimizers.SGD(
            0.1, use_ema=True, ema_momentum=0.8, gradient_accumulation_steps=k if k > 1 else None
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        model.fit(pictures, labels, batch_size=4 // k, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert_near(*found, "bfloat16")
