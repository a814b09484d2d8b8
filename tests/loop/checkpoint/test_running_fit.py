"""What a Checkpoint knows of the `fit` it is in: told by kmodels' own, looked up in Keras' own."""

import os
import signal

import keras
import numpy as np
import pytest

from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import state
from kmodels.core import keras_internals
from kmodels.models import ViTImageClassifier
from kmodels.training import TrainStep
from stopped_runs import BATCH, EPOCHS, ROWS, STEPS, Kill, Killed, X, Y, make_model, put_back
from stopped_runs import fit as keras_fit


@pytest.fixture
def nobody_looks(monkeypatch):
    """Has a look into Keras' `fit` fail."""

    def look(callback):
        raise AssertionError("a Checkpoint in kmodels' own fit looked for it")

    monkeypatch.setattr(keras_internals, "fit_of_hook", look)


def nested(callbacks, model):
    return [callbacks[:1], tuple(callbacks[1:])]


def in_a_list_of_keras(callbacks, model):
    callbacks = [*callbacks, keras.callbacks.History()]
    return keras.callbacks.CallbackList(callbacks, model=model, epochs=EPOCHS, steps=STEPS)


@pytest.fixture(scope="module")
def task():
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(ROWS, *model.backbone.config.image_shape))
    return model, x.astype("float32")


@pytest.fixture(scope="module")
def step():
    def loss(model, batch, training):
        x, y = batch
        logits = model(x, training=training)
        found = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return keras.ops.mean(found), {}

    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(keras.layers.Dropout(0.3)(inputs))
    model = TrainStep(keras.Model(inputs, outputs), loss)
    model.compile("adam")
    # Otherwise the first `fit` reads a batch more than the others, to build the model.
    model.evaluate(X[:8], Y[:8], verbose=0)
    return model, X


def parts(model, x, folder, stops, shaped=None):
    """Weights, history and what EarlyStopping knows, after as many parts as there are stops."""
    model.optimizer.build(model.trainable_variables)
    first = put_back(model)
    for stop in (*stops, None):
        first()
        keras.utils.set_random_seed(7)
        checkpoint, early = Checkpoint(folder, every=2), keras.callbacks.EarlyStopping("loss")
        callbacks = [checkpoint, early, *([] if stop is None else [Kill(stop)])]
        settings = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
        settings["callbacks"] = callbacks if shaped is None else shaped(callbacks, model)
        if stop is None:
            history = model.fit(x, Y, **settings)
            found = state.weights_digest(model), dict(model.history.history), early.best
        else:
            with pytest.raises(Killed):
                model.fit(x, Y, **settings)
            checkpoint.wait()
        assert checkpoint.fit is None
    first()
    assert history is model.history
    return found


def test_a_task_tells_what_it_is_in(task, tmp_path, nobody_looks):
    whole = parts(*task, tmp_path / "whole", ())
    assert len(whole[1]["loss"]) == EPOCHS
    for shaped in (None, nested, in_a_list_of_keras):
        assert parts(*task, tmp_path / str(shaped), (3, 6), shaped) == whole, shaped


def test_a_train_step_tells_too(step, tmp_path, nobody_looks):
    whole = parts(*step, tmp_path / "whole", ())
    assert parts(*step, tmp_path / "cut", (3, 6)) == whole


@pytest.mark.parametrize("own", [True, False])
def test_after_an_error_signals_have_their_former_meaning(step, tmp_path, own):
    # A suite that a shell put into the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    callbacks = [Checkpoint(tmp_path), Kill(1)]
    try:
        with pytest.raises(Killed):
            if own:
                step[0].fit(step[1], Y, verbose=0, callbacks=callbacks)
            else:
                keras_fit(make_model(), callbacks)
        if own:
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fit_of_keras_is_looked_up_through_a_subclass_too(tmp_path):
    class Own(Checkpoint):
        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)

    found = []
    for stops in ((), (8,)):
        for stop in (*stops, None):
            checkpoint = Own(tmp_path / str(stops), every=4)
            callbacks = [checkpoint, *([] if stop is None else [Kill(stop)])]
            if stop is not None:
                with pytest.raises(Killed):
                    keras_fit(make_model(), callbacks)
                checkpoint.wait()
                continue
            model = make_model()
            found.append((keras_fit(model, callbacks).history, state.weights_digest(model)))
    assert found[0] == found[1]


def test_what_counts_the_steps_is_noted_before_the_first_hook():
    model, fit, seen = make_model(), keras_internals.RunningFit([]), []
    note = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.append(fit.iterator))
    with keras_internals.note_iterator(model, fit):
        keras_fit(model, [note], epochs=1)
    assert seen[0] is fit.iterator and fit.iterator.data_adapter.num_batches == STEPS
    with keras_internals.note_iterator(model, fit):
        held = dict(vars(model))
    assert vars(model).keys() < held.keys()
