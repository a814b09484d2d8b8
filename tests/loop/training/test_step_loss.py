"""The losses by step are those of the steps, not Keras' running averages."""

import keras
import numpy as np

from kmodels.training import AdamW, StepCallbacks, track_step_loss


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(logs)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(logs)


def test_each_step_has_its_own_loss_on_the_device():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype("float32"), rng.integers(0, 4, 12)
    # A learning rate too small to move a weight, so that the losses can be computed afterwards.
    inputs = keras.Input((3,))
    regularizer = keras.regularizers.L2(0.1)
    dense = keras.layers.Dense(4, kernel_regularizer=regularizer)
    model = keras.Model(inputs, dense(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(AdamW(1e-30, weight_decay=0.0), loss, metrics=["accuracy"])
    track_step_loss(model)
    seen = Seen()
    callbacks = StepCallbacks([seen], model, epochs=2, steps=3)
    model.fit(
        x, y, batch_size=4, epochs=2, shuffle=False, callbacks=callbacks, validation_data=(x, y)
    )

    kernel, bias = (keras.ops.convert_to_numpy(v).astype("float64") for v in dense.weights)
    logits = x @ kernel + bias
    rows = np.log(np.exp(logits).sum(-1)) - logits[np.arange(12), y]
    wanted = rows.reshape(3, 4).mean(1) + 0.1 * (kernel**2).sum()
    assert len(seen.steps) == 6
    assert not any(isinstance(logs["step_loss"], float) for logs in seen.steps)
    # Read after the run: a later step has not written over them.
    got = [float(keras.ops.convert_to_numpy(logs["step_loss"])) for logs in seen.steps]
    np.testing.assert_allclose(got, [*wanted, *wanted], rtol=1e-6)
    averages = [float(keras.ops.convert_to_numpy(logs["loss"])) for logs in seen.steps[:3]]
    np.testing.assert_allclose(averages, np.cumsum(wanted) / [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(seen.epochs[0]["val_loss"], wanted.mean(), rtol=1e-6)
