"""Programs that train for a while: what they save, how they stop, and how they continue."""

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
