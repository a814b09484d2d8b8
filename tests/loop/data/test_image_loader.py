"""ImageLoader inside `fit`: every sample once, a new order each epoch, workers, resuming."""

import pickle

import keras
import numpy as np
import pytest

from forked_python import quick_python
from kmodels.core.errors import InputError
from kmodels.data import ArraySource, Augment, ImageLoader, order
from python_process import run_python
from refusals import refused

COUNT = 11
IMAGES = np.arange(COUNT * 12, dtype="uint8").reshape(COUNT, 4, 3, 1)
LABELS = np.arange(COUNT) % 3
BLEND = Augment(flip=True, rand_augment=(1, 5), mixup=0.5, num_classes=3)


class Recording(ArraySource):
    def __init__(self):
        super().__init__(IMAGES, LABELS)
        self.seen = []

    def batch(self, indices):
        self.seen += indices.tolist()
        return super().batch(indices)


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((4, 3, 1))
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    return model


def wanted(epochs, seed=3):
    return [sample for epoch in epochs for sample in order(COUNT, seed, epoch).tolist()]


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("told", [False, True])
def test_fit_sees_every_sample_in_the_order_of_the_epoch(model, first, told):
    """That of the loader, or, where a callback sets it, that of `fit`."""
    source = Recording()
    loader = ImageLoader(source, 4, shuffle=True, seed=3)
    settings = {"shuffle": False, "verbose": 0}
    if told:
        tell = keras.callbacks.LambdaCallback(on_epoch_begin=lambda n, _: loader.set_epoch(n))
        settings |= {"callbacks": [tell], "initial_epoch": first}
    else:
        loader.set_epoch(first)
    model.fit(loader, epochs=3 + first * told, **settings)
    # Keras reads a batch or two before it trains, to learn their shapes.
    assert source.seen[-3 * COUNT :] == wanted(range(first, first + 3))


@pytest.mark.once
def test_the_last_batch():
    source = ArraySource(IMAGES, LABELS)
    for drop_last, sizes in ((False, [4, 4, 3]), (True, [4, 4])):
        assert [len(x) for x, _ in ImageLoader(source, 4, drop_last=drop_last)] == sizes
    with pytest.raises(IndexError, match="batch 3 of 3"):
        ImageLoader(source, 4)[3]
    refused("skip is 3; give 0 to 2", ImageLoader(source, 4).set_epoch, 0, skip=3)


def test_workers_give_the_same_batches():
    source = ArraySource(IMAGES, LABELS)
    settings = {"shuffle": True, "seed": 5, "augment": BLEND}
    alone, helped = (ImageLoader(source, 4, workers=n, **settings) for n in (0, 2))
    for epoch in (0, 1):
        for loader in (alone, helped):
            loader.set_epoch(epoch)
        for (x, y), (other_x, other_y) in zip(alone, helped, strict=True):
            np.testing.assert_array_equal(x, other_x)
            np.testing.assert_array_equal(y, other_y)
            other_x += 1  # writable, as arrays usually are
    np.testing.assert_array_equal(alone[2][0], helped[2][0])  # a jump
    copy = pickle.loads(pickle.dumps(helped))
    np.testing.assert_array_equal(copy[1][0], alone[1][0])
    for loader in (copy, helped):
        loader.close()
    assert helped._pool is None


@pytest.mark.once
def test_workers_need_no_main_guard_and_no_framework(tmp_path):
    """A plain script: with spawn or forkserver, each worker would run it again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings; warnings.simplefilter('error')\n"
        "import numpy as np\n"
        "from kmodels.data import ArraySource, ImageLoader\n"
        "print('once')\n"
        "source = ArraySource(np.zeros((4, 2, 2, 1), 'uint8'), np.zeros(4, int))\n"
        "loader = ImageLoader(source, 2, workers=1)\n"
        "print(len(list(loader)))\n"
    )
    done = run_python(script, python=quick_python())
    assert done.stdout.split() == ["once", "2"], done.stderr


@pytest.mark.once
def test_errors_of_workers_arrive():
    class Local(ArraySource):
        pass

    local = ImageLoader(Local(IMAGES, LABELS), 4, workers=1)
    refused("cannot be sent to workers", local.__getitem__, 0)
    loader = ImageLoader(ArraySource(IMAGES, LABELS), 4, workers=1, mean=(0.1, 0.2))
    refused("mean has 2", loader.__getitem__, 0)
    loader.close()
    loader = ImageLoader(ArraySource(IMAGES, LABELS), 4, workers=1)
    loader[0]
    for process in loader._pool._processes:
        process.kill()
    with pytest.raises(InputError, match="a data worker was killed by SIGKILL"):
        loader[2]  # the worker may have made batch 1 ahead
    loader.close()
    refused("workers is -1", ImageLoader, ArraySource(IMAGES, LABELS), 4, workers=-1)
