"""A small run with a Checkpoint that is killed at steps of one's choice, and made again."""

import keras
import numpy as np
import pytest

import kmodels
from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import state

ROWS, BATCH, EPOCHS, STEPS = 22, 4, 3, 6
# XLA, which Keras asks for with TensorFlow, takes seconds for a step.
JIT = False if keras.backend.backend() == "tensorflow" else "auto"
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 5)).astype("float32")
Y = rng.integers(0, 3, ROWS)


class Killed(Exception):
    """What stands for kill -9 inside a test: nothing of the callbacks runs after it."""


class Kill(keras.callbacks.Callback):
    """Ends `fit` at the end of a step, counted from 1."""

    saves_itself = True

    def __init__(self, step, act=None):
        super().__init__()
        self.left, self.act = step, act

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            if self.act is None:
                raise Killed
            self.act()


def put_back(model):
    """A function that gives a model and its optimizer the values that they have now."""
    variables = [*model.variables, *model.optimizer.variables]
    first = [(variable, np.array(state.host_values(variable))) for variable in variables]

    def put():
        for variable, values in first:
            state.put(variable, values)

    return put


_MADE = {}


def make_model(**optimizer):
    """The model as a new process would make it; made once, since compiling takes the time."""
    key = str(sorted(optimizer.items()))
    if key not in _MADE:
        keras.utils.set_random_seed(7)
        keras.config.set_dtype_policy(optimizer.pop("policy", "float32"))
        scale = optimizer.pop("scale", None)
        inputs = keras.Input((5,))
        x = keras.layers.Dense(8, activation="tanh", name="first")(inputs)
        x = keras.layers.BatchNormalization(name="norm")(x)
        x = keras.layers.Dropout(0.3, name="drop")(x)
        model = keras.Model(inputs, keras.layers.Dense(3, name="second")(x))
        keras.config.set_dtype_policy("float32")
        rate = optimizer.pop("rate", 0.05)
        if rate == "cosine":
            rate = keras.optimizers.schedules.CosineDecay(0.05, STEPS * EPOCHS)
        inner = keras.optimizers.AdamW(rate, **optimizer)
        model.compile(
            keras.optimizers.LossScaleOptimizer(inner, scale, 3) if scale else inner,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=JIT,
        )
        model.optimizer.build(model.trainable_variables)
        # Otherwise the first `fit` reads a batch more than the others, to build the metrics.
        model.evaluate(X[:8], Y[:8], batch_size=BATCH, verbose=0)
        _MADE[key] = model, put_back(model)
    model, first = _MADE[key]
    first()
    keras.utils.set_random_seed(7)
    return model


def fit(model, callbacks, epochs=EPOCHS, **settings):
    return kmodels.fit(
        model, X, Y, batch_size=BATCH, epochs=epochs, validation_data=(X[:8], Y[:8]), verbose=0,
        callbacks=callbacks, **settings,
    )  # fmt: skip


def run(
    folder, stops=(), others=lambda: [], optimizer=None, epochs=EPOCHS, kind=Checkpoint, **settings
):
    """Trains to the end, in as many parts as there are stops; each part is a process's worth."""
    for stop in (*stops, None):
        model = make_model(**(optimizer or {}))
        callbacks = [kind(folder, **settings), *others()]
        if stop is None:
            return model, fit(model, callbacks, epochs), callbacks[1:]
        with pytest.raises(Killed):
            fit(model, [*callbacks, Kill(stop)], epochs)
        callbacks[0].wait()
    raise AssertionError
