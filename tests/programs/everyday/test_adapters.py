"""Programs around LoRA, QLoRA and frozen backbones, as users write them."""

import keras
import numpy as np
import pytest

import kmodels

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


@pytest.mark.each_backend
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
