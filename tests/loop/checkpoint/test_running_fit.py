"""What a Checkpoint knows of the `fit` it is in: all in that of kmodels, little in Keras' own."""

import os
import signal

import keras
import numpy as np
import pytest

from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import state
from pool import pool
from stopped_runs import BATCH, EPOCHS, ROWS, STEPS, Kill, Killed, X, Y, make_model, put_back

IMAGES = np.random.default_rng(0).normal(size=(ROWS, 16, 16, 3)).astype("float32")


def nested(callbacks, model):
    return [callbacks[:1], tuple(callbacks[1:])]


def in_a_list_of_keras(callbacks, model):
    callbacks = [*callbacks, keras.callbacks.History()]
    return keras.callbacks.CallbackList(callbacks, model=model, epochs=EPOCHS, steps=STEPS)


@pytest.fixture
def task():
    with pool("vit_debug", num_classes=3, num_layers=1) as model:
        yield model


def parts(model, folder, stops, shaped=None):
    """Weights, history and what EarlyStopping knows, after as many parts as there are stops."""
    first = put_back(model)
    for stop in (*stops, None):
        first()
        keras.utils.set_random_seed(7)
        checkpoint, early = Checkpoint(folder, every=2), keras.callbacks.EarlyStopping("loss")
        callbacks = [checkpoint, early, *([] if stop is None else [Kill(stop)])]
        settings = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
        settings["callbacks"] = callbacks if shaped is None else shaped(callbacks, model)
        if stop is None:
            history = model.fit(IMAGES, Y, **settings)
            found = state.weights_digest(model), dict(model.history.history), early.best
        else:
            with pytest.raises(Killed):
                model.fit(IMAGES, Y, **settings)
            checkpoint.wait()
        assert checkpoint.fit is None
    first()
    assert history is model.history
    return found


def test_a_task_tells_what_it_is_in(task, tmp_path):
    whole = parts(task, tmp_path / "whole", ())
    assert len(whole[1]["loss"]) == EPOCHS
    for shaped, stops in ((None, (3, 6)), (nested, (3,)), (in_a_list_of_keras, (3,))):
        assert parts(task, tmp_path / str(shaped), stops, shaped) == whole, shaped


@pytest.mark.parametrize("own", [True, False])
def test_after_an_error_signals_have_their_former_meaning(task, tmp_path, own):
    # A suite that a shell put into the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    callbacks = [Checkpoint(tmp_path), Kill(1)]
    try:
        with pytest.raises(Killed):
            if own:
                task.fit(IMAGES, Y, verbose=0, callbacks=callbacks)
            else:
                make_model().fit(X, Y, verbose=0, callbacks=callbacks)
        if own:
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.each_time("2", on=("jax", "tensorflow"))
@pytest.mark.parametrize("every", [None, 2])
def test_keras_own_fit_goes_on_at_an_epoch(every, tmp_path, capsys):
    """Exactly where an epoch ends; a cut epoch begins again, with the weights that it had."""

    def fit(model, callbacks):
        settings = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, "callbacks": callbacks}
        return model.fit(X, Y, shuffle=False, **settings)

    model = make_model()
    fit(model, [Checkpoint(tmp_path / "whole")])
    whole = state.weights_digest(model)
    with pytest.raises(Killed):
        fit(make_model(), [cut := Checkpoint(tmp_path / "cut", every=every), Kill(STEPS + 3)])
    cut.wait()
    seen, model = [], make_model()
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    fit(model, [note, checkpoint := Checkpoint(tmp_path / "cut", every=every)])
    assert seen == [1, 2] and checkpoint.epoch == EPOCHS
    said = " ".join(capsys.readouterr().out.split())
    assert "kmodels.fit(model, ...) continues at the next batch" in said
    assert ("epoch 2 begins again" in said) == (every is not None)
    assert (state.weights_digest(model) == whole) == (every is None)


def test_runs_that_errors_ended_leave_one_handler(tmp_path):
    """Each would hold its model, and call the one before it until Python's stack is full."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model = make_model()
        for i in range(3):
            with pytest.raises(Killed):
                callbacks = [Checkpoint(tmp_path / str(i)), Kill(2)]
                keras.Model.fit(model, X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks)
        left = signal.getsignal(signal.SIGINT).__self__
        assert left._former[signal.SIGINT] is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, left._note)  # as code that knew it puts it back
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
