"""What a model of two towers does: classes by their names, retrieval, training, a preprocessor."""

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels.core.errors import InputError
from kmodels.models import (
    CLIPBackbone,
    CLIPTextEncoder,
    CLIPVisionEncoder,
    ImageTextPreprocessor,
    ImageTextSimilarity,
    SigLIPBackbone,
)
from kmodels.models.two_towers.model import TwoTowersConfig
from kmodels.text.training import train_tokenizer
from refusals import refused
from tolerances import tolerance

NAMES = ["cat", "dog", "old house"]
TEMPLATES = ["a photo of a {}.", "one {}", "{} {}"]
COLOURS = np.array([[230, 20, 20], [20, 230, 20], [20, 20, 230]], "uint8")


def tokenizer():
    return train_tokenizer([x.replace("{}", name) for name in NAMES for x in TEMPLATES], 400)


def make(kind="clip", **settings):
    words = tokenizer()
    preprocessor = ImageTextPreprocessor(words, kind, (16, 16), sequence_length=16)
    fields = ImageTextSimilarity.presets[f"{kind}_debug"]
    text = {**fields["text_encoder"], "vocabulary_size": words.vocabulary_size()}
    if kind == "clip":
        text["end_token_id"] = words.end_token_id
    keras.utils.set_random_seed(0)
    return ImageTextSimilarity.from_preset(
        f"{kind}_debug", text_encoder=text, preprocessor=preprocessor, **settings
    )


def coloured(labels, seed=0):
    noise = np.random.default_rng(seed).integers(-20, 20, (len(labels), 16, 16, 3))
    return np.clip(COLOURS[labels][:, None, None] + noise, 0, 255).astype("uint8")


@pytest.fixture(scope="module")
def model():
    return make()


# === Zero-shot ===


def test_classes_are_the_means_of_their_texts(model):
    images = coloured([0, 1, 2, 1])
    weights = []
    for name in NAMES:
        texts = [template.replace("{}", name) for template in TEMPLATES]
        each = to_numpy(model.backbone.get_text_embeddings(model.preprocessor(texts)["token_ids"]))
        each = each.astype("float64")
        mean = (each / np.linalg.norm(each, axis=1, keepdims=True)).mean(axis=0)
        weights.append(mean / np.linalg.norm(mean))
    pixels = model.preprocessor.image_preprocessor(images)
    vectors = to_numpy(model.backbone.get_vision_embeddings(pixels)).astype("float64")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = vectors @ np.array(weights).T / 0.07  # the first scale
    found = model.classify(images, NAMES, TEMPLATES, batch_size=3)
    assert found.dtype == np.float32 and found.shape == (4, 3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance("logits"))
    # Each template counts.
    fewer = model.classify(images, NAMES, TEMPLATES[:2])
    assert np.abs(fewer - found).max() > 100 * tolerance("logits")


def test_one_template_is_similarity(model):
    images = coloured([0, 1])
    texts = [f"a photo of a {name}." for name in NAMES]
    expected = model.similarity(images, texts)
    limit = {"rtol": 0, "atol": tolerance("logits")}
    np.testing.assert_allclose(model.classify(images, NAMES), expected, **limit)
    pixels = model.preprocessor.image_preprocessor(images)
    inputs = {"images": pixels, **model.preprocessor(texts)}
    np.testing.assert_allclose(to_numpy(model(inputs)), expected, **limit)


def test_retrieval_both_ways(model):
    images, texts = coloured([0, 1, 2, 0]), ["a cat", "one dog"]
    logits = model.similarity(images, texts)
    for found, scores in (
        (model.retrieve(texts, images, k=3), logits.T),
        (model.retrieve(images, texts, k=3), logits),
        (model.retrieve(texts, model.encode_image(images, normalize=False), k=3), logits.T),
    ):
        order = np.argsort(-scores, axis=1, kind="stable")[:, :3]
        np.testing.assert_allclose(
            found.scores, np.take_along_axis(scores, order, 1), rtol=0, atol=tolerance("logits")
        )
        assert found.indices.shape == found.scores.shape == (len(scores), min(3, scores.shape[1]))


def test_vectors_follow_weights_and_adapters(model):
    images = coloured([0, 1, 2])
    before = model.encode_image(images)
    changed = make()
    changed.encode_image(images)
    changed.backbone.enable_lora(2)
    rng = np.random.default_rng(0)
    for variable in changed.variables:
        if "lora_b" in variable.path:
            variable.assign(rng.normal(size=variable.shape))
    assert np.abs(changed.encode_image(images) - before).max() > 1e-3
    assert model.encode_image(images[:0]).shape == (0, 24)
    np.testing.assert_allclose(np.linalg.norm(before, axis=1), 1, rtol=1e-6)
    assert model.encode_text("a cat").shape == (1, 24)


# === Training ===


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_training_on_captions_tells_colours_apart(kind):
    model = make(kind)
    labels = np.arange(96) % 3
    captions = [TEMPLATES[i % 2].replace("{}", NAMES[label]) for i, label in enumerate(labels)]
    data = {"images": coloured(labels), "captions": captions}
    model.compile(keras.optimizers.Adam(2e-3), loss="auto")
    scales = [to_numpy(w) for w in model.backbone.get_layer("similarity").weights]
    losses = model.fit(data, batch_size=24, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    # The scale, and a SigLIP's bias, are learned.
    after = [to_numpy(w) for w in model.backbone.get_layer("similarity").weights]
    assert len(after) == {"clip": 1, "siglip": 2}[kind]
    assert all((one != other).all() for one, other in zip(scales, after, strict=True))
    found = model.classify(coloured([2, 0, 1, 1], seed=1), NAMES, TEMPLATES)
    np.testing.assert_array_equal(found.argmax(axis=1), [2, 0, 1, 1])


def test_the_default_loss_of_fit_without_compile():
    model, labels = make("siglip"), np.arange(8) % 3
    records = [
        {"image": x, "text": NAMES[k]} for x, k in zip(coloured(labels), labels, strict=True)
    ]
    inputs, zeros = model.preprocessor(records)
    expected = np.asarray(model.backbone.intermediates(inputs)["vision_logits"].shape)
    assert tuple(expected) == (8, 8)
    history = model.fit(inputs, zeros, batch_size=8, verbose=0).history
    assert type(model.loss).__name__ == "SigLIPLoss" and np.isfinite(history["loss"]).all()


def test_bfloat16_has_logits_and_loss_in_float32():
    model = make(dtype="mixed_bfloat16")
    inputs, labels = model.preprocessor({"images": coloured([0, 1, 2]), "captions": NAMES})
    assert to_numpy(model(inputs)).dtype == np.float32
    assert np.isfinite(model.train_on_batch(inputs, labels))


# === Made of parts ===


def test_weights_of_encoders_are_taken_over():
    fields = ImageTextSimilarity.presets["clip_debug"]
    vision = CLIPVisionEncoder(**fields["vision_encoder"])
    text = CLIPTextEncoder(**fields["text_encoder"])
    model = CLIPBackbone(vision, text, projection_dim=8)
    for one, other in ((vision, model.vision_encoder), (text, model.text_encoder)):
        assert_equal(one.weights, other.weights)
    assert not {id(w) for w in vision.weights} & {id(w) for w in model.weights}


def test_presets_are_those_of_the_class():
    clip, siglip = CLIPBackbone.presets, SigLIPBackbone.presets
    assert "clip_vit_base_patch32" in clip and "siglip2_so400m_patch14_384" in siglip
    assert not set(clip) & set(siglip)
    assert set(clip) | set(siglip) == set(ImageTextSimilarity.presets)
    assert all(TwoTowersConfig(**fields) for fields in ImageTextSimilarity.presets.values())
    for name in ("clip_debug", "siglip_debug"):
        assert ImageTextSimilarity.from_preset(name).count_params() < 100_000


def test_merging_that_is_set_on_the_tower_is_followed_and_kept(tmp_path):
    task = make("siglip")
    images, texts = coloured([0, 2]), NAMES[:2]
    plain = task.similarity(images, texts)
    task.backbone.vision_encoder.token_merging = 4
    merged = task.similarity(images, texts)
    assert np.abs(to_numpy(merged) - to_numpy(plain)).max() > 1e-6
    task.save_to_preset(tmp_path / "task")
    task.save(tmp_path / "task.keras")
    for again in (
        ImageTextSimilarity.from_preset(tmp_path / "task"),
        keras.saving.load_model(tmp_path / "task.keras"),
    ):
        assert again.backbone.vision_encoder.token_merging == 4
        np.testing.assert_array_equal(to_numpy(again.similarity(images, texts)), to_numpy(merged))


# === What they do not take ===


def test_errors_of_the_preprocessor(model, tmp_path):
    preprocessor, images = model.preprocessor, coloured([0, 1])
    with pytest.raises(InputError, match="kind is 'blip'; choose one of clip, siglip"):
        ImageTextPreprocessor(tokenizer(), "blip")
    with pytest.raises(InputError, match="got the columns images, title; give images and captions"):
        preprocessor({"images": images, "title": NAMES[:2]})
    pair = {"image": images[0], "caption": "cat"}
    for other in ({"image": images[0]}, {**pair, "weight": 2}):
        refused("one pair has image, caption and another image", preprocessor, [pair, other])
    refused("have no labels", preprocessor, {"images": images, "captions": NAMES[:2]}, np.zeros(2))
    refused("there are 2 images and 3 texts", preprocessor, {"images": images, "captions": NAMES})
    model.preprocessor.image_preprocessor.save_to_preset(tmp_path)
    with pytest.raises(InputError, match="holds a ViTImageClassifierPreprocessor, not a"):
        ImageTextPreprocessor.from_preset(tmp_path)
    with pytest.raises(InputError, match="clip_debug has no tokenizer; give one as tokenizer="):
        ImageTextPreprocessor.from_preset("clip_debug")


def test_errors_of_the_model(model):
    images = coloured([0, 1])
    with pytest.raises(InputError, match=r"has no \"{}\"; put it where the name goes"):
        model.classify(images, NAMES, ["a photo"])
    for names, templates in (([], TEMPLATES), ("cat", TEMPLATES), (NAMES, [])):
        with pytest.raises(InputError, match="give a list of names and at least one template"):
            model.classify(images, names, templates)
    refused("retrieve got texts for texts", model.retrieve, ["a cat"], NAMES)
    refused("retrieve got images for images", model.retrieve, images, images)
    refused(r"candidates have shape \(4, 3\); give", model.retrieve, "a cat", np.zeros((4, 3)))
    for wrong in (None, 3, b"cat", " "):
        refused("a class name is .*; give texts", model.classify, images, ["cat", wrong])
    refused(r"encode_image got shape \(16, 16, 3\)", model.encode_image, images[0])
    with pytest.raises(InputError, match="encode_text needs a preprocessor"):
        ImageTextSimilarity(model.backbone).encode_text("a cat")
    plain = ImageTextSimilarity(model.backbone)
    ids = np.ones(5, "int32")
    np.testing.assert_array_equal(plain.encode_text(ids), plain.encode_text(ids[None]))
    sizes = [np.zeros((side, side, 3)) for side in (16, 20)]
    refused("cannot make an array of the images .*; attach a preproc", plain.encode_image, sizes)
    with pytest.raises(InputError, match="the model got no images; give images beside token_ids"):
        model({"token_ids": np.ones((2, 5), "int32")})


def test_errors_of_configs():
    clip = ImageTextSimilarity.presets["clip_debug"]
    siglip = ImageTextSimilarity.presets["siglip_debug"]
    with pytest.raises(InputError, match="projection_dim is 8; a SigLIP has no projections"):
        SigLIPBackbone(clip["vision_encoder"], clip["text_encoder"], projection_dim=8)
    with pytest.raises(InputError, match="projection_dim is None; give a whole number"):
        CLIPBackbone(siglip["vision_encoder"], siglip["text_encoder"], None)
    with pytest.raises(InputError, match="use_class_token is False in vision_encoder"):
        TwoTowersConfig(siglip["vision_encoder"], clip["text_encoder"], 8)
    with pytest.raises(InputError, match="the vision tower gives 32 numbers and the text tower 9"):
        SigLIPBackbone(siglip["vision_encoder"], {**siglip["text_encoder"], "projection_dim": 9})
