"""What `fit` is given, on the backend in use; each kind of data: test_any_data."""

import keras
import numpy as np
import pytest

from any_data import run
from kmodels.data import as_dataset, order
from kmodels.data.pipeline.arrays import as_tuple, to_numpy
from refusals import refused

X = np.arange(22, dtype="float32").reshape(11, 2)
Y = np.arange(11, dtype="float32")[:, None]


def label(y_true, y_pred):
    return y_true


@pytest.fixture(scope="module")
def model():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[label], jit_compile=False)
    return model


class Batches:
    def __iter__(self):
        return ((X[at : at + 4], Y[at : at + 4]) for at in range(0, len(X), 4))

    def __len__(self):
        return 3


def test_predict_of_batches_without_labels(model):
    found = run(model, "predict", [(X[:6],), (X[6:],)], preprocess=lambda x: x, verbose=0)
    np.testing.assert_allclose(found, model.predict(X, verbose=0), rtol=1e-6)


def test_arrays_are_shuffled_alike_on_every_backend_and_anew_in_each_epoch(model):
    keras.utils.set_random_seed(6)
    seen = []

    def note(x, y):
        seen.extend(y[:, 0].astype(int).tolist())
        return x, y

    run(model, "fit", X, Y, preprocess=note, epochs=2, batch_size=4, shuffle=True, verbose=0)
    want = [*order(11, 6, 0), *order(11, 6, 1)]
    assert seen[-22:] == want and want[:11] != want[11:]


@pytest.mark.once
def test_batches_may_keep_their_samples_and_shuffle_them():
    data = as_dataset(X, Y, batch_size=4, shuffle="batch")
    found = []
    for epoch in range(2):
        data.set_epoch(epoch)
        found.append([data[number][1][:, 0].astype(int).tolist() for number in range(3)])
    in_order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for rows in found:
        assert [sorted(batch) for batch in rows] == in_order
    assert found[0] != in_order and found[0] != found[1]


def test_data_is_told_its_epoch_unless_epochs_are_parts_of_a_pass(model):
    class Told(Batches):
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    for settings, epochs in (({}, [7, 8]), ({"steps_per_epoch": 1}, [])):
        data = Told()
        run(model, "fit", data, epochs=9, initial_epoch=7, shuffle=True, verbose=0, **settings)
        assert data.epochs == epochs


def test_class_weight_reaches_a_stream(model):
    weights = dict.fromkeys(range(11), 0.0)
    history = run(model, "fit", Batches(), verbose=0, shuffle=True, class_weight=weights)
    assert history.history["loss"] == [0.0]


def test_class_weight_holds_for_one_call(model):
    data, weights = as_dataset(Batches()), dict.fromkeys(range(11), 0.0)
    run(model, "fit", data, verbose=0, shuffle=False, class_weight=weights)
    assert run(model, "evaluate", data, verbose=0, return_dict=True)["loss"] > 0


def test_validation_split_takes_the_last_part(model):
    settings = {"validation_split": 0.3, "verbose": 0, "shuffle": True, "batch_size": 4}
    history = run(model, "fit", X, Y, **settings).history
    assert history["label"] == [3.0] and history["val_label"] == [8.5]
    for message, share, *data in (
        ("validation_split needs arrays, not Batches", 0.3, Batches()),
        ("leaves a part empty", 0.99, X, Y),
    ):
        refused(message, run, model, "fit", *data, validation_split=share, shuffle=True)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Batches(), Y), "Batches makes its own batches, so y cannot be given"),
        ((Batches(), None, Y), "so sample_weight cannot be given"),
        ((object(),), "cannot train on object; give arrays"),
        (("words",), "cannot train on 'words'"),
        (({"a": X, "b": object()},), r"x\['b'\] is a object; give an array of samples for each"),
        (([],), "the data gave no batch"),
        ((X, Y[:4]), r"arrays have \[4, 11\] samples"),
        ((X[:0], Y[:0]), "the data is empty"),
    ],
)
def test_errors(arguments, message):
    refused(message, as_dataset, *arguments)


@pytest.mark.once
@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"a": X[0]}, "sample 1 of a batch has the fields a, and the first one a, b; give"),
        ({"a": X[0], "b": 1, "c": 2}, "sample 1 of a batch has the fields a, b, c, and"),
        ({"a": X[0], "b": 1, "label": 2}, "sample 1 has 2 parts, and sample 0 has 1; give each"),
        (None, "sample 1 of a batch has the fields None"),
        ((X[0], 1, 2), "sample 1 has 3 parts, and sample 0 has 1"),
    ],
)
def test_samples_of_a_batch_have_the_same_parts(second, message):
    class Samples:
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return ({"a": X[0], "b": 1}, second)[number]

    refused(message, as_dataset(Samples(), batch_size=2).__getitem__, 0)


@pytest.mark.once
def test_batches_of_strange_shape():
    refused("4 items per batch", as_tuple, (1, 2, 3, 4))
    for texts in (("a", "b"), (b"a", "b", "c")):
        refused(f"a tuple of {len(texts)} texts, which may be a batch or", as_tuple, texts)
        assert as_tuple([*texts]) == ([*texts],)
    refused("differ in size", to_numpy, [np.zeros((2, 2)), np.zeros((3, 2))])
    named = {"token_ids": X, "padding_mask": X}
    assert as_tuple(named) == (named,)


class NoBatches(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "validation"])
@pytest.mark.parametrize(
    "empty",
    [NoBatches, lambda: iter([]), lambda: lambda: iter([])],
    ids=["numbered", "once", "calls"],
)
def test_a_built_model_refuses_data_without_a_batch(model, method, empty):
    arguments, settings = (empty(),), {}
    if method == "validation":
        method, arguments, settings = "fit", (X, Y), {"validation_data": empty()}
    if method == "fit":
        settings["shuffle"] = False
    refused("the data gave no batch", run, model, method, *arguments, verbose=0, **settings)


class Numbered(keras.utils.PyDataset):
    """Batches by number, the last of them short."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(index * 4, (index + 1) * 4)
        return X[rows], Y[rows]


def test_batches_of_a_dataset_are_shuffled_as_keras_shuffles_them(model):
    """Anew in each epoch from the seed; not where `fit` is told so, nor in evaluation."""
    first = []

    def note(x, y):
        first.append(int(y[0, 0]))
        return x, y

    keras.utils.set_random_seed(6)
    settings = {"preprocess": note, "verbose": 0}
    run(model, "fit", Numbered(), epochs=3, **settings)
    orders = [[4 * int(n) for n in order(3, 6, epoch)] for epoch in range(3)]
    assert first[-9:] == [number for one in orders for number in one]
    assert len({tuple(one) for one in orders}) > 1
    run(model, "fit", Numbered(), shuffle=False, **settings)
    run(model, "evaluate", Numbered(), **settings)
    assert first[-6:] == [0, 4, 8, 0, 4, 8]
