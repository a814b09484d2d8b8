"""Programs of people who classify images."""

import keras
import numpy as np
import pytest

from kmodels.models import ViTBackbone, ViTImageClassifier, ViTImageClassifierPreprocessor
from tolerances import tolerance


def test_transfer_learning_freezes_and_then_unfreezes():
    images = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), "uint8")
    labels = (images.mean((1, 2, 3)) > 127).astype("int32")
    model = ViTImageClassifier.from_preset(
        "vit_debug",
        num_layers=1,
        num_classes=2,
        preprocessor=ViTImageClassifierPreprocessor((16, 16)),
    )
    before = model.backbone.get_weights()
    model.backbone.trainable = False
    model.compile()
    model.fit(images, labels, batch_size=8, verbose=0)
    assert all(map(np.array_equal, model.backbone.get_weights(), before))
    model.backbone.trainable = True
    model.compile(optimizer=keras.optimizers.Adam(1e-3))
    history = model.fit(images, labels, batch_size=8, epochs=20, verbose=0).history
    assert history["sparse_categorical_accuracy"][-1] > 0.8


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


def test_grey_pictures_with_a_checkpoint_for_colours(tmp_path):
    colour = ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=2)
    colour.save_to_preset(tmp_path / "colour")
    grey = ViTImageClassifier.from_preset(tmp_path / "colour", image_shape=(16, 16, 1))
    images = np.random.default_rng(0).random((4, 16, 16, 1), "float32")
    wanted = colour.predict(np.repeat(images, 3, axis=-1), verbose=0)
    found = grey.predict(images, verbose=0)
    np.testing.assert_allclose(found, wanted, atol=tolerance("logits_across"))


def test_augmentation_layers_of_keras_in_front():
    images = np.random.default_rng(0).random((8, 16, 16, 3), "float32")
    labels = np.arange(8) % 2
    inputs = keras.Input((16, 16, 3))
    flipped = keras.layers.RandomFlip("horizontal")(inputs)
    classifier = ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=2)
    model = keras.Model(inputs, classifier(flipped))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(images, labels, verbose=0)
    found = model.predict(images, verbose=0)
    np.testing.assert_allclose(
        found, classifier.predict(images, verbose=0), atol=tolerance("logits_across")
    )


@pytest.mark.needs("keras_hub")
def test_one_changed_import_moves_over_from_keras_hub():
    import keras_hub

    from kmodels.interop.keras_hub import from_hub

    theirs = keras_hub.models.ViTImageClassifier(
        keras_hub.models.ViTBackbone((16, 16, 3), (8, 8), 2, 2, 16, 32), num_classes=3
    )
    ours = ViTImageClassifier(
        ViTBackbone(
            (16, 16, 3), patch_size=(8, 8), num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
        ),
        num_classes=3,
    )
    ours.set_weights(from_hub(theirs).get_weights())
    images = np.random.default_rng(0).random((4, 16, 16, 3), "float32")
    np.testing.assert_allclose(
        ours.predict(images, verbose=0),
        theirs.predict(images, verbose=0),
        atol=tolerance("logits"),
    )
