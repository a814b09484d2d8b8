"""Batches of one size whose epoch loss is the mean over tokens, resumable within an epoch."""

import keras
import numpy as np
import pytest

import kmodels
from kmodels.text import Example, RecordLoader, TextLoader, pack, pad
from refusals import refused


def examples(count=7, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 9, count)
    return [Example(rng.integers(3, 50, n).tolist(), [False] * 2 + [True] * (n - 2)) for n in sizes]


def weights_of(loader):
    return np.concatenate([loader[i][2] for i in range(len(loader))])


@pytest.mark.once
@pytest.mark.parametrize("make", [pad, pack])
def test_the_mean_over_all_positions_is_the_mean_over_tokens(make):
    loader = TextLoader(make(examples(), 8, 0), 3)
    x, labels, weights = loader[len(loader) - 1]
    assert labels.shape == weights.shape == x["token_ids"].shape == (3, 8)
    weights = weights_of(loader)
    assert weights.mean() == pytest.approx(1.0)
    assert np.count_nonzero(weights) == loader.tokens == sum(len(e.ids) - 2 for e in examples())


def test_evaluation_gives_the_loss_per_token_packed_or_not():
    table = np.random.default_rng(1).normal(size=(50, 50)).astype("float32")
    tokens = keras.Input((None,), dtype="int32", name="token_ids")
    layer = keras.layers.Embedding(50, 50)
    model = keras.Model({"token_ids": tokens}, layer(tokens))
    layer.set_weights([table])
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
    )
    shares = table - np.log(np.exp(table).sum(-1, keepdims=True))
    expected = -np.mean(
        [shares[e.ids[i - 1], e.ids[i]] for e in examples() for i in range(2, len(e.ids))]
    )
    for make in (pad, pack):
        x, labels, weights = make(examples(), 8, 0)
        x = {"token_ids": x["token_ids"]}
        loss = model.evaluate(TextLoader((x, labels, weights), 4), verbose=0)
        assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.once
def test_an_epoch_has_each_row_once_in_an_order_of_seed_and_epoch():
    rows = pad(examples(), 8, 0)
    rows[0]["row"] = np.arange(7)

    def order(loader):
        batches = [loader[i] for i in range(len(loader))]
        real = [x["row"][weights.any(-1)] for x, _, weights in batches]
        return np.concatenate(real).tolist()

    loader = TextLoader(rows, 3, shuffle=True, seed=5)
    first = order(loader)
    loader.set_epoch(1)
    second = order(loader)
    assert sorted(first) == sorted(second) == list(range(7)) and first != second
    loader.set_epoch(1, 2)
    assert len(loader) == loader.num_batches == 1 and order(loader) == second[6:]
    loader.set_epoch(1)  # the same epoch: as before
    assert len(loader) == 1
    loader.set_epoch(2)
    assert len(loader) == 3
    third, again = order(loader), TextLoader(rows, 3, shuffle=True, seed=5)
    again.load_state_dict({"epoch": 2, "batch": 1})
    assert order(again) == third[3:]
    assert loader.state_dict() == again.state_dict() == {"epoch": 2, "batch": 3}
    again.load_state_dict(loader.state_dict())  # of an epoch that has ended
    assert (again.epoch, len(again)) == (3, 3)
    assert order(TextLoader(rows, 3, shuffle=True, seed=5)) == first


@pytest.mark.parametrize("own", [False, True])
def test_a_plain_model_gets_a_new_order_in_each_epoch(own):
    rows = pad(examples(), 8, 0)
    loader = TextLoader(({"token_ids": rows[0]["token_ids"]}, *rows[1:]), 3, shuffle=True, seed=5)
    epochs = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(loader.epoch)
    )
    tokens = keras.Input((None,), dtype="int32", name="token_ids")
    model = keras.Model({"token_ids": tokens}, keras.layers.Embedding(50, 50)(tokens))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit = kmodels.fit if own else keras.Model.fit
    fit(model, loader, epochs=3, callbacks=[note], verbose=0)
    # Keras' own may read a short epoch before training, for its shapes.
    assert np.diff(epochs).tolist() == [1, 1]


X, LABELS, WEIGHTS = pad(examples(), 8, 0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((X, LABELS), r"rows are a tuple; give \(inputs by name, labels, weights\)"),
        (X, "rows are a dict; give"),
        ((X["token_ids"], LABELS, WEIGHTS), "rows are a tuple; give"),
        ((X, LABELS[:5], WEIGHTS), r"labels \(5, 8\), weights \(7, 8\); give as many"),
        ((X, LABELS[:5], WEIGHTS[:5]), r"token_ids \(7, 8\), .*labels \(5, 8\)"),
        ((X, LABELS, WEIGHTS[:, 0]), r"weights \(7,\); give as many, and a weight per label"),
        ((X, LABELS, -WEIGHTS), r"weights that are negative or not finite"),
        ((X, LABELS, WEIGHTS * np.nan), r"weights that are negative or not finite"),
    ],
)
def test_rows_that_do_not_fit(rows, message):
    refused(message, TextLoader, rows, 3)


@pytest.mark.once
def test_columns_are_no_records():
    columns = {"prompts": ["a"], "responses": ["b"]}
    refused(r"records are columns \(prompts, responses\)", RecordLoader, columns, print, 3)


@pytest.mark.once
def test_nothing_to_learn_and_wrong_numbers():
    x, labels, weights = pad(examples(), 8, 0)
    refused("the data is empty", TextLoader, (x, labels, weights * 0), 3)
    loader = TextLoader((x, labels, weights), 3)
    refused("skip is 3; give 0 to 2 batches", loader.set_epoch, 0, 3)
    with pytest.raises(IndexError, match="batch 3 of 3"):
        loader[3]
