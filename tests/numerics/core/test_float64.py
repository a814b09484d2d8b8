"""float64: as exact as NumPy and timm in it, or refused in a line."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import layers, models
from refusals import refused
from tolerances import tolerance

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(0)


def error(model, inputs, expected) -> tuple[str, float]:
    found = to_numpy(keras.ops.stop_gradient(model(inputs, training=False)))
    return str(found.dtype), float(np.abs(found - expected).max())


if BACKEND == "jax":

    def test_jax_refuses_it() -> None:
        """However a model is made; JAX would make float32 of it."""
        reason = r"float64, and JAX has float32 alone until jax.config.update\('jax_enable_x64'"
        sizes = models.ViTBackbone.presets["vit_debug"]
        task = models.ViTImageClassifier
        for make in (
            lambda dtype: layers.Dense(2, dtype=dtype),
            lambda dtype: models.ViTBackbone(**sizes, dtype=dtype),
            lambda dtype: task(models.ViTBackbone(**sizes), 3, head_dtype=dtype),
        ):
            refused(f"^dtype is {reason}", make, "float64")
        keras.config.set_floatx("float64")
        try:
            refused(f"^floatx is {reason}", layers.Dense, 2, dtype="float32")
        finally:
            keras.config.set_floatx("float32")

else:

    def rotated(x):
        """(T, heads, 8), turned by its position."""
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None, None] * 1e4 ** (-np.arange(half) / half)
        one, two = x[..., :half], x[..., half:]
        cosine, sine = np.cos(angle), np.sin(angle)
        return np.concatenate([one * cosine - two * sine, two * cosine + one * sine], -1)

    def normed(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    def gemma(ids, w):
        """Logits of the one row of a Gemma of one block, in NumPy."""
        x = w["token_embedding/embeddings"][ids] * np.sqrt(32)
        y = normed(x, w["block_0/attention_norm/scale"])
        q, k, v = (
            (y @ w[f"block_0/attention/{n}/kernel"]).reshape(len(ids), -1, 8)
            for n in ("query", "key", "value")
        )
        k, v = (np.repeat(z, 2, axis=1) for z in (rotated(k), v))
        scores = np.einsum("qhd,khd->hqk", rotated(q), k) / np.sqrt(8)
        scores = np.exp(np.where(np.tri(len(ids)), scores, -np.inf))
        y = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + y.reshape(x.shape) @ w["block_0/attention/output/kernel"]
        y = normed(x, w["block_0/mlp_norm/scale"])
        gate, up, down = (w[f"block_0/mlp/{n}/kernel"] for n in ("gate", "up", "down"))
        g = y @ gate
        g = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
        x = normed(x + g * (y @ up) @ down, w["final_norm/scale"])
        return x @ w["token_embedding/embeddings"].T

    def test_gemma_gives_what_numpy_does() -> None:
        ids = RNG.integers(1, 300, 7)
        inputs = {"token_ids": ids[None].astype("int32"), "padding_mask": np.ones((1, 7), "int32")}
        model = models.GemmaCausalLM.from_preset("gemma_debug", num_layers=1, dtype="float64")
        held = zip(model.weights, model.get_weights(), strict=True)
        expected = gemma(ids, {weight.path: array for weight, array in held})
        assert np.abs(expected).max() > 0.5
        dtype, exact = error(model, inputs, expected)
        assert dtype == "float64" and exact < tolerance("logits", "float64")
        narrow = models.GemmaCausalLM(models.GemmaBackbone.from_preset("gemma_debug", num_layers=1))
        narrow.set_weights(model.get_weights())
        dtype, rounded = error(narrow, inputs, expected)
        assert dtype == "float32" and 100 * exact < rounded < tolerance("logits")

    @pytest.mark.needs("timm")
    @pytest.mark.across("torch", "tensorflow")
    def test_vit_gives_what_timm_does(references) -> None:
        import timm
        import torch

        images = RNG.random((2, 32, 32, 3))
        folder = references / "vit" / "timm_token" / "model"
        peer = timm.create_model(f"local-dir:{folder}", pretrained=True).double().eval()
        with torch.no_grad():
            expected = peer(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
        model = models.ViTImageClassifier.from_preset(folder, dtype="float64")
        dtype, exact = error(model, images, expected)
        assert dtype == "float64" and exact < tolerance("logits", "float64")
