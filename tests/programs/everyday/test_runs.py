"""Programs that train for a while: what they save, how they stop, and how they continue."""

import csv
import gc
import weakref

import keras
import numpy as np
import pytest

import kmodels
from kmodels.models import ViTImageClassifier

X = np.random.default_rng(0).random((24, 16, 16, 3), "float32")
Y = np.arange(24) % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier():
    return ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=3)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_best_weights_and_a_table_of_the_epochs(adapted, tmp_path):
    model = classifier()
    if adapted:
        model.enable_lora(rank=2)
    model.compile(keras.optimizers.Adam(1e-3), LOSS, metrics=["accuracy"])
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="val_loss", save_best_only=True
    )
    table = keras.callbacks.CSVLogger(tmp_path / "epochs.csv")
    fit = model.fit(X, Y, 8, epochs=4, validation_data=(X, Y), callbacks=[best, table], verbose=0)
    rows = list(csv.DictReader((tmp_path / "epochs.csv").read_text().splitlines()))
    np.testing.assert_allclose(
        [float(row["val_loss"]) for row in rows], fit.history["val_loss"], rtol=1e-6
    )
    again = keras.saving.load_model(tmp_path / "best.keras")
    found = again.evaluate(X, Y, verbose=0)[0]
    assert found == pytest.approx(min(fit.history["val_loss"]), rel=1e-5)


@pytest.mark.each_backend("nightly")
def test_keras_own_backup_goes_on_after_a_crash(tmp_path):
    def train(crash=None):
        keras.utils.set_random_seed(0)
        model = classifier()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), LOSS)
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path / "backup")]
        if crash is not None:
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=crash))
        model.fit(X, Y, 8, epochs=4, shuffle=False, callbacks=callbacks, verbose=0)
        return model

    def crash(epoch, logs=None):
        if epoch == 2:
            raise ConnectionError("the machine is gone")

    whole = train()
    with pytest.raises(ConnectionError):
        train(crash)
    for one, other in zip(train().get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_learning_rate_follows_a_function_and_a_callback_reads_the_logs():
    class Seen(keras.callbacks.Callback):
        losses = ()
        rates = ()

        def on_train_batch_end(self, batch, logs=None):
            self.losses += (float(logs["loss"]),)

        def on_epoch_end(self, epoch, logs=None):
            self.rates += (float(self.model.optimizer.learning_rate),)

    seen = Seen()
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / 2**epoch)
    model = classifier()
    model.compile(keras.optimizers.SGD(1.0), LOSS)
    history = model.fit(X, Y, 8, epochs=3, callbacks=[halved, seen], verbose=0).history
    np.testing.assert_allclose(seen.rates, [0.1, 0.05, 0.025], rtol=1e-6)
    assert len(seen.losses) == 9
    np.testing.assert_allclose(seen.losses[2::3], history["loss"], rtol=1e-6)


def test_rare_classes_weigh_more():
    keras.utils.set_random_seed(0)
    model = classifier()
    model.compile(keras.optimizers.SGD(0.0), LOSS)
    weights = {0: 1.0, 1: 2.0, 2: 5.0}
    loss = model.fit(X, Y, 24, class_weight=weights, verbose=0).history["loss"][0]
    logits = model.predict(X, verbose=0).astype("float64")
    each = np.log(np.exp(logits).sum(-1)) - logits[np.arange(24), Y]
    wanted = (each * np.array([weights[label] for label in Y])).mean()
    assert loss == pytest.approx(wanted, rel=1e-5)


def cell(folder, epochs, name=None):
    """Builds and trains a model of Keras alone, as a cell of a notebook does."""
    keras.utils.set_random_seed(0)
    inside = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.2)])
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, "relu", name=name), inside]
    model = keras.Sequential([keras.Input((16, 16, 3)), *layers, keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    checkpoint = kmodels.callbacks.Checkpoint(folder)
    model.fit(X, Y, 8, epochs=epochs, callbacks=[checkpoint], verbose=0)
    return model


def test_a_cell_of_a_notebook_is_run_again_and_goes_on(tmp_path):
    whole = cell(tmp_path / "whole", 4)
    first = cell(tmp_path / "run", 2)
    second = cell(tmp_path / "run", 4)
    assert first.layers[1].name != second.layers[1].name
    for one, other in zip(second.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(kmodels.InputError, match="belongs to another model or optimizer"):
        cell(tmp_path / "run", 6, name="hidden")


def classify():
    model = classifier()
    model.compile(keras.optimizers.Adam(1e-3), LOSS, metrics=["accuracy"])
    model.fit(X[:8], Y[:8], verbose=0)
    model.predict(X[:8], verbose=0)
    return model


def write():
    model = kmodels.models.GemmaCausalLM.from_preset("gemma_debug", num_layers=1, preprocessor=None)
    ids = np.random.default_rng(0).integers(3, 100, (2, 6)).astype("int32")
    prompts = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    model.fit(prompts, np.roll(ids, -1, 1), verbose=0)
    model.generate(prompts, max_length=8, stop_token_ids=None)
    return model


@pytest.mark.parametrize("build", [classify, write])
def test_a_cell_that_is_run_again_lets_go_of_its_first_model(build):
    model = build()
    first = weakref.ref(model), weakref.ref(model.backbone), weakref.ref(model.optimizer)
    weight = weakref.ref(model.trainable_variables[0])
    del model
    model = build()
    gc.collect()
    assert model.built
    assert [kept() for kept in (*first, weight)] == [None] * 4


def test_swap_two_adapters(tmp_path):
    results = {}
    keras.utils.set_random_seed(0)
    model = classifier()
    model.enable_lora(rank=4, targets="all-linear")
    model.get_layer("logits").trainable = False
    model.compile(keras.optimizers.Adam(1e-2), LOSS)
    for name, labels in (("plain", Y), ("swapped", 2 - Y)):
        model.fit(X, labels, 8, epochs=3, verbose=0)
        model.save_adapter(tmp_path / name)
        results[name] = model.predict(X, verbose=0)
    assert np.abs(results["plain"] - results["swapped"]).max() > 0.01

    keras.utils.set_random_seed(0)
    model = classifier()
    for name in ("plain", "swapped", "plain"):
        model.load_adapter(tmp_path / name)
        np.testing.assert_allclose(model.predict(X, verbose=0), results[name], atol=1e-5)
