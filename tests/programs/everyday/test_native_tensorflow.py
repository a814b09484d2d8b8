"""Programs of TensorFlow users; collects nothing on other backends."""

import keras
import numpy as np
import pytest

import kmodels
from tolerances import tolerance

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    STRATEGIES = {
        "OneDeviceStrategy": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "MirroredStrategy of one": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
        "MirroredStrategy of two": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    }

    @pytest.mark.filterwarnings("ignore::UserWarning")  # of collectives between CPUs
    @pytest.mark.parametrize("kind", STRATEGIES)
    def test_fit_under_the_users_own_strategy(kind) -> None:
        images = np.random.default_rng(0).normal(size=(32, 16, 16, 3)).astype("float32")
        labels = (images.mean(axis=(1, 2, 3)) > 0).astype("int32")
        histories = []
        for strategy in (tf.distribute.get_strategy(), STRATEGIES[kind]()):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = kmodels.models.ViTImageClassifier.from_preset(
                    "vit_debug", num_layers=1, num_classes=2
                )
                model.compile(
                    optimizer=keras.optimizers.SGD(0.1),
                    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                )
            history = model.fit(images, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
            histories.append(history.history["loss"])
        np.testing.assert_allclose(*histories, rtol=tolerance("losses_of_ranks"))
