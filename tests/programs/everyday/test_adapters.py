"""Programs around LoRA, QLoRA and frozen backbones, as users write them."""

import copy

import keras
import numpy as np
import pytest

import kmodels
from tolerances import tolerance

SIZES = {"image_shape": (8, 8, 1), "patch_size": 4, "num_layers": 1, "num_heads": 2}
WIDTHS = {"hidden_dim": 16, "mlp_dim": 32}
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# The brighter half of an image tells its class.
rng = np.random.default_rng(0)
y = np.arange(48) % 2
x = rng.normal(size=(48, 8, 8, 1)).astype("float32")
x[y == 1, :4] += 3.0
x[y == 0, 4:] += 3.0


def classifier():
    keras.utils.set_random_seed(0)
    backbone = kmodels.models.ViTBackbone(**SIZES, **WIDTHS)
    return kmodels.models.ViTImageClassifier(backbone, num_classes=2)


def gemma():
    keras.utils.set_random_seed(0)
    return kmodels.models.GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None)


def test_qlora_then_save_load_and_train_on(tmp_path):
    model = classifier()
    model.quantize("int8")
    model.enable_lora(rank=4, targets="all-linear")
    model.compile(keras.optimizers.Adam(1e-2), LOGITS, metrics=["accuracy"])
    model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    model.save(tmp_path / "qlora.keras")

    again = keras.saving.load_model(tmp_path / "qlora.keras")
    before = model.evaluate(x, y, verbose=0, return_dict=True)
    assert again.evaluate(x, y, verbose=0, return_dict=True) == pytest.approx(before, abs=1e-5)
    again.fit(x, y, batch_size=16, epochs=30, verbose=0)
    assert again.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] > 0.9


def test_freeze_the_backbone_save_load_train_on(tmp_path):
    model = classifier()
    model.backbone.trainable = False
    model.compile(keras.optimizers.Adam(1e-2), LOGITS)
    model.fit(x, y, epochs=1, verbose=0)
    model.save(tmp_path / "probe.keras")

    again = keras.saving.load_model(tmp_path / "probe.keras")
    assert [w.path for w in again.trainable_weights] == ["logits/kernel", "logits/bias"]
    base = again.backbone.get_weights()
    again.fit(x, y, epochs=1, verbose=0)
    assert all(
        np.array_equal(a, b) for a, b in zip(base, again.backbone.get_weights(), strict=True)
    )


def test_model_checkpoint_with_lora(tmp_path):
    model = classifier()
    model.enable_lora(rank=2)
    model.compile(keras.optimizers.Adam(1e-2), LOGITS, metrics=["accuracy"])
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="val_loss", save_best_only=True
    )
    history = model.fit(x, y, validation_data=(x, y), epochs=3, callbacks=[best], verbose=0)

    restored = keras.saving.load_model(tmp_path / "best.keras")
    loss = restored.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    assert loss == pytest.approx(min(history.history["val_loss"]), abs=1e-5)


def test_a_deep_copy_of_an_adapted_model_goes_its_own_way():
    model = classifier()
    model.enable_lora(rank=2)
    twin = copy.deepcopy(model)
    before = model.predict(x, verbose=0)
    np.testing.assert_allclose(twin.predict(x, verbose=0), before, atol=1e-6)

    twin.compile(keras.optimizers.Adam(1e-2), LOGITS)
    twin.fit(x, y, epochs=2, verbose=0)
    np.testing.assert_allclose(model.predict(x, verbose=0), before, atol=1e-6)
    assert np.abs(twin.predict(x, verbose=0) - before).max() > 1e-3


def test_an_adapted_backbone_in_a_functional_model(tmp_path):
    backbone = kmodels.models.ViTBackbone(**SIZES, **WIDTHS)
    backbone.enable_lora(rank=2)
    images = keras.Input((8, 8, 1))
    pooled = keras.layers.GlobalAveragePooling1D()(backbone(images))
    model = keras.Model(images, keras.layers.Dense(2)(pooled))
    model.compile(keras.optimizers.Adam(1e-2), LOGITS)
    model.fit(x, y, epochs=2, verbose=0)
    model.save(tmp_path / "mine.keras")

    again = keras.saving.load_model(tmp_path / "mine.keras")
    assert len(again.trainable_weights) == len(model.trainable_weights)
    np.testing.assert_allclose(
        again.predict(x, verbose=0), model.predict(x, verbose=0), atol=tolerance("logits")
    )


def test_swap_two_adapters(tmp_path):
    results = {}
    model = classifier()
    model.enable_lora(rank=4, targets="all-linear")
    model.get_layer("logits").trainable = False
    model.compile(keras.optimizers.Adam(1e-2), LOGITS)
    for name, labels in (("plain", y), ("swapped", 1 - y)):
        model.fit(x, labels, epochs=6, batch_size=16, verbose=0)
        model.save_adapter(tmp_path / name)
        results[name] = model.predict(x, verbose=0)

    model = classifier()
    for name in ("plain", "swapped", "plain"):
        model.load_adapter(tmp_path / name)
        np.testing.assert_allclose(model.predict(x, verbose=0), results[name], atol=1e-5)


@pytest.mark.across
@pytest.mark.needs("peft")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_train_here_and_load_in_peft(tmp_path):
    import peft
    import torch
    import transformers

    model = gemma()
    model.export_to_transformers(tmp_path / "base")
    tokens = np.random.default_rng(0).integers(3, 200, size=(4, 12)).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    model.enable_lora(rank=4)
    model.compile(keras.optimizers.Adam(1e-2), LOGITS)
    model.fit(inputs, np.roll(tokens, -1, 1), epochs=2, verbose=0)
    model.save_adapter(tmp_path / "adapter")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    found = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(found, expected, atol=tolerance("logits"))


@pytest.mark.across
@pytest.mark.needs("transformers")
def test_merge_and_export_to_transformers(tmp_path):
    import torch
    import transformers

    model = gemma()
    tokens = np.random.default_rng(0).integers(3, 200, size=(4, 12)).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    model.enable_lora(rank=4, dora=True)
    model.compile(keras.optimizers.Adam(1e-2), LOGITS)
    model.fit(inputs, np.roll(tokens, -1, 1), epochs=2, verbose=0)
    model.merge_lora()
    model.export_to_transformers(tmp_path / "merged")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    found = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(found, expected, atol=tolerance("logits"))
