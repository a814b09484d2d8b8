"""Programs of people who work with images: classes, masks, pretraining, and what a model sees."""

import shutil

import keras
import numpy as np
import pytest
from PIL import Image

import kmodels
from kmodels.data import Augment, ImageLoader, NaFlexLoader, made_scenes, open_dataset
from kmodels.models import (
    CLIPBackbone,
    CLIPTextEncoder,
    CLIPVisionEncoder,
    ImageTextPreprocessor,
    ImageTextSimilarity,
    NaFlexViTImageClassifier,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageSegmenter,
    ViTImageSegmenterPreprocessor,
    ViTMAEForPreTraining,
    interpret,
)
from kmodels.text.training import train_tokenizer
from tolerances import tolerance

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def shades(count=24):
    """Dark, grey and bright images, (count, 16, 16, 3) in [0, 1], and which they are."""
    labels = np.arange(count) % 3
    noise = np.random.default_rng(0).normal(scale=0.1, size=(count, 16, 16, 3))
    return (noise + labels[:, None, None, None] / 2).astype("float32"), labels


@pytest.mark.each_backend("nightly")
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


@pytest.mark.each_backend("nightly")
def test_qlora_then_save_load_and_train_on(tmp_path):
    # The brighter half of an image tells its class.
    y = np.arange(48) % 2
    x = np.random.default_rng(0).normal(size=(48, 8, 8, 1)).astype("float32")
    x[y == 1, :4] += 3.0
    x[y == 0, 4:] += 3.0
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone(image_shape=(8, 8, 1), patch_size=4, **sizes)
    model = ViTImageClassifier(backbone, num_classes=2)
    model.quantize("int8")
    model.enable_lora(rank=4, targets="all-linear")
    model.compile(keras.optimizers.Adam(1e-2), LOSS, metrics=["accuracy"])
    model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    model.save(tmp_path / "qlora.keras")

    again = keras.saving.load_model(tmp_path / "qlora.keras")
    before = model.evaluate(x, y, verbose=0, return_dict=True)
    assert again.evaluate(x, y, verbose=0, return_dict=True) == pytest.approx(before, abs=1e-5)
    again.fit(x, y, batch_size=16, epochs=30, verbose=0)
    assert again.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] > 0.9


# === Segmentation ===

CLASSES = 5
IMAGES, MASKS = made_scenes(16, (16, 16), seed=1)


@pytest.fixture(scope="module")
def segmenter():
    keras.utils.set_random_seed(0)
    return ViTImageSegmenter.from_preset(
        "vit_debug",
        num_layers=1,
        patch_size=4,
        num_classes=CLASSES,
        preprocessor=ViTImageSegmenterPreprocessor((16, 16)),
    )


@pytest.mark.each_backend("nightly")
def test_linear_evaluation_of_a_frozen_backbone(segmenter):
    """As keras-hub's segmenters are used: compile, fit, evaluate, predict."""
    before = segmenter.backbone.get_weights()
    segmenter.backbone.trainable = False
    segmenter.compile(optimizer=keras.optimizers.Adam(3e-2))
    data = {"validation_data": (IMAGES[:4], MASKS[:4]), "batch_size": 8}
    history = segmenter.fit(IMAGES, MASKS[..., None], epochs=8, verbose=0, **data).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert history["val_mean_iou"][-1] > 0.1
    assert all(map(np.array_equal, segmenter.backbone.get_weights(), before))
    logits = segmenter.predict(IMAGES[:3], verbose=0)
    assert logits.shape == (3, 16, 16, CLASSES)
    accuracy = (segmenter.segment(IMAGES) == MASKS).mean()
    assert accuracy >= (MASKS == 0).mean() - 0.05


def test_a_loader_of_images_and_masks_of_any_size(segmenter):
    def batches():
        for i in range(4):
            size = (12 + 4 * i, 30 - 3 * i)
            images, masks = made_scenes(4, size, seed=i)
            # A border that nobody has labeled.
            masks[:, :2] = 255
            yield images, masks

    segmenter.compile(optimizer=keras.optimizers.Adam(1e-3))
    logs = segmenter.fit(batches, epochs=1, verbose=0).history
    assert np.isfinite(logs["loss"]).all() and 0 <= logs["mean_iou"][0] <= 1


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    @pytest.mark.each_backend
    def test_masks_inside_tf_data(segmenter):
        rows = tf.data.Dataset.from_tensor_slices((IMAGES, MASKS)).map(segmenter.preprocessor)
        images, masks = next(iter(rows.batch(4)))
        assert tuple(images.shape) == (4, 16, 16, 3) and masks.dtype == "int32"
        np.testing.assert_array_equal(masks.numpy(), MASKS[:4])


def test_a_segmenter_of_a_dinov2_like_backbone_under_half_precision():
    backbone = ViTBackbone(
        (16, 16, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=24,
        num_register_tokens=2, layer_scale=0.1, dtype="mixed_bfloat16",
    )  # fmt: skip
    model = ViTImageSegmenter(backbone, CLASSES, use_batch_norm=False)
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


@pytest.mark.each_backend("nightly")
def test_pretrain_on_own_pictures_then_fine_tune_a_classifier(tmp_path):
    """Keras' way: compile and fit twice, with a directory between."""
    keras.utils.set_random_seed(0)
    data = open_dataset(f"folder:{folder_of_pictures(tmp_path / 'mine')}", image_size=(16, 16))
    loader = ImageLoader(
        data.train, 8, shuffle=True, image_size=(16, 16), mean=data.mean, std=data.std
    )
    mae = ViTMAEForPreTraining.from_preset("vit_debug", patch_size=4, **DECODER)
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


@pytest.mark.each_backend("nightly")
def test_a_trained_classifier_points_at_what_it_was_trained_on():
    keras.utils.set_random_seed(0)
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    backbone = ViTBackbone(image_shape=(SIDE, SIDE, 3), patch_size=PATCH, **sizes)
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
