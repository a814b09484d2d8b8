"""Programs of people who look inside a ViT."""

import keras
import numpy as np
import pytest

from kmodels.models import (
    CLIPBackbone,
    CLIPTextEncoder,
    CLIPVisionEncoder,
    ImageTextPreprocessor,
    ImageTextSimilarity,
    ViTBackbone,
    ViTImageClassifier,
    interpret,
)
from kmodels.text.training import train_tokenizer

PATCH, SIDE = 4, 16


def squares(number, seed=0):
    """Noise with a red or a blue patch somewhere; its color is the class."""
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 0.2, (number, SIDE, SIDE, 3)).astype("float32")
    places, labels = rng.integers(0, 4, (number, 2)), rng.integers(0, 2, number)
    for image, (row, column), label in zip(images, places, labels, strict=True):
        image[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH, 2 * label] = 2
    return images, labels, places


def peaks(maps):
    flat = maps.reshape(len(maps), -1).argmax(-1)
    return np.stack(np.unravel_index(flat, maps.shape[1:]), -1)


@pytest.mark.each_backend
def test_a_trained_classifier_points_at_what_it_was_trained_on():
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone(
        image_shape=(SIDE, SIDE, 3),
        patch_size=PATCH,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
    )
    model = ViTImageClassifier(backbone, 2, pooling="gap")
    model.compile(keras.optimizers.Adam(3e-3))
    images, labels, _ = squares(512)
    model.fit(images, labels, batch_size=32, epochs=8, verbose=0)
    images, labels, places = squares(16, seed=1)
    assert (model.predict(images, verbose=0).argmax(-1) == labels).mean() > 0.9
    rollout = interpret.attention_rollout(model, images)
    assert (peaks(rollout) == places).all(-1).mean() > 0.9
    # One patch of sixteen is the right one.
    cam = interpret.grad_cam(model, images, labels, "tokens")
    assert (peaks(cam) == places).all(-1).mean() > 0.5
    # The patch is like the patch of the same color in another image, and like none beside it.
    red = np.flatnonzero(labels == 0)[:2]
    alike = interpret.patch_similarity(model, images[red[:1]], places[red[0]], images[red[1:]])
    np.testing.assert_array_equal(peaks(alike)[0], places[red[1]])


def test_which_patches_a_text_speaks_of(tmp_path):
    tokenizer = train_tokenizer(["a red square", "a blue square"] * 4, vocabulary_size=300)
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
    ids = tokenizer.vocabulary_size()
    text = CLIPTextEncoder(ids, 16, **sizes, max_sequence_length=8)
    image = CLIPVisionEncoder(PATCH, **sizes, image_shape=(SIDE, SIDE, 3))
    model = ImageTextSimilarity(
        CLIPBackbone(image, text, 8),
        ImageTextPreprocessor(tokenizer, image_size=(SIDE, SIDE), sequence_length=8),
    )
    raw = np.random.default_rng(0).integers(0, 256, (2, 20, 20, 3), "uint8")
    one = interpret.grad_cam(model, raw, "a red square")
    assert one.shape == (2, 4, 4)
    each = interpret.grad_cam(model, raw, ["a red square", "a blue square"])
    np.testing.assert_allclose(each[0], one[0], atol=1e-6)
    assert np.abs(each[1] - one[1]).max() > 1e-6
    assert interpret.overlay(raw, one).shape == raw.shape
