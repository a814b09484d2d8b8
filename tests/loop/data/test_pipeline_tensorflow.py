"""A user's tf.data pipeline on TensorFlow; collects nothing on the other backends."""

import keras
import numpy as np
import pytest

from any_data import run
from kmodels.models import ViTImageClassifier

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    class Seen(keras.callbacks.Callback):
        """The loss of each step, which tells the batch: the model gives what it is given."""

        def on_train_begin(self, logs=None):
            self.losses = []

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append((logs or {})["loss"])

    def echo():
        one = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), one])
        model.compile(keras.optimizers.SGD(0.0), lambda y, found: keras.ops.mean(found))
        return model

    def numbers(batch_size=2, count=6):
        x = tf.data.Dataset.range(count).map(lambda i: tf.cast([i], "float32"))
        return tf.data.Dataset.zip((x, x)).batch(batch_size)

    @pytest.mark.parametrize("steps_per_execution", [1, 2])
    def test_every_batch_comes_once_an_epoch_and_in_order(steps_per_execution):
        model, seen = echo(), Seen()
        model.compile(model.optimizer, model.loss, steps_per_execution=steps_per_execution)
        run(model, "fit", numbers(), epochs=2, shuffle=True, verbose=0, callbacks=[seen])
        ends = {1: [0.5, 1.5, 2.5], 2: [1.5, 2.5]}[steps_per_execution]  # means so far
        assert seen.losses == pytest.approx(ends * 2)

    def test_an_endless_one_goes_on_where_the_epoch_before_ended():
        seen = Seen()
        data = numbers(1, 3).repeat()
        settings = {"epochs": 3, "steps_per_epoch": 2, "shuffle": True, "verbose": 0}
        run(echo(), "fit", data, callbacks=[seen], **settings)
        assert seen.losses == pytest.approx([0, 0.5, 2, 1, 1, 1.5])

    def test_a_smaller_last_batch_and_one_that_fails():
        model = echo()
        assert run(model, "evaluate", numbers(4), verbose=0) == pytest.approx(2.5)
        assert run(model, "predict", numbers(4), verbose=0).ravel().tolist() == [0, 1, 2, 3, 4, 5]
        bad = numbers().map(lambda x, y: (tf.debugging.check_numerics(x / (x - 2), "bad"), y))
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad"):
            run(model, "fit", bad, shuffle=True, verbose=0)

    def test_a_task_takes_it():
        model = ViTImageClassifier.from_preset("vit_debug", num_layers=1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        shape = model.backbone.config.image_shape
        data = tf.data.Dataset.from_tensor_slices(
            (np.zeros((5, *shape), "uint8"), np.zeros(5, "int32"))
        )
        history = model.fit(data.batch(2), epochs=2, validation_data=data.batch(3), verbose=0)
        assert len(history.history["val_loss"]) == 2
