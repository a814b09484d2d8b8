"""Images of any aspect ratio, as a user of transformers, timm or Keras writes it."""

import shutil

import keras
import numpy as np
import pytest

import kmodels
from kmodels.data import Augment, NaFlexLoader
from kmodels.models import ImageTextSimilarity, NaFlexViTImageClassifier, ViTBackbone

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SIDES = ((24, 60), (40, 40), (64, 20), (16, 16), (12, 70))


class Stripes:
    """Images of several shapes with lines down or across, of random width and colour."""

    def __init__(self, first, count):
        self.first, self.labels = first, (np.arange(count) % 2).astype("int32")

    def __len__(self):
        return len(self.labels)

    def batch(self, indices):
        found = []
        for i in np.asarray(indices).tolist():
            draw = np.random.default_rng(self.first + i)
            height, width = SIDES[draw.integers(len(SIDES))]
            along = np.arange((height, width)[i % 2])
            line = ((along + draw.integers(8)) // 4 % 2 * 200 + draw.integers(0, 50)).astype(
                "uint8"
            )
            image = np.broadcast_to(line if i % 2 else line[:, None], (height, width))
            found.append(np.repeat(image[..., None], 3, axis=-1))
        return found, self.labels[indices]


def test_zero_shot_with_a_directory_of_transformers(references):
    """What a model card of SigLIP 2 NaFlex shows, with images as they are."""
    model = ImageTextSimilarity.from_preset(references / "naflex" / "model")
    images, _ = Stripes(0, 3).batch(np.arange(3))
    logits = model.classify(images, ["a cat", "a dog"])
    probabilities = 1 / (1 + np.exp(-logits))
    assert probabilities.shape == (3, 2) and (probabilities > 0).all()
    # A longer row gives more patches to each image.
    model.preprocessor.image_preprocessor.max_num_patches = 60
    assert np.abs(model.classify(images, ["a cat", "a dog"]) - logits).max() > 1e-3


@pytest.mark.each_backend
def test_fine_tuning_on_images_of_free_shapes(tmp_path):
    """A checkpoint of one size learns from rows of images, and is read again."""
    keras.utils.set_random_seed(1)
    fields = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    ViTBackbone((32, 32, 3), use_class_token=False, **fields).save_to_preset(tmp_path / "vit")
    backbone = kmodels.models.NaFlexViTBackbone.from_preset(tmp_path / "vit")
    model = NaFlexViTImageClassifier(backbone, num_classes=2)
    given = {"patch_size": 8, "row_length": 64, "max_num_patches": 32}
    training = NaFlexLoader(
        Stripes(0, 128), 16, shuffle=True, min_num_patches=12, augment=Augment(flip=True), **given
    )
    held_out = NaFlexLoader(Stripes(1000, 32), 16, **given)
    model.compile(keras.optimizers.Adam(3e-3), loss=LOSS, weighted_metrics=["accuracy"])
    history = model.fit(training, validation_data=held_out, epochs=6, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert history["val_accuracy"][-1] > 0.9
    # Whole images, one in each row, by the preprocessor.
    kind = kmodels.models.NaFlexViTImageClassifierPreprocessor
    model.preprocessor = kind(patch_size=8, max_num_patches=32, enlarge=False)
    images, labels = Stripes(1000, 32).batch(np.arange(32))
    assert (model.predict(images, verbose=0).argmax(-1) == labels).mean() > 0.9
    model.save_to_preset(tmp_path / "own")
    again = NaFlexViTImageClassifier.from_preset(tmp_path / "own")
    np.testing.assert_array_equal(
        again.predict(images[:4], verbose=0), model.predict(images[:4], verbose=0)
    )
    shutil.rmtree(tmp_path)


def test_mixed_labels_train_too():
    keras.utils.set_random_seed(1)
    fields = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    model = NaFlexViTImageClassifier(kmodels.models.NaFlexViTBackbone((32, 32, 3), **fields), 2)
    mixing = Augment(mixup=0.4, cutmix=1.0, num_classes=2)
    loader = NaFlexLoader(Stripes(0, 32), 8, patch_size=8, row_length=64, augment=mixing)
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.CategoricalCrossentropy(True))
    losses = model.fit(loader, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
