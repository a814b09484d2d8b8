"""What `fit` is given, on the backend in use; other frameworks' loaders: test_adapters_across."""

import keras
import numpy as np
import pytest

from any_data import arguments
from kmodels.core.errors import InputError
from kmodels.data import ArraySource, ImageLoader, as_dataset, order
from kmodels.data.fit.batches import as_tuple, to_numpy
from kmodels.data.fit.run import FollowEpoch
from kmodels.data.fit.stream import OneShot

X = np.arange(22, dtype="float32").reshape(11, 2)
Y = np.arange(11, dtype="float32")[:, None]


class Total(keras.metrics.Metric):
    """Sum of labels, and of their squares: tells lost and repeated samples."""

    def __init__(self, name="total", power=1):
        super().__init__(name=name)
        self.power = power
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32") ** self.power))

    def result(self):
        return self.total + 0.0


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=[Total(), Total("squares", 2)], jit_compile=False)
    model.optimizer.learning_rate = 0.0
    return model


class Batches:
    """An iterable of batches that is no iterator."""

    def __init__(self, size=4, kind=tuple, sized=True):
        self.batches = [
            kind((X[at : at + size], Y[at : at + size])) for at in range(0, len(X), size)
        ]
        if sized:
            self.__class__ = SizedBatches

    def __iter__(self):
        return iter(self.batches)


class SizedBatches(Batches):
    def __len__(self):
        return len(self.batches)


class Samples:
    """Numbered samples, as a torch Dataset: no __iter__."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


class Python(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def as_dict(pair):
    return {"image": pair[0], "label": pair[1]}


GIVEN = {
    "arrays": lambda: (X, Y),
    "tensors": lambda: (keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y)),
    "iterable": lambda: (Batches(), None),
    "lists": lambda: (Batches(kind=list), None),
    "dictionaries": lambda: (Batches(kind=as_dict), None),
    "list of batches": lambda: (Batches().batches, None),
    "samples": lambda: (Samples(), None),
    "PyDataset": lambda: (Python(), None),
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("preprocess", [None, lambda x, y=None: (x, y)])
def test_each_epoch_sees_every_sample_once(model, kind, preprocess):
    x, y = GIVEN[kind]()
    held_out = (X, Y) if y is not None else GIVEN[kind]()[0]
    told = arguments(
        "fit", x, y, preprocess=preprocess, epochs=2, batch_size=4, verbose=0, shuffle=True,
        validation_data=held_out,
    )  # fmt: skip
    history = model.fit(**told).history
    for name in ("total", "val_total"):
        assert history[name] == [55.0, 55.0], name
    for name in ("squares", "val_squares"):
        assert history[name] == [385.0, 385.0], name
    logs = model.evaluate(**arguments("evaluate", x, y, verbose=0, return_dict=True))
    assert logs["total"] == 55.0


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_stream_of_unknown_length(model):
    history = model.fit(**arguments("fit", Batches(sized=False), epochs=2, verbose=0, shuffle=True))
    assert history.history["total"] == [55.0, 55.0]


def test_no_batch_of_a_generator_is_lost_or_repeated(model):
    endless = (Batches().batches[i % 3] for i in range(10**6))
    told = arguments("fit", endless, epochs=2, steps_per_epoch=3, verbose=0, shuffle=True)
    assert model.fit(**told).history["squares"] == [385.0, 385.0]


def test_a_used_up_generator_says_so():
    once = OneShot(iter([1, 2, 3]))
    assert next(iter(once)) == 1  # Keras builds the model
    once.begin()
    assert list(once) == [1, 2, 3]
    with pytest.raises(InputError, match="the generator is used up; give steps_per_epoch"):
        list(once)


def test_predict(model):
    want = model.predict(X, verbose=0)
    for given in (X, [(X[:6],), (X[6:],)], (X[i : i + 4] for i in (0, 4, 8))):
        told = arguments("predict", given, preprocess=lambda x: x, batch_size=4, verbose=0)
        if not isinstance(given, np.ndarray | list):
            told["steps"] = 3
        np.testing.assert_allclose(model.predict(**told), want, rtol=1e-6)


def test_arrays_are_shuffled_alike_on_every_backend_and_anew_in_each_epoch(model):
    keras.utils.set_random_seed(6)
    seen = []

    def note(x, y):
        seen.extend(y[:, 0].astype(int).tolist())
        return x, y

    told = arguments("fit", X, Y, preprocess=note, epochs=2, batch_size=4, shuffle=True, verbose=0)
    model.fit(**told)
    want = [*order(11, 6, 0), *order(11, 6, 1)]
    assert seen[-22:] == want and want[:11] != want[11:]


def test_follow_epoch_starts_where_training_starts(model):
    source = ArraySource(np.zeros((4, 2), "uint8")[..., None, None], np.zeros(4))
    loader = ImageLoader(source, 2)
    follow = arguments("fit", loader, epochs=9, shuffle=True)["callbacks"][-1]
    assert isinstance(follow, FollowEpoch)
    follow.on_epoch_begin(7)
    assert loader.epoch == 7
    FollowEpoch(loader, steps_per_epoch=5).on_epoch_begin(9)
    assert loader.epoch == 7


def test_class_weight_reaches_a_stream(model):
    told = arguments(
        "fit",
        Batches(),
        epochs=1,
        verbose=0,
        shuffle=True,
        class_weight=dict.fromkeys(range(11), 0.0),
    )
    assert model.fit(**told).history["loss"] == [0.0]


def test_validation_split_takes_the_last_part(model):
    told = arguments("fit", X, Y, validation_split=0.3, verbose=0, shuffle=True, batch_size=4)
    history = model.fit(**told).history
    assert history["total"] == [21.0] and history["val_total"] == [34.0]
    with pytest.raises(InputError, match="validation_split needs arrays, not SizedBatches"):
        arguments("fit", Batches(), validation_split=0.3, shuffle=True)
    with pytest.raises(InputError, match="leaves a part empty"):
        arguments("fit", X, Y, validation_split=0.99, shuffle=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Batches(), Y), "SizedBatches makes its own batches, so y cannot be given"),
        ((Batches(), None, Y), "so sample_weight cannot be given"),
        ((object(),), "cannot train on object; give arrays"),
        (("words",), "cannot train on 'words'"),
        (([],), "the data gave no batch"),
        ((X, Y[:4]), r"arrays have \[4, 11\] samples"),
        ((X[:0], Y[:0]), "the data is empty"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(InputError, match=message):
        as_dataset(*arguments)


def test_batches_of_strange_shape():
    with pytest.raises(InputError, match="4 items per batch"):
        as_tuple((1, 2, 3, 4))
    with pytest.raises(InputError, match="differ in size"):
        to_numpy([np.zeros((2, 2)), np.zeros((3, 2))])
    named = {"token_ids": X, "padding_mask": X}
    assert as_tuple(named) == (named,)
