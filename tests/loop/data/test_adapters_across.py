"""Loaders of other frameworks in `fit` on each backend."""

import keras
import numpy as np
import pytest

from any_data import arguments

X = np.arange(22, dtype="float32").reshape(11, 2)
Y = np.arange(11, dtype="float32")[:, None]


class Rows:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


class NamedRows(Rows):
    def __getitem__(self, index):
        return {"pixel_values": X[index], "labels": Y[index]}


def torch_loader():
    from torch.utils.data import DataLoader

    return DataLoader(Rows(), batch_size=4, shuffle=True)


def torch_loader_of_dictionaries():
    from torch.utils.data import DataLoader

    return DataLoader(NamedRows(), batch_size=4)


def tensorflow_dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def tensorflow_dataset_of_dictionaries():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices({"image": X, "label": Y}).batch(4)


def grain_dataset():
    import grain.python as grain

    return grain.MapDataset.source(Rows()).batch(4)


def hugging_face_dataset():
    import datasets

    columns = {"image": X.tolist(), "label": Y.tolist()}
    return datasets.Dataset.from_dict(columns).with_format("numpy")


MADE = {
    make.__name__: make
    for make in (
        torch_loader,
        torch_loader_of_dictionaries,
        tensorflow_dataset,
        tensorflow_dataset_of_dictionaries,
        grain_dataset,
        hugging_face_dataset,
    )
}


@pytest.mark.across("jax", "torch", "tensorflow")
@pytest.mark.parametrize("kind", MADE)
def test_fit_takes_loaders_of_every_framework(kind):
    """A model without bias and without learning: its loss tells whether each sample came once."""
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    for preprocess in (None, lambda x, y: (x * 2, y)):
        told = arguments(
            "fit",
            MADE[kind](),
            preprocess=preprocess,
            epochs=2,
            verbose=0,
            shuffle=True,
            batch_size=4,
            validation_data=MADE[kind](),
        )
        history = model.fit(**told).history
        # The mean of squared labels, 385 / 11.
        np.testing.assert_allclose(history["loss"] + history["val_loss"], 35.0, rtol=1e-5)
