"""Ray Datasets in `fit`: each row once, in order, resumed, and by rank."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import local_ray
from any_data import run
from kmodels.callbacks import Checkpoint
from kmodels.core.errors import InputError
from kmodels.data import as_dataset
from kmodels.data.pipeline.kinds import pipeline
from kmodels.data.pipeline.shard import BatchSharding
from kmodels.data.pipeline.stream import RayBatches
from refusals import refused

# Ray leaves a log file of each data set open, which the garbage collector finds in any later test.
pytestmark = [
    *(pytest.mark.across, pytest.mark.needs("ray")),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# What steps see of it is each backend's own; the rest is asked on one alone.
every_backend = pytest.mark.across("torch", "jax", "tensorflow")

X = np.random.default_rng(0).normal(size=(22, 2)).astype("float32")
Y = np.arange(22, dtype="float32")[:, None]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    # Ray leaves sockets and files to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with local_ray.started():
            yield


def rows(made=None):
    """Rows in three blocks, or what a function makes of them, the first block last."""
    import ray

    rows = [{"x": X[i], "label": Y[i]} for i in range(len(X))]
    found = ray.data.from_items(rows, override_num_blocks=3)
    return found if made is None else found.map_batches(made, batch_size=None)


def slow_first():
    """A function for whose first block Ray waits longest; workers cannot import this file."""

    def late(batch):
        import time

        time.sleep(0.5 if 0 in batch["label"] else 0)
        return batch

    return late


def labels(batches):
    """The labels of batches (x, y)."""
    return [np.ravel(batch[1]).tolist() for batch in batches]


IN_ORDER = [list(range(start, min(start + 4, 22))) for start in range(0, 22, 4)]


class Stop(keras.callbacks.Callback):
    """Ends a run after some of its steps."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def model():
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.Adam(0.1), "mse")
    return made


def fit(made, data, *callbacks, **given):
    """Two epochs on batches of four."""
    settings = {"batch_size": 4, "epochs": 2, "verbose": 0, "callbacks": list(callbacks)} | given
    return run(made, "fit", data, **settings)


@every_backend
@pytest.mark.parametrize("made", [None, slow_first()], ids=["made", "lazy"])
def test_rows_come_once_and_in_order(made):
    data = as_dataset(rows(made), batch_size=4)
    assert data.num_batches == (6 if made is None else None)
    assert labels(data.raw()) == labels(data.raw()) == IN_ORDER
    seen = []

    def preprocess(x, y, weight=None):
        seen.append((x, y))
        return x, y

    trained = model()
    history = fit(
        trained, rows(made), preprocess=preprocess, validation_data=rows(made), epochs=1
    ).history
    assert labels(seen[-6:]) == IN_ORDER
    assert history["val_loss"] == [pytest.approx(trained.evaluate(X, Y, verbose=0), rel=1e-5)]
    assert run(trained, "predict", rows(made), batch_size=4, verbose=0).shape == (22, 1)


def test_texts_and_arrays_of_any_shape_are_lists():
    import ray

    found = [{"image": np.ones((i + 1, 2)), "text": "a" * i, "label": i} for i in range(3)]
    ((x, y),) = RayBatches(ray.data.from_items(found), 4)
    assert [image.shape for image in x] == [(1, 2), (2, 2), (3, 2)] and y.tolist() == [0, 1, 2]
    ((columns,),) = RayBatches(ray.data.from_items([{"text": "a"}, {"text": "b"}]), 4)
    assert columns == {"text": ["a", "b"]}


@every_backend
@pytest.mark.parametrize("made", [None, slow_first()], ids=["made", "lazy"])
@pytest.mark.parametrize("steps", [3, 8])
def test_a_run_continues(made, steps, tmp_path):
    whole, first, second = model(), model(), model()
    fit(whole, rows(made))
    with pytest.raises(KeyboardInterrupt):
        fit(first, rows(made), Checkpoint(tmp_path, every=1), Stop(steps))
    # Without a warning of batches that are made again, which would be an error here.
    fit(second, rows(made), Checkpoint(tmp_path, every=1))
    for one, other in zip(whole.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_rows_do_not_continue_a_run(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(model(), rows(), Checkpoint(tmp_path, every=1), Stop(3))
    shuffled = rows().random_shuffle(seed=1)
    with pytest.raises(InputError, match=r"Ray's \w*Dataset gives other rows .*, at batch 3; give"):
        fit(model(), shuffled, Checkpoint(tmp_path, every=1))
    with pytest.raises(InputError, match=r"gives other rows .*, at batch 1; give"):
        fit(model(), rows().limit(4), Checkpoint(tmp_path, every=1))


def test_rows_by_rank():
    rules = [BatchSharding(shards=2, shard=index) for index in range(2)]
    parts = [pipeline(as_dataset(rows(slow_first()), batch_size=4), rule) for rule in rules]
    found = [labels(part.raw()) for part in parts]
    # The last batch is not full.
    assert [one + other for one, other in zip(*found, strict=True)] == IN_ORDER[:-1]


def test_iterators_of_ray_have_their_own_rows():
    """What `ray.train.get_dataset_shard` gives, which waits for the others."""
    iterators = rows().streaming_split(2, equal=True)

    def passes(iterator):
        data = as_dataset(iterator, batch_size=4)
        return [labels(data.raw()) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(passes, iterators)
    for mine, others in zip(one, other, strict=True):
        assert sorted(np.concatenate(mine + others)) == list(range(22))
        assert len(mine) == len(others) == 3


def test_what_does_not_fit_is_said():
    data = rows()
    refused("MaterializedDataset makes its own batches, so y cannot", fit, model(), data, y=Y)
    with pytest.raises(InputError, match="validation_split needs arrays, not MaterializedDataset"):
        fit(model(), data, validation_split=0.5)
    refused("the data gave no batch; give at least one", fit, model(), data.limit(0))
