"""Batches made ahead in a thread: the same batches in the same order, and nothing left behind."""

import gc
import threading

import keras
import numpy as np
import pytest

from any_data import run
from arrays import assert_equal
from kmodels.data import ArraySource, ImageLoader
from kmodels.data.pipeline import prefetch
from kmodels.data.pipeline.indexed import Numbered
from kmodels.data.pipeline.kinds import as_dataset
from kmodels.data.pipeline.pipeline import Pipeline, batches_ahead
from refusals import refused

X = np.arange(22, dtype="float32").reshape(11, 2)
Y = np.arange(11, dtype="float32")[:, None]
THREAD = "kmodels-prefetch"


def threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def counted(made, end=None, error=None):
    for number in range(10**6 if end is None else end):
        made.append(number)
        yield number
    if error is not None:
        raise error


@pytest.mark.once
def test_in_order_and_no_further_ahead_than_told():
    made = []
    ahead = prefetch.Ahead(counted(made), 3, lambda number: -number)
    for number in range(5):
        ahead.settle()
        assert len(made) == number + 3
        assert ahead.take()[0] == -number
    ahead.close()
    assert not threads()


@pytest.mark.once
def test_an_end_and_an_error_come_after_what_was_made_before():
    error = OSError("the disk is gone")
    for wanted, given in ((StopIteration, None), (OSError, error)):
        ahead = prefetch.Ahead(counted([], 2, given), 5, lambda number: number)
        assert [ahead.take()[0] for _ in range(2)] == [0, 1]
        with pytest.raises(wanted) as caught:
            ahead.take()
        assert given is None or caught.value is given
        ahead.settle()  # which ends too


@pytest.mark.once
def test_left_alone_it_ends():
    closed = threading.Event()

    def source():
        try:
            yield from counted([])
        finally:
            closed.set()

    ahead = prefetch.Ahead(source(), 1, lambda number: number)
    ahead.take()
    del ahead
    gc.collect()
    assert closed.wait(10) and not threads()


@pytest.mark.once
@pytest.mark.parametrize("works", [True, False])
def test_time_in_which_the_device_is_busy_is_no_wait(monkeypatch, works):
    """The batch comes five seconds later by the clock; a device that worked meanwhile lost none."""
    let = threading.Event()
    monkeypatch.setattr(prefetch, "perf_counter", lambda: 5.0 if let.is_set() else 0.0)

    def source():
        let.wait()
        yield 1

    def busy():
        let.set()
        return works

    if not works:
        threading.Timer(0.05, let.set).start()
        busy = None
    ahead = prefetch.Ahead(source(), 1, lambda number: number)
    assert ahead.take(busy) == (1, 0.0 if works else 5.0)


@pytest.fixture
def model():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    model.evaluate(X, Y, verbose=0)  # otherwise `fit` reads a batch more to build the loss
    return model


@pytest.fixture(params=["0", "2"])
def ahead(request, monkeypatch):
    monkeypatch.setenv("KMODELS_PREFETCH", request.param)
    return int(request.param)


class Batches:
    """Goes wrong at a batch, if told to; draws from the process's generator."""

    def __init__(self, wrong=None):
        self.wrong = wrong

    def __len__(self):
        return 3

    def __iter__(self):
        for start in (0, 4, 8):
            if start == self.wrong:
                raise OSError("cannot read image 17")
            yield X[start : start + 4] + np.random.rand(), Y[start : start + 4]


class Later(Batches):
    """Goes wrong at the first batch after so many passes."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes

    def __iter__(self):
        self.passes -= 1
        self.wrong = 0 if self.passes < 0 else None
        return super().__iter__()


@pytest.mark.each_time("0-True-3", "2-False-1", on=("jax", "tensorflow"))
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("validation", [False, True])
def test_an_error_of_the_data_arrives_as_it_was(model, ahead, epochs, validation):
    """Also at the first batch of a later epoch: Keras on JAX has taken the weights out."""
    wrong = Batches(8) if epochs == 1 else Later(1)
    x, more = (Batches(), {"validation_data": as_dataset(wrong)}) if validation else (wrong, {})
    with pytest.raises(OSError, match="cannot read image 17"):
        run(model, "fit", x, epochs=epochs, shuffle=False, verbose=0, **more)
    assert not threads()
    assert np.isfinite(model.predict(X, verbose=0)).all()


def test_training_that_is_stopped_leaves_no_thread(model, ahead):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, "fit", Batches(), shuffle=False, verbose=0, callbacks=[Stop()])
    assert not threads()


def test_random_numbers_of_the_data_are_the_same(model, monkeypatch):
    """Also where a state is read in between, as checkpoints do."""

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            prefetch.settle()
            states.append(np.random.get_state()[2])

    found, states = [], []
    first = model.get_weights()
    for count in ("0", "2", "2"):
        monkeypatch.setenv("KMODELS_PREFETCH", count)
        model.set_weights(first)
        np.random.seed(3)
        states = []
        run(model, "fit", Batches(), epochs=2, shuffle=False, verbose=0, callbacks=[Look()])
        found.append((model.get_weights(), states))
    for weights, _ in found[1:]:
        assert_equal(weights, found[0][0])
    assert found[1][1] == found[2][1]


def test_a_loader_counts_what_was_taken_and_not_what_was_made(model, ahead):
    """Two of three batches: the loader's epoch goes on once all three were taken."""
    loader = ImageLoader(ArraySource(np.zeros((6, 1, 1, 1), "uint8"), np.arange(6)), 2)
    feed = Pipeline(Numbered(loader))
    feed.start()
    batches = feed.batches()
    feed.on_epoch_begin()
    for _ in range(2):
        next(batches)
    feed.on_epoch_end()
    assert loader.epoch == 0
    feed.on_epoch_begin()
    for _ in feed.batches():
        pass
    feed.on_epoch_end()
    assert loader.epoch == 1
    feed.close()


def test_no_batch_of_a_generator_is_lost_to_building_the_model(model, ahead):
    seen = []

    def note(x, y):
        seen.append(float(y[0, 0]))
        return x, y

    once = ((X[i : i + 1], Y[i : i + 1]) for i in range(9))
    run(model, "fit", once, steps_per_epoch=3, epochs=3, shuffle=False, verbose=0, preprocess=note)
    assert seen[-9:] == list(range(9))


@pytest.mark.once
def test_settings(monkeypatch):
    monkeypatch.setenv("KMODELS_PREFETCH", "many")
    refused("KMODELS_PREFETCH is 'many'; give a number of batches", batches_ahead)
