"""Signals of the process that waits for a run, and how its workers hear of them; without Ray."""

import os
import signal
import threading
import time

import keras
import numpy as np
import pytest

import kmodels
from kmodels.checkpoint import manager
from kmodels.checkpoint.preemption import Interrupted
from kmodels.distribution.ray import stopping


class Store:
    """What Ray's store of a cluster is, in this process."""

    def __init__(self):
        self.held = {}

    def _internal_kv_put(self, key, value, namespace):
        self.held[namespace, key] = value

    def _internal_kv_get(self, key, namespace):
        return self.held.get((namespace, key))

    def _internal_kv_del(self, key, namespace):
        self.held.pop((namespace, key), None)


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(stopping, "_store", lambda: found)
    monkeypatch.setattr(stopping, "_SECONDS", 0.01)
    return found


def test_the_first_signal_is_told_and_the_second_ends_the_wait(store, capsys):
    begun = signal.getsignal(signal.SIGINT)
    over = threading.Event()

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        while not store.held:
            time.sleep(0.01)
        found = list(store.held.values())
        return found if over.is_set() else [*found, os.kill(os.getpid(), signal.SIGTERM)]

    with pytest.raises(Interrupted, match="ended at once by signal 15; its newest checkpoint"):
        stopping.wait(lambda: [work(), time.sleep(5)], "a")
    over.set()
    assert stopping.wait(work, "b") == ["2"]
    assert store.held == {}
    assert signal.getsignal(signal.SIGINT) is begun
    assert capsys.readouterr().err.count("the run saves and stops; once more ends it at once") == 2


def test_an_error_of_the_work_comes_through(store):
    def work():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        stopping.wait(work, "a")


def test_a_worker_stops_by_a_signal_that_was_told(store, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    checkpoint = kmodels.callbacks.Checkpoint(tmp_path)

    def tell(batch, logs):
        store._internal_kv_put("a", "15", namespace="kmodels")
        time.sleep(0.05)

    told = keras.callbacks.LambdaCallback(on_train_batch_end=tell)
    x, fit = np.ones((8, 2)), {"batch_size": 2, "epochs": 200, "verbose": 0}
    with stopping.listening("a"), pytest.raises(Interrupted, match="by signal 15"):
        model.fit(x, x[:, :1], callbacks=[checkpoint, told], **fit)
    assert 1 <= manager.newest(tmp_path)[1].step == checkpoint.step < 800
    model.fit(x, x[:, :1], batch_size=2, epochs=1, verbose=0)
