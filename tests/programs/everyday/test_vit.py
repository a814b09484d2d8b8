"""Programs of people who work with images: classes, masks, pretraining, and what a model sees."""

import shutil

import keras
import numpy as np
import pytest

import kmodels
from kmodels.data import Augment, NaFlexLoader
from kmodels.models import (
    CLIPBackbone,
    CLIPTextEncoder,
    CLIPVisionEncoder,
    ImageTextPreprocessor,
    ImageTextSimilarity,
    NaFlexViTImageClassifier,
    ViTBackbone,
    ViTImageSegmenter,
    ViTMAEForPreTraining,
    interpret,
)
from kmodels.text.training import train_tokenizer

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# === Segmentation ===


def test_a_segmenter_of_a_dinov2_like_backbone_under_half_precision():
    backbone = ViTBackbone(
        (16, 16, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=24,
        num_register_tokens=2, layer_scale=0.1, dtype="mixed_bfloat16",
    )  # fmt: skip
    model = ViTImageSegmenter(backbone, 5, use_batch_norm=False)
    assert model.output.dtype == "float32" and model.output_dense.compute_dtype == "float32"
    logits = model.predict(np.zeros((1, 16, 16, 3), "float32"), verbose=0)
    assert logits.dtype == "float32"


# === Pretraining ===

DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}


def test_what_a_user_of_transformers_asks():
    """One forward pass with noise of one's own: the mask, and images of what is seen and made."""
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")
    noise = np.random.default_rng(1).random((2, 16)).astype("float32")
    mae = ViTMAEForPreTraining(
        ViTBackbone.from_preset("vit_debug", patch_size=4), **DECODER, mask_ratio=0.5
    )
    assert float(keras.ops.sum(mae.hidden(noise))) == 16
    seen, made = map(keras.ops.convert_to_numpy, mae.reconstruct_images(images, noise))
    assert ((seen == 0).mean() > 0.45) and np.array_equal(made[seen != 0], images[seen != 0])


# === Images of any aspect ratio ===

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
    assert logits.shape == (3, 2) and np.isfinite(logits).all()
    # A longer row gives more patches to each image.
    model.preprocessor.image_preprocessor.max_num_patches = 60
    assert np.abs(model.classify(images, ["a cat", "a dog"]) - logits).max() > 1e-3


@pytest.mark.each_backend("nightly")
def test_fine_tuning_on_images_of_free_shapes(tmp_path):
    """A checkpoint of one size learns from rows of images, and is read again."""
    keras.utils.set_random_seed(1)
    fields = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
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


# === What a model looks at ===

PATCH, SIDE = 4, 16


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
