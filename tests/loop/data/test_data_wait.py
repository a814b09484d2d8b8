"""How long steps wait for data, and what is said about it."""

import itertools
import time

import keras
import numpy as np
import pytest

from any_data import run
from kmodels.data.pipeline import pipeline
from kmodels.data.pipeline.pipeline import DataWaitTimer, workers_of


class Time:
    def __init__(self, monkeypatch, cores):
        self.now = self.cpu = 100.0
        monkeypatch.setattr(pipeline, "perf_counter", lambda: self.now)
        monkeypatch.setattr(pipeline.time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(pipeline.environment, "cores", lambda: cores)

    def epoch(self, clock, waits, step, making_cpu=0.0):
        """Each wait in front of a step that keeps one core busy."""
        clock.begin_epoch()
        for seconds in waits:
            self.now += seconds
            self.cpu += making_cpu
            clock.made(seconds, making_cpu)
            clock.waits(seconds)
            self.now += step
            self.cpu += step
        clock.end_epoch()
        return clock.line()


SLOW = [0.1] * 20


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "cores", "waits", "making_cpu", "said"),
    [
        # 100 ms to make a batch beside a step of 50 ms: two workers keep up with it.
        ((), 4, SLOW, 0.1, "waited for data 67% of the epoch (100.0 of 150.0 ms a batch): a loader "
         "with 2 workers would end that"),
        ((0, "num_workers"), 4, SLOW, 0.1, ": num_workers=2 would end that"),
        # One core for the step, and two for the batches.
        ((0, "workers"), 2, SLOW, 0.1, ": workers=2 would leave 33%, and 2 cores have no room"),
        ((0, "workers"), 1, SLOW, 0.1, "no number of workers ends that, since 1 cores have no room "
         "beside the step for 100.0 ms a batch; make batches cheaper"),
        # A disk or a network that makes nobody compute.
        ((0, "workers"), 1, SLOW, 0.0, ": workers=2 would end that"),
        # Three workers are busy all the time: a batch takes them 3 x 150 ms.
        ((3, "workers"), 16, SLOW, 0.0, ": workers=9 would end that"),
        ((1, "workers"), 2, SLOW, 0.0, ": workers=3 would end that, unless they compute: there are "
         "2 cores"),
        ((2, "workers"), 16, [3.0] + [0.001] * 19, 0.0, "nearly all of it before the first batch"),
        ((0, None, "cache it"), 4, SLOW, 0.1, "ms a batch): cache it"),
        ((), 4, [0.002] * 20, 0.002, None),
    ],
)  # fmt: skip
def test_the_line(monkeypatch, settings, cores, waits, making_cpu, said):
    timer = DataWaitTimer(*settings)
    line = Time(monkeypatch, cores).epoch(timer, waits, 0.05, making_cpu)
    assert line is None if said is None else said in line


@pytest.mark.once
def test_the_share_of_a_run(monkeypatch):
    clock, turned = DataWaitTimer(), Time(monkeypatch, 4)
    assert clock.share == 0.0
    turned.epoch(clock, [0.1] * 5, 0.1)
    turned.epoch(clock, [0.0] * 5, 0.1)
    assert clock.share == pytest.approx(1 / 3)


def slow():
    for _ in range(8):
        time.sleep(0.05)
        yield np.ones((2, 2), "float32"), np.ones((2, 1), "float32")


def tf_data():
    """A pipeline that TensorFlow goes through by itself under its own backend."""
    import tensorflow as tf

    spec = tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(slow, output_signature=spec)


KINDS = {"generator": (lambda: slow, "worker")}
if keras.backend.backend() == "tensorflow":
    KINDS["tf.data"] = tf_data, "num_parallel_calls=tf.data.AUTOTUNE"


@pytest.mark.each_time("generator", on=("jax", "tensorflow"))
@pytest.mark.parametrize("kind", KINDS)
def test_slow_data_is_told_after_the_epoch(capsys, kind):
    make, advice = KINDS[kind]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    run(model, "fit", make(), epochs=2, shuffle=True, verbose=2)
    said = capsys.readouterr().out.splitlines()
    waited = [line for line in said if line.startswith("waited for data ")]
    assert len(waited) == 2 and advice in waited[1]
    # Each stands below the line of its epoch.
    assert said.index(waited[0]) < said.index("Epoch 2/2")
    run(model, "fit", make(), shuffle=True, verbose=0)
    assert not capsys.readouterr().out


@pytest.mark.once
def test_the_workers_of_data():
    class Loader(keras.utils.PyDataset):
        num_workers = 3

    assert workers_of(Loader()) == (3, "num_workers")
    assert workers_of(keras.utils.PyDataset(workers=2, use_multiprocessing=True)) == (2, "workers")
    assert workers_of(itertools.count()) == (0, None)
