"""Programs of people who classify images."""

import keras
import numpy as np
import pytest

from kmodels.models import ViTBackbone, ViTImageClassifier, ViTImageClassifierPreprocessor
from tolerances import tolerance

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def shades(count=24):
    """Dark, grey and bright images, (count, 16, 16, 3) in [0, 1], and which they are."""
    labels = np.arange(count) % 3
    noise = np.random.default_rng(0).normal(scale=0.1, size=(count, 16, 16, 3))
    return (noise + labels[:, None, None, None] / 2).astype("float32"), labels


@pytest.mark.each_backend
def test_head_first_then_everything(tmp_path):
    """With raw pictures, the arguments by their places as in any Keras script."""
    x, y = shades()
    pictures = (np.clip(x, 0, 1) * 255).astype("uint8")
    model = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=3, preprocessor=ViTImageClassifierPreprocessor((16, 16))
    )
    model.backbone.trainable = False
    model.compile()
    frozen = model.backbone.get_weights()
    model.fit(pictures, y, 8, 2, 0)
    assert all(map(np.array_equal, model.backbone.get_weights(), frozen))
    model.backbone.trainable = True
    model.compile(keras.optimizers.Adam(3e-3), LOSS, None, ["accuracy"])
    model.fit(pictures, y, 8, 20, 0)
    assert model.evaluate(pictures, y, 32, 0)[1] > 0.9
    model.save_to_preset(tmp_path / "shades")
    again = ViTImageClassifier.from_preset(tmp_path / "shades")
    assert (again.predict(pictures, 8, 0).argmax(-1) == y).mean() > 0.9


def test_the_same_training_as_a_keras_model_around_the_layers():
    x, y = shades()
    losses = []
    for plain in (False, True):
        keras.utils.set_random_seed(3)
        model = ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=3)
        if plain:
            model = keras.Model(model.input, model.output)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), LOSS, metrics=["accuracy"])
        losses.append(model.fit(x, y, 8, 4, 0, shuffle=False).history["loss"])
    np.testing.assert_allclose(*losses, atol=tolerance("losses"))


def test_several_labels_for_each_picture():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (32, 3)).astype("float32")
    images = np.ones((32, 16, 16, 3), "float32") * labels[:, None, None, :]
    model = ViTImageClassifier(
        ViTBackbone.from_preset("vit_debug", num_layers=1), num_classes=3, activation="sigmoid"
    )
    model.compile(optimizer=keras.optimizers.Adam(5e-3))
    model.fit(images, labels, batch_size=8, epochs=30, verbose=0)
    assert model.evaluate(images, labels, verbose=0, return_dict=True)["binary_accuracy"] > 0.9


def test_pictures_of_any_size_are_predicted_from_a_list():
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (h, w, 3), "uint8") for h, w in ((20, 30), (16, 16), (9, 40))]
    preprocessor = ViTImageClassifierPreprocessor((16, 16))
    model = ViTImageClassifier.from_preset(
        "vit_debug", num_layers=1, num_classes=4, preprocessor=preprocessor
    )
    logits = model.predict(pictures, verbose=0)
    for row, picture in zip(logits, pictures, strict=True):
        alone = keras.ops.convert_to_numpy(model(preprocessor(picture)[None]))[0]
        np.testing.assert_allclose(row, alone, atol=tolerance("logits_across"))


def test_augmentation_layers_of_keras_in_front():
    images = np.random.default_rng(0).random((8, 16, 16, 3), "float32")
    labels = np.arange(8) % 2
    inputs = keras.Input((16, 16, 3))
    flipped = keras.layers.RandomFlip("horizontal")(inputs)
    classifier = ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=2)
    model = keras.Model(inputs, classifier(flipped))
    model.compile("adam", LOSS, metrics=["accuracy"])
    model.fit(images, labels, verbose=0)
    found = model.predict(images, verbose=0)
    np.testing.assert_allclose(
        found, classifier.predict(images, verbose=0), atol=tolerance("logits_across")
    )
