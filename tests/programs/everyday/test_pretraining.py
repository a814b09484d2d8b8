"""Pretraining without labels in programs as users write them."""

import keras
import numpy as np
import pytest
from PIL import Image

from kmodels.data import ImageLoader, open_dataset
from kmodels.models import ViTBackbone, ViTImageClassifier, ViTMAEForPreTraining


def folder_of_pictures(root):
    """A folder for each of three classes, with pictures of stripes in three directions."""
    rng = np.random.default_rng(0)
    rows, columns = np.indices((20, 24))
    waves = (rows, columns, rows + columns)
    for number, wave in enumerate(waves):
        (root / f"class_{number}").mkdir(parents=True)
        for i in range(16):
            shade = 127 + 100 * np.sin(wave / 1.5 + rng.uniform(0, 6))
            pixels = np.repeat(shade[..., None], 3, axis=2) + rng.normal(0, 5, (20, 24, 3))
            image = Image.fromarray(np.clip(pixels, 0, 255).astype("uint8"))
            image.save(root / f"class_{number}" / f"{i}.png")
    return root


@pytest.mark.each_backend
def test_pretrain_on_own_pictures_then_fine_tune_a_classifier(tmp_path):
    """Keras' way: compile and fit twice, with a directory between."""
    keras.utils.set_random_seed(0)
    data = open_dataset(f"folder:{folder_of_pictures(tmp_path / 'mine')}", image_size=(16, 16))
    loader = ImageLoader(
        data.train, 8, shuffle=True, image_size=(16, 16), mean=data.mean, std=data.std
    )
    mae = ViTMAEForPreTraining.from_preset(
        "vit_debug",
        patch_size=4,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    mae.compile(keras.optimizers.Adam(1e-2))
    losses = mae.fit(loader, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    mae.save_to_preset(tmp_path / "pretrained")

    model = ViTImageClassifier.from_preset(tmp_path / "pretrained", num_classes=3)
    for one, other in zip(model.backbone.weights, mae.backbone.weights, strict=True):
        assert np.array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    history = model.fit(loader, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


def test_what_a_user_of_transformers_asks(tmp_path):
    """One forward pass with noise of one's own: pixels, mask and loss; and a directory."""
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")
    noise = np.random.default_rng(1).random((2, 16)).astype("float32")
    mae = ViTMAEForPreTraining(
        ViTBackbone.from_preset("vit_debug", patch_size=4),
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        mask_ratio=0.5,
    )
    logits, mask = mae(images, noise=noise), mae.hidden(noise)
    assert logits.shape == (2, 16, 48)
    assert float(keras.ops.sum(mask)) == 16
    assert mae.unpatchify(logits).shape == images.shape
    assert float(keras.ops.convert_to_numpy(mae.pretraining_loss(images, noise))) > 0
    seen, made = map(keras.ops.convert_to_numpy, mae.reconstruct_images(images, noise))
    assert ((seen == 0).mean() > 0.45) and np.array_equal(made[seen != 0], images[seen != 0])
    mae.export_to_transformers(tmp_path / "out")
    again = ViTMAEForPreTraining.from_preset(tmp_path / "out", preprocessor=None)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(again(images, noise=noise)),
        keras.ops.convert_to_numpy(logits),
        atol=1e-5,
    )
