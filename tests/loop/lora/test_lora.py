"""Adapters on a ViT: what trains, what stays, and what is refused."""

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels import lora
from kmodels.layers.changes import adapters
from kmodels.models import ViTBackbone, ViTImageClassifier
from refusals import refused
from tolerances import tolerance

SIZES = {"image_shape": (8, 8, 1), "patch_size": 4, "num_layers": 2, "num_heads": 2}
SIZES |= {"hidden_dim": 16, "mlp_dim": 24}
IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype("float32")
LABELS = np.array([0, 1, 2, 0])


def backbone(**settings):
    keras.utils.set_random_seed(7)
    return ViTBackbone(**SIZES, **settings)


def classifier(**settings):
    return ViTImageClassifier(backbone(**settings), num_classes=3)


def numbers(model):
    return {v.path: np.array(to_numpy(v)) for v in model.weights}


def output(model):
    return np.asarray(to_numpy(model(IMAGES, training=False)), "float32")


def shake(model, seed=0):
    """Gives every adapter values as after training."""
    rng = np.random.default_rng(seed)
    for adapter in adapters(model).values():
        for variable in (adapter.a, adapter.b):
            variable.assign(rng.normal(size=variable.shape).astype("float32") * 0.3)
        if adapter.magnitude is not None:
            scale = 1 + rng.random(adapter.magnitude.shape).astype("float32")
            adapter.magnitude.assign(to_numpy(adapter.magnitude) * scale)


@pytest.fixture(scope="module")
def plain():
    return backbone()


@pytest.mark.each_time("settings1-bfloat16", "settings3-float32", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "float32"),
        ({}, "bfloat16"),
        ({"dora": True}, "float32"),
        ({"rslora": True, "alpha": 3.0}, "float32"),
    ],
)
def test_starts_as_the_identity_merges_exactly_and_goes_away(settings, dtype):
    model = backbone(dtype=dtype)
    # Frozen: on torch what keeps nothing for a backward pass runs by other kernels.
    model.trainable = False
    frozen = output(model)
    model.trainable = True
    before, base = output(model), numbers(model)
    model.enable_lora(4, targets="all-linear", **settings)
    # Adapters of narrow weights are wide.
    assert {keras.backend.standardize_dtype(v.dtype) for v in model.trainable_weights} == {
        "float32"
    }
    np.testing.assert_array_equal(output(model), before)
    shake(model)
    adapted = output(model)
    assert np.abs(adapted - before).max() > 0.1
    with pytest.raises(ZeroDivisionError), lora.disabled(model):
        np.testing.assert_array_equal(output(model), frozen)
        raise ZeroDivisionError
    np.testing.assert_array_equal(output(model), adapted)
    model.merge_lora()
    assert numbers(model).keys() == base.keys()
    near = 2e-6 * np.abs(adapted).max() if dtype == "float32" else 0.1
    np.testing.assert_allclose(output(model), adapted, rtol=0, atol=near)
    model.unmerge_lora()
    after = numbers(model)
    assert_equal({path: after[path] for path in base}, base)
    np.testing.assert_array_equal(output(model), adapted)


@pytest.mark.once
def test_trainable_parameters_are_the_sum_over_layers():
    model = backbone()
    model.enable_lora(3, targets=("query", r"block_1/mlp/.*"))
    expected = 2 * 3 * (16 + 16) + 2 * 3 * (16 + 24)
    assert sum(int(np.prod(v.shape)) for v in model.trainable_weights) == expected
    assert {v.path for v in model.trainable_weights} == {
        f"{path}/{part}"
        for path in (
            *(f"block_{i}/attention/query" for i in (0, 1)),
            "block_1/mlp/up",
            "block_1/mlp/down",
        )
        for part in ("lora_a", "lora_b")
    }
    assert adapters(model)["block_0/attention/query"].settings.scaling == 1.0


@pytest.mark.each_time("int4", on=("jax", "tensorflow"))
@pytest.mark.parametrize("mode", [pytest.param("int8", marks=pytest.mark.once), "int4", "nf4"])
def test_on_a_quantized_base(mode):
    model = classifier()
    plain = output(model)
    model.backbone.quantize(mode)
    coarse = output(model)
    assert 0 < np.abs(coarse - plain).max() < {"int8": 0.05, "int4": 0.8, "nf4": 0.8}[mode]
    model.enable_lora(2, targets="all-linear")
    np.testing.assert_array_equal(output(model), coarse)
    refused(rf"merge_lora would round .* 11 more are quantized to {mode}", model.merge_lora)
    base = numbers(model)
    model.compile(
        keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.fit(IMAGES, LABELS, epochs=3, verbose=0)
    after = numbers(model)
    assert all(
        np.array_equal(base[p], after[p]) for p in base if "lora" not in p and "logits" not in p
    )
    assert not np.array_equal(after["block_0/mlp/up/lora_a"], base["block_0/mlp/up/lora_a"])


@pytest.mark.nightly("jax", "tensorflow")
def test_a_module_of_a_quantized_base_is_trained_as_a_whole(tmp_path):
    model = classifier()
    model.backbone.quantize("int8")
    coarse = model.predict(IMAGES, verbose=0)
    model.enable_lora(2, targets=["query"], modules_to_save=["mlp/up"])
    np.testing.assert_allclose(
        model.predict(IMAGES, verbose=0), coarse, rtol=0, atol=tolerance("logits_across")
    )
    base = numbers(model)
    model.compile(
        keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    keras.Model.fit(model, IMAGES, LABELS, epochs=2, verbose=0)
    after, name = numbers(model), "block_0/mlp/up/lora_kernel"
    assert not np.array_equal(after[name], base[name])
    kept = "block_0/mlp/up/kernel_int8"
    np.testing.assert_array_equal(after[kept], base[kept])
    tuned = model.predict(IMAGES, verbose=0)
    assert np.abs(tuned - coarse).max() > 0.01
    model.save_to_preset(tmp_path / "it")
    again = type(model).from_preset(tmp_path / "it")
    np.testing.assert_allclose(again.predict(IMAGES, verbose=0), tuned, rtol=0, atol=1e-6)
    for variable in model.trainable_weights:
        if "logits" in variable.path:
            variable.assign(base[variable.path])
    with lora.disabled(model):
        found = model.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(found, coarse, rtol=0, atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "LoRA rank is 0; give a whole number from 1"),
        ({"rank": 2, "alpha": 1e308}, r"LoRA alpha is 1e\+308 with rank 2, a factor that float32"),
        ({"rank": 2, "alpha": 0}, "alpha is 0; give a number above 0"),
        ({"rank": 2, "dropout": 1.0}, r"dropout is 1.0; give a rate in \[0, 1\)"),
        ({"rank": 2, "targets": ()}, "got no targets"),
        (
            {"rank": 2, "targets": ("query", "q_proj")},
            "'q_proj' is not a linear layer .* attention/key",
        ),
        ({"rank": 2, "targets": "block_["}, r"'block_\[' is not a pattern"),
    ],
)
def test_wrong_settings_change_nothing(plain, settings, message):
    before = numbers(plain).keys()
    refused(message, plain.enable_lora, **settings)
    assert numbers(plain).keys() == before and len(plain.trainable_weights) == len(before)


@pytest.mark.once
def test_a_rank_above_the_width_is_warned_of():
    model = backbone()
    with pytest.warns(UserWarning, match=r"rank 17 is above 16, the smaller side of block_\S+ and"):
        model.enable_lora(rank=17)
    assert model.trainable_weights[0].shape == (16, 17)


@pytest.mark.once
def test_wrong_order_is_refused():
    model = backbone()
    for call, message in (
        (model.merge_lora, "merge_lora found no adapters; call enable_lora"),
        (model.unmerge_lora, "unmerge_lora found no merged adapters"),
        (
            lambda: model.save_adapter("unused"),
            "save_adapter found no LoRA adapters; call enable_lora",
        ),
        (lambda: lora.disabled(model).__enter__(), "found no LoRA adapters"),
        (lambda: model.quantize("float8"), "mode is 'float8'; choose int8, int4, nf4, fp4"),
    ):
        refused(message, call)
    model.enable_lora(2)
    refused("has LoRA adapters already", model.enable_lora, 2)


@pytest.mark.parametrize("around", ["backbone", "task", "model of the user"])
def test_trainable_never_unfreezes_the_base_of_adapters(around):
    task = classifier()
    task.enable_lora(2, modules_to_save=["classifier", "block_0/mlp/up"])
    part = {"backbone": task.backbone, "task": task}.get(around)
    if part is None:
        images = keras.Input((8, 8, 1))
        part = keras.Model(images, task.backbone(images))
    wanted = {v.path for v in part.trainable_variables}
    assert any("lora" in path for path in wanted)
    part.trainable = True
    assert {v.path for v in part.trainable_variables} == wanted
    part.trainable = False
    assert not part.trainable_variables
    part.trainable = True
    assert {v.path for v in part.trainable_variables} == wanted
    table = task.backbone.get_layer("patch_embedding")
    table.trainable = False
    table.trainable = True
    unfrozen = {v.path for v in part.trainable_variables}
    assert unfrozen > wanted
    part.trainable = True
    assert {v.path for v in part.trainable_variables} == unfrozen
