"""Whole models in float16: they train, also with a scaled loss, and give what float32 gives."""

import keras
import numpy as np
import pytest

from arrays import assert_equal
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTBackbone, ViTImageClassifier
from kmodels.models.gemma.presets import PRESETS
from tolerances import tolerance

rng = np.random.default_rng(0)
LABELS = np.arange(4) % 3
IMAGES = (rng.normal(size=(4, 16, 16, 3)) / 4 + LABELS[:, None, None, None]).astype("float32")
IDS = rng.integers(3, 320, (4, 9)).astype("int32")
MASK = np.ones_like(IDS)
MASK[0, :4] = MASK[1, [2, 5]] = MASK[2, 6:] = 0  # on the left, within, on the right
TEXTS = {"token_ids": IDS, "padding_mask": MASK}
STEPS, SCALE = 10, 2.0**18


def make(preset, dtype):
    if preset == "vit_debug":
        backbone = ViTBackbone.from_preset(preset, num_layers=1, dtype=dtype)
        return ViTImageClassifier(backbone, num_classes=3)
    return GemmaCausalLM(GemmaBackbone(**PRESETS[preset], dtype=dtype))


@pytest.mark.each_time("vit_debug-mixed_float16", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    ("preset", "policy"),
    [
        pytest.param("vit_debug", "mixed_float16", marks=pytest.mark.each_backend),
        pytest.param("gemma2_debug", "float16", marks=pytest.mark.each_backend),
        ("gemma3_debug", "mixed_float16"),
    ],
)
def test_training(preset, policy, tmp_path):
    x, y, weights, there = IMAGES, LABELS, None, slice(None)
    if preset != "vit_debug":
        x, y, weights, there = TEXTS, np.roll(IDS, -1, 1), MASK.astype("float32"), MASK == 1
    model, optimizer = make(preset, policy), keras.optimizers.SGD(0.02)
    if policy == "mixed_float16":  # begins too large, and grows after every third step
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, SCALE, 3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=[])
    losses = model.fit(x, y, 4, STEPS, 0, sample_weight=weights).history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    left_out = STEPS - int(model.optimizer.iterations)
    assert 0 < left_out < STEPS - 2 if policy == "mixed_float16" else left_out == 0

    exact = make(preset, "float32")
    exact.set_weights(model.get_weights())
    wanted = exact.predict(x, verbose=0)[there]
    found = model.predict(x, verbose=0)[there]
    limit = tolerance("logits", "float16") * max(1, np.abs(wanted).max())
    np.testing.assert_allclose(found.astype("float32"), wanted, rtol=0, atol=limit)

    model.save(tmp_path / "half.keras")
    again = keras.saving.load_model(tmp_path / "half.keras")
    assert [w.dtype for w in again.weights] == [w.dtype for w in model.weights]
    assert_equal(again.optimizer.variables, model.optimizer.variables)
