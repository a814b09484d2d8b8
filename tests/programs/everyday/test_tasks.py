"""Tasks in programs as users of Keras write them."""

import keras
import numpy as np
import pytest

import kmodels
from tolerances import tolerance


def shades(count=24):
    """Dark, grey and bright images, (count, 16, 16, 3) in [0, 1], and which they are."""
    labels = np.arange(count) % 3
    noise = np.random.default_rng(0).normal(scale=0.1, size=(count, 16, 16, 3))
    return (noise + labels[:, None, None, None] / 2).astype("float32"), labels


def test_positional_arguments_as_in_any_keras_script():
    keras.utils.set_random_seed(0)
    x, y = shades()
    model = kmodels.models.ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, None, ["accuracy"])
    model.fit(x, y, 8, 24, 0)
    assert model.evaluate(x, y, 32, 0)[1] > 0.9
    assert (model.predict(x, 8, 0).argmax(-1) == y).mean() > 0.9


def test_a_loop_over_batches_of_raw_pictures():
    keras.utils.set_random_seed(0)
    x, y = shades()
    pictures = (np.clip(x, 0, 1) * 255).astype("uint8")
    model = kmodels.models.ViTImageClassifier.from_preset(
        "vit_debug",
        num_classes=3,
        preprocessor=kmodels.models.ViTImageClassifierPreprocessor((16, 16)),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    for _ in range(20):
        for start in range(0, 24, 8):
            model.train_on_batch(pictures[start : start + 8], y[start : start + 8])
    assert model.test_on_batch(pictures, y)[1] > 0.9
    assert (model.predict_on_batch(pictures).argmax(-1) == y).mean() > 0.9


def test_adapters_after_compile_on_the_backbone():
    keras.utils.set_random_seed(0)
    x, y = shades()
    model = kmodels.models.ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    before = model.predict(x, verbose=0)
    model.backbone.enable_lora(rank=4)
    model.fit(x, y, batch_size=8, epochs=20, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] > 0.9
    with kmodels.lora.disabled(model):
        base = model.predict(x, verbose=0)
    adapted = model.predict(x, verbose=0)
    assert np.abs(adapted - base).max() > 1e-3
    model.backbone.merge_lora()
    np.testing.assert_allclose(model.predict(x, verbose=0), adapted, atol=tolerance("logits"))
    assert before.shape == adapted.shape


def test_head_first_then_everything():
    keras.utils.set_random_seed(0)
    x, y = shades()
    model = kmodels.models.ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.backbone.trainable = False
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    frozen = [np.array(w) for w in model.backbone.get_weights()]
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    for one, other in zip(model.backbone.get_weights(), frozen, strict=True):
        np.testing.assert_array_equal(one, other)
    model.backbone.trainable = True
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=8, epochs=20, verbose=0)
    assert model.evaluate(x, y, verbose=0)[1] > 0.9


def test_the_same_training_as_a_keras_model_around_the_layers():
    x, y = shades()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = []
    for plain in (False, True):
        keras.utils.set_random_seed(3)
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=3
        )
        if plain:
            model = keras.Model(model.input, model.output)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
        losses.append(model.fit(x, y, 8, 4, 0, shuffle=False).history["loss"])
    np.testing.assert_allclose(*losses, atol=tolerance("losses"))


def test_half_precision_scales_the_loss():
    x, y = shades()
    model = kmodels.models.ViTImageClassifier.from_preset(
        "vit_debug", num_classes=3, dtype="mixed_float16"
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=8, epochs=20, verbose=0)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.evaluate(x, y, verbose=0)[1] > 0.9


def test_a_wrong_loss_is_named_when_compiling():
    model = kmodels.models.ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=3)
    with pytest.warns(UserWarning, match=r"SparseCategoricalCrossentropy\(from_logits=True\)"):
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


def test_a_saved_language_model_keeps_how_it_draws(tmp_path):
    keras.utils.set_random_seed(0)
    lm = kmodels.models.GemmaCausalLM.from_preset("gemma_debug", preprocessor=None)
    lm.compile(sampler=kmodels.generation.Sampler(top_k=3, seed=1))
    ids = np.random.default_rng(0).integers(3, 100, (2, 6)).astype("int32")
    prompts = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    lm.train_on_batch(prompts, np.roll(ids, -1, 1))
    lm.save(tmp_path / "lm.keras")
    again = keras.saving.load_model(tmp_path / "lm.keras")
    drawn = [
        model.generate(prompts, max_length=12, stop_token_ids=None)["token_ids"]
        for model in (lm, again)
    ]
    np.testing.assert_array_equal(*drawn)
