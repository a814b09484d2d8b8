"""Keras' conventions, held by every layer of kmodels: what `keras.layers` do, these do too."""

import copy
import importlib
import inspect
import json
import math
import pickle
import pkgutil
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import pytest

import kmodels
from arrays import to_numpy
from kmodels import layers, transforms
from kmodels.models import (
    CLIPTextConfig,
    Gemma3VisionEncoder,
    GemmaConfig,
    Llama3Config,
    Qwen3Config,
    ViTConfig,
)
from kmodels.models.clip import CLIPTextBlock
from kmodels.models.gemma.model import GemmaAttention, GemmaBlock
from kmodels.models.llama3 import Llama3Block
from kmodels.models.qwen3 import Qwen3Block
from kmodels.models.siglip import SigLIPTextBlock, SigLIPTextConfig
from kmodels.models.vit.detection import ObjectQueries, PatchMemory
from kmodels.models.vit.dino_head import DINOHead
from kmodels.models.vit.fewer_tokens import PatchDropout
from kmodels.models.vit.layers import PatchEmbedding, Pooling, Tokens
from kmodels.models.vit.model import Block
from kmodels.models.vit.naflex.layers import NaFlexPatchEmbedding
from kmodels.models.vit.segmentation.mask_transformer import MaskHead, Queries, Upscale
from refusals import refused

VIT = ViTConfig(
    image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=12,
    dropout_rate=0.1, attention_dropout=0.1, layer_scale=0.1, num_register_tokens=1,
)  # fmt: skip
GEMMA = GemmaConfig(
    vocabulary_size=11, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=8,
    intermediate_dim=24, head_dim=4, use_query_key_norm=True, use_post_ffw_norm=True, dropout=0.1,
)  # fmt: skip
GEMMA4 = replace(GEMMA, attention_k_eq_v=True, use_value_norm=True, use_layer_scalar=True)
CLIP = CLIPTextConfig(
    vocabulary_size=11, embedding_dim=8, hidden_dim=8, num_layers=1, num_heads=2,
    intermediate_dim=12, attention_dropout=0.1,
)  # fmt: skip
SIGLIP = SigLIPTextConfig(11, 8, 8, 1, 2, 12, attention_dropout=0.1)
LLAMA3 = Llama3Config(11, 1, 2, 1, 8, 12, 4, dropout=0.1)
QWEN3 = Qwen3Config(
    vocabulary_size=11, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=8,
    intermediate_dim=12, head_dim=4, dropout=0.1,
)  # fmt: skip
SETTINGS = {
    "kernel_initializer": "he_normal",
    "kernel_regularizer": keras.regularizers.L2(1e-3),
    "bias_initializer": keras.initializers.Constant(0.1),
    "kernel_constraint": "max_norm",
}


@dataclass
class Case:
    """A layer, what it is called on, and what comes out.

    `weights` counts trainable weights, frozen ones and seed generators.
    """

    layer: type
    settings: dict[str, Any]
    shape: tuple[int, ...]
    output: tuple[int, ...]
    weights: tuple[int, int, int]
    ids: bool = False
    any_length: bool = True
    masks: bool = True
    losses: int = 0
    name: str = field(default="")

    def __post_init__(self):
        self.name = self.name or self.layer.__name__

    def make(self, **more: Any) -> Any:
        return self.layer(**self.settings, **more)

    def input(self, batch: int = 2, dtype: str = "float32") -> np.ndarray:
        rng = np.random.default_rng(0)
        shape = (batch, *self.shape[1:])
        return rng.integers(0, 5, shape) if self.ids else rng.normal(size=shape).astype(dtype)


TOKENS = (2, 5, 8)
CASES = [
    Case(layers.Dense, {"units": 3}, TOKENS, (2, 5, 3), (2, 0, 0)),
    Case(layers.Dense, {"units": 3, "activation": "gelu", "use_bias": False, **SETTINGS}, (2, 8),
         (2, 3), (1, 0, 0), losses=1, name="Dense with settings"),
    Case(layers.LayerNorm, {"epsilon": 1e-5}, TOKENS, TOKENS, (2, 0, 0)),
    Case(layers.LayerNorm, {"scale_regularizer": "l2", "bias_initializer": "ones", "axis": 1},
         (2, 8), (2, 8), (2, 0, 0), losses=1, name="LayerNorm with settings"),
    Case(layers.RMSNorm, {}, TOKENS, TOKENS, (1, 0, 0)),
    Case(layers.RMSNorm, {"offset": 0.0}, TOKENS, TOKENS, (1, 0, 0), name="RMSNorm, plain scale"),
    Case(layers.RMSNorm, {"use_scale": False}, TOKENS, TOKENS, (0, 0, 0), name="RMSNorm, no scale"),
    Case(layers.LayerScale, {"init": 0.5}, TOKENS, TOKENS, (1, 0, 0)),
    Case(layers.Dropout, {"rate": 0.3}, TOKENS, TOKENS, (0, 0, 1)),
    Case(layers.Dropout, {"rate": 0.3, "noise_shape": (None, 1, 8), "seed": 3}, TOKENS, TOKENS,
         (0, 0, 1), name="Dropout with noise_shape"),
    Case(layers.DropPath, {"rate": 0.3}, TOKENS, TOKENS, (0, 0, 1)),
    Case(layers.Embedding, {"input_dim": 7, "output_dim": 4, "scaled": False}, (2, 5), (2, 5, 4),
         (1, 0, 0), ids=True, masks=False, name="Embedding, unscaled"),
    Case(layers.Embedding, {"input_dim": 7, "output_dim": 4}, (2, 5), (2, 5, 4), (1, 0, 0),
         ids=True, masks=False),
    Case(layers.Embedding, {"input_dim": 7, "output_dim": 4, "mask_zero": True,
         "embeddings_initializer": "uniform", "embeddings_regularizer": "l1", "soft_cap": 3.0},
         (2, 5), (2, 5, 4), (1, 0, 0), ids=True, losses=1, name="Embedding with settings"),
    Case(layers.Attention, {"num_heads": 2}, TOKENS, TOKENS, (8, 0, 0)),
    Case(layers.Attention, {"num_heads": 2, "dropout": 0.1, "qk_norm": True, "use_bias": False,
         **SETTINGS}, TOKENS, TOKENS, (8, 0, 1), losses=4, name="Attention with settings"),
    Case(layers.Attention, {"num_heads": 2, "causal": True, "rope_wavelength": 9.0,
         "unbiased": ["key"]}, TOKENS, TOKENS, (7, 0, 0), name="Attention, causal and rotary"),
    Case(layers.PositionEmbedding, {"sequence_length": 7}, TOKENS, TOKENS, (1, 0, 0)),
    Case(layers.MLP, {"hidden_dim": 6, "dropout": 0.1}, TOKENS, TOKENS, (4, 0, 1)),
    Case(layers.MLP, {"hidden_dim": 6, "activation": "relu", **SETTINGS}, TOKENS, TOKENS, (4, 0, 0),
         losses=2, name="MLP with settings"),
    Case(layers.GatedMLP, {"hidden_dim": 6}, TOKENS, TOKENS, (3, 0, 0)),
    Case(layers.SwiGLU, {"hidden_dim": 6, "dropout": 0.1}, TOKENS, TOKENS, (6, 0, 1)),
    Case(PatchEmbedding, {"patch_size": 4, "units": 8}, (2, 8, 8, 3), (2, 4, 8), (2, 0, 0),
         any_length=False, masks=False),
    # The one patch stays: lengths of outputs are those of inputs here.
    Case(PatchDropout, {"config": replace(VIT, patch_drop_rate=0.5)}, (2, 3, 8), (2, 3, 8),
         (0, 0, 1), any_length=False, masks=False),
    Case(Tokens, {"config": VIT}, (2, 4, 8), (2, 6, 8), (3, 0, 0), any_length=False, masks=False),
    Case(NaFlexPatchEmbedding, {"units": 3}, TOKENS, (2, 5, 3), (2, 0, 0)),
    Case(Pooling, {"kind": "token", "config": VIT}, (2, 6, 8), (2, 8), (0, 0, 0), masks=False,
         name="Pooling token"),
    Case(Pooling, {"kind": "map", "config": VIT}, (2, 6, 8), (2, 8), (15, 0, 0), masks=False,
         name="Pooling map"),
    Case(Block, {"config": VIT, "drop_path": 0.2}, TOKENS, TOKENS, (18, 0, 4)),
    Case(Queries, {"num_queries": 3}, TOKENS, (2, 8, 8), (1, 0, 0), any_length=False, masks=False),
    Case(Upscale, {"approximate": True}, (2, 2, 3, 8), (2, 4, 6, 8), (5, 0, 0), any_length=False,
         masks=False),
    Case(MaskHead, {}, TOKENS, TOKENS, (6, 0, 0), masks=False),
    Case(PatchMemory, {"config": VIT, "units": 8}, (2, 6, 8), (2, 4, 8), (4, 0, 0),
         any_length=False, masks=False),
    Case(ObjectQueries, {"num_queries": 3}, TOKENS, (2, 3, 8), (1, 0, 0), any_length=False,
         masks=False),
    Case(DINOHead, {"units": 5, "hidden_dim": 6, "bottleneck_dim": 4}, (2, 8), (2, 5), (7, 0, 0),
         masks=False),
    Case(GemmaAttention, {"config": GEMMA, "index": 0}, TOKENS, TOKENS, (6, 0, 1)),
    Case(GemmaBlock, {"config": GEMMA, "index": 0}, TOKENS, TOKENS, (12, 0, 3)),
    Case(GemmaBlock, {"config": GEMMA4, "index": 0}, TOKENS, TOKENS, (11, 1, 3), name="Gemma 4"),
    Case(Gemma3VisionEncoder, {**{"image_size": 8, "patch_size": 2, "pool_size": 2, "num_heads": 2,
         "hidden_dim": 8}, **{"num_layers": 1, "intermediate_dim": 12, "output_dim": 6}}, (2, 3, 8,
         8, 3), (2, 12, 6), (23, 0, 0), any_length=False, masks=False),
    Case(CLIPTextBlock, {"config": CLIP}, TOKENS, TOKENS, (16, 0, 1)),
    Case(SigLIPTextBlock, {"config": SIGLIP}, TOKENS, TOKENS, (16, 0, 1)),
    Case(Llama3Block, {"config": LLAMA3, "index": 0}, TOKENS, TOKENS, (9, 0, 3)),
    Case(Qwen3Block, {"config": QWEN3, "index": 0}, TOKENS, TOKENS, (11, 0, 3)),
]  # fmt: skip
# Bases, which are there to be inherited from.
ABSTRACT = {
    "Layer",
    "WithKernel",
    "Projections",
    "DecoderAttention",
    "DecoderBlock",
    "EncoderBlock",
    *("Experts", "GroupedDense", "Router"),  # or two outputs: tests/families/gemma4/test_gemma4.py
    # Towers hold a whole model, and the head takes two inputs: tests/families/two_towers.
    *("NaFlexVisionTower", "SimilarityHead", "TextTower", "VisionTower"),
    # No batch, two inputs or two outputs: tests/families.
    *("MAEDecoder", "PatchCoordinates", "PatchMasking", "PerLayerEmbedding"),
    *("MaskProbabilities", "QueryMasking"),
    # Two inputs, or float32 boxes of a layer that starts at zeros: tests/families/vit.
    *("DetectionBlock", "BoxHead"),
    # Two inputs, or bounds that stay as they are: tests/families/gemma4.
    *("ClippedDense", "Gemma4VisionBlock", "Gemma4VisionEmbedder", "Gemma4VisionEncoder"),
    "PatchFeatures",
    *("NaFlexPooling", "NaFlexTokens"),  # of several inputs: tests/families/vit/test_naflex.py
}
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def layer_classes() -> set[type]:
    """Every layer that a module of kmodels defines, but bases and what is private."""
    found = set()
    for module in pkgutil.walk_packages(kmodels.__path__, "kmodels."):
        if module.name.startswith(("kmodels.layers.", "kmodels.models.")):
            if module.name.rsplit("_", 1)[-1] in ("jax", "torch", "tensorflow"):
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                if inspect.isclass(value) and issubclass(value, layers.Layer) and name[0] != "_":
                    found.add(value)
    return {cls for cls in found if cls.__name__ not in ABSTRACT}


@pytest.mark.once
def test_every_layer_has_a_case():
    lacking = layer_classes() - {case.layer for case in CASES}
    assert not lacking, f"add a Case for {sorted(cls.__name__ for cls in lacking)}"
    assert len({case.layer for case in CASES}) >= 15


@pytest.mark.once
@cases
def test_config_round_trip(case):
    layer = case.make(name="mine", trainable=False, dtype="mixed_bfloat16")
    config = layer.get_config()
    again = type(layer).from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config
    assert (again.name, again.trainable, again.dtype_policy.name) == (
        *("mine", False, "mixed_bfloat16"),
    )
    described = keras.saving.serialize_keras_object(layer)
    assert described["registered_name"].startswith("kmodels>")
    described = json.loads(json.dumps(described))
    assert keras.saving.deserialize_keras_object(described).get_config() == config
    # Keras compares what `dir` lists too: an attribute made in passing would not come back.
    assert set(dir(again)) == set(dir(layer))


@cases
def test_numbers_of_a_built_layer(case):
    layer = case.make()
    layer.build(case.shape)
    seeds = len(layer.variables) - len(layer.weights)
    counts = (len(layer.trainable_weights), len(layer.non_trainable_weights), seeds)
    assert counts == case.weights
    y = layer(case.input())
    assert y.shape == case.output
    assert len(layer.losses) == case.losses
    assert layer.compute_output_shape(case.shape) == case.output
    assert layer.count_params() == sum(int(np.prod(w.shape)) for w in layer.weights)
    weights = layer.get_weights()
    layer.set_weights([w + 0.5 for w in weights])
    for before, after in zip(weights, layer.get_weights(), strict=True):
        np.testing.assert_allclose(after, before + 0.5, atol=1e-6)


@cases
def test_symbolic_and_dynamic_shapes(case):
    dtype = "int32" if case.ids else "float32"
    lengths = [case.shape[1]] + [None] * (case.any_length and len(case.shape) > 1)
    for length in lengths if len(case.shape) > 2 or case.ids else [case.shape[1]]:
        x = keras.Input((length, *case.shape[2:]), dtype=dtype)
        y = case.make()(x)
        wanted = (None, *case.output[1:])
        if length is None and len(case.output) > 2:
            wanted = (None, None, *case.output[2:])
        assert y.shape == wanted
        model = keras.Model(x, y)
        # Called as it is, it is on JAX a program for each op and size of a batch.
        jit = keras.backend.backend() == "jax"
        call = transforms.jit(lambda x, model=model: model(x)) if jit else model
        for batch in (2, 0):
            assert call(case.input(batch)).shape == (batch, *case.output[1:])


@cases
def test_dtype_policies(case):
    """Every policy in dtypes; in numbers those that differ in what they compute."""
    # JAX has no float64 unless it is told before it starts.
    wide = ["float64"] if keras.backend.backend() != "jax" else []
    exact = case.make()
    wanted = to_numpy(exact(case.input()))
    atol = {"float64": 1e-6, "float16": 1e-2, "bfloat16": 1e-1}
    for name in ("bfloat16", "mixed_bfloat16", "float16", "mixed_float16", *wide):
        policy = keras.DTypePolicy(name)
        layer = case.make(dtype=policy)
        symbolic = name in ("bfloat16", "mixed_float16")
        if symbolic:
            y = layer(keras.Input(case.shape[1:], dtype="int32" if case.ids else "float32"))
        else:
            layer.build(case.shape)
            layer.set_weights(exact.get_weights())
            y = layer(case.input())
        assert keras.backend.standardize_dtype(y.dtype) == policy.compute_dtype
        dtypes = {keras.backend.standardize_dtype(w.dtype) for w in layer.weights}
        assert dtypes <= {policy.variable_dtype}
        if symbolic:
            continue
        found = to_numpy(y).astype("float32")
        scale = max(1.0, np.abs(wanted).max())
        assert np.abs(found - wanted).max() / scale < atol[policy.compute_dtype]


@pytest.mark.once
@cases
def test_policies_by_path(case):
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    policies["mine/mlp"] = keras.DTypePolicy("float32")
    layer = case.make(dtype=policies, name="mine")
    y = layer(case.input())
    again = type(layer).from_config(json.loads(json.dumps(layer.get_config())))
    again.build(case.shape)
    assert again.get_config() == layer.get_config()
    if hasattr(again, "mlp") and isinstance(again.mlp, keras.layers.Layer):
        assert again.mlp.compute_dtype == "float32"
    else:
        assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"


@cases
def test_masks(case):
    layer = case.make()
    assert layer.supports_masking == case.masks
    if case.ids or not case.masks or len(case.shape) < 3:
        return
    x, ids = case.input(), np.array([[1, 2, 0, 0, 0], [1, 1, 1, 1, 0]])
    mask = keras.layers.Embedding(3, 8, mask_zero=True).compute_mask(ids)
    wrapped = keras.layers.Masking(mask_value=9.0)(np.where(ids[..., None] == 0, 9.0, x))
    np.testing.assert_array_equal(to_numpy(wrapped._keras_mask), to_numpy(mask))
    np.testing.assert_array_equal(to_numpy(layer(wrapped)._keras_mask), ids != 0)


@pytest.mark.once
@cases
def test_copies(case):
    """`deepcopy` and `pickle` give the same numbers, in variables of their own."""
    model = keras.Sequential([case.make(dtype="mixed_bfloat16")])
    wanted = to_numpy(model(case.input()))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_allclose(to_numpy(again(case.input())), wanted, atol=1e-6)
        for one, other in zip(model.weights, again.weights, strict=True):
            assert one is not other


class Wrapped(keras.Model):
    """A user's own model."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, x):
        return self.layer(x)

    def get_config(self):
        return {"layer": keras.saving.serialize_keras_object(self.layer), "name": self.name}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("layer")), **config)


@pytest.mark.once
@cases
def test_keras_files(case, tmp_path):
    shape, dtype = case.shape[1:], "int32" if case.ids else "float32"
    x = keras.Input(shape, dtype=dtype)
    models = [keras.Model(x, case.make(name="held")(x))]
    if case.layer in (layers.Dense, layers.Embedding, layers.MLP, Block):
        held = case.make(name="held", dtype="mixed_bfloat16")
        models.append(keras.Sequential([keras.Input(shape, dtype=dtype), held]))
        models.append(Wrapped(case.make(name="held")))
    for i, model in enumerate(models):
        wanted = to_numpy(model(case.input()))
        model.save(path := tmp_path / f"{i}.keras")
        again = keras.saving.load_model(path, custom_objects={"Wrapped": Wrapped})
        np.testing.assert_allclose(to_numpy(again(case.input())), wanted, atol=1e-6)
        assert len(again.losses) == case.losses


def test_all_train_inside_fit():
    """One step of plain gradient descent moves every layer; regularizers are in the loss."""
    inputs, outputs, held = [], [], []
    for case in CASES:
        x = keras.Input(case.shape[1:], dtype="int32" if case.ids else "float32")
        held.append(case.make())
        y = keras.layers.Dense(1)(held[-1](x))
        inputs.append(x)
        outputs.append(
            keras.ops.mean(
                keras.ops.reshape(y, (-1, math.prod(y.shape[1:-1]))), axis=-1, keepdims=True
            )
        )
    model = keras.Model(inputs, keras.ops.concatenate(outputs, axis=-1))
    # By Python, which is quicker for one evaluation; the step is compiled.
    model.compile(keras.optimizers.SGD(1e-2), "mse", run_eagerly=True)
    before = [[w.copy() for w in layer.get_weights()] for layer in held]
    assert len(model.losses) == sum(case.losses for case in CASES)
    regularized = sum(float(to_numpy(loss)) for loss in model.losses)
    x, y = [case.input() for case in CASES], np.ones((2, len(CASES)), "float32")
    plain = float(np.mean((to_numpy(model(x)) - y) ** 2))
    (evaluated,) = [model.evaluate(x, y, verbose=0)]
    assert abs(evaluated - plain - regularized) < 1e-3 * evaluated
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    model.fit(x, y, verbose=0)
    for case, layer, weights in zip(CASES, held, before, strict=True):
        moved = [np.abs(a - b).max() > 0 for a, b in zip(weights, layer.get_weights(), strict=True)]
        # Softmax does not see the bias of the keys.
        assert sum(moved) >= len(moved) - 1, (case.name, moved)
        assert any(moved) or not moved


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.Dense(0), "units is 0; give at least 1"),
        (lambda: layers.Dense(2.5), r"units is 2\.5; give a whole number"),  # pyright: ignore
        (lambda: layers.Dropout(1.0), r"Dropout got the rate 1\.0; give one in \[0, 1\)"),
        (
            lambda: layers.Dropout(0.5, noise_shape=(1, 2))(np.ones((2, 3, 4), "float32")),
            r"noise_shape is \(1, 2\) for an input of 3 axes",
        ),
        (lambda: layers.LayerNorm(-1.5), "epsilon is -1.5; give a number from 0"),
        (lambda: layers.RMSNorm(float("nan")), "epsilon is nan; give a finite number"),
        (
            lambda: layers.LayerNorm(axis=1)(np.ones((2, 3, 4), "float32")),
            "axis is 1 for an input of 3 axes; kmodels normalises the last one",
        ),
        (
            lambda: layers.RMSNorm(axis=[-2, -1])(np.ones((2, 3, 4), "float32")),
            r"axis is \[-2, -1\] for an input of 3 axes; kmodels normalises the last one",
        ),
        (
            lambda: layers.Attention(3)(np.ones((2, 3, 4), "float32")),
            "3 heads do not divide the width of 4",
        ),
        (lambda: layers.Embedding(0, 2), "input_dim is 0; give at least 1"),
        (lambda: layers.MLP(0), "hidden_dim is 0; give at least 1"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    refused(message, make)


@pytest.mark.once
@pytest.mark.parametrize("norm", [layers.LayerNorm, layers.RMSNorm])
def test_the_last_axis_may_stand_in_a_list(norm):
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    for axis in ([-1], (2,)):
        layer = norm.from_config(norm(axis=axis).get_config())
        np.testing.assert_array_equal(to_numpy(layer(x)), to_numpy(norm()(x)))


@pytest.mark.once
def test_a_subclass_that_hides_an_argument_says_so():
    class Hiding(layers.Layer):
        def __init__(self, size, **kwargs):
            super().__init__(**kwargs)
            self._size = size

    with pytest.raises(NotImplementedError, match="Hiding keeps no attribute size; keep each"):
        Hiding(3).get_config()


@pytest.mark.parametrize("spec", ["he_normal", keras.initializers.Orthogonal(seed=3), None])
def test_initializers_as_keras_takes_them(spec):
    layer = layers.Dense(50, kernel_initializer=spec)
    plain = keras.layers.Dense(50, kernel_initializer=spec or "glorot_uniform")
    for dense in (layer, plain):
        dense.build((None, 100))
    kernels = [to_numpy(dense.kernel) for dense in (layer, plain)]
    assert abs(kernels[0].std() / kernels[1].std() - 1) < 0.05
    if not isinstance(spec, str | None):  # with a seed of its own it is drawn as in Keras
        np.testing.assert_array_equal(kernels[0], kernels[1])
