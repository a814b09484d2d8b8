"""Steps and memory of LoRA on kernels of a few bits."""

import keras
import numpy as np
import pytest
from keras import quantizers

from arrays import to_numpy
from kmodels.layers import GroupedDense
from kmodels.layers.changes import quantized_layers
from kmodels.layers.quantized import Quantization
from kmodels.lora import LoraSettings
from kmodels.lora.modules import expert_layers, linear_layers
from kmodels.models import GemmaCausalLM
from kmodels.tools.plan import Plan, Setup
from refusals import refused
from tolerances import tolerance

IDS = np.random.default_rng(0).integers(1, 60, (4, 12))
SETTINGS = {
    "int8": {"mode": "int8"},
    "int4": {"mode": "int4"},
    "nf4": {"mode": "nf4"},
    "fp4, scales in float32": {"mode": "fp4", "block": 32, "double": False},
}

EXPERTS = "gemma4_moe_debug"
INT8 = quantizers.Int8QuantizationConfig(activation_quantizer=None)


def layers_of(model):
    """The layers whose kernels are quantized, by path."""
    return linear_layers(model.backbone) | expert_layers(model.backbone)


def tuned(model):
    """The losses of three steps with LoRA, and the matrices after them."""
    keras.utils.set_random_seed(2)
    experts = ["experts/gate_up", "experts/down"] if expert_layers(model.backbone) else ()
    model.enable_lora(3, targets="all-linear", target_parameters=experts)
    model.compile(keras.optimizers.SGD(0.5))
    model.preprocessor = None
    inputs = {"token_ids": IDS[:, :-1], "padding_mask": np.ones_like(IDS[:, 1:])}
    history = model.fit(inputs, IDS[:, 1:], batch_size=4, epochs=3, verbose=0)
    adapters = {v.path: to_numpy(v) for v in model.trainable_variables}
    return history.history["loss"], adapters


@pytest.mark.each_time("gemma3_debug-nf4", "gemma4_moe_debug-int8")
@pytest.mark.parametrize(
    ("preset", "name"),
    [
        *(("gemma3_debug", name) for name in SETTINGS),
        (EXPERTS, "nf4"),
        *(pytest.param(EXPERTS, name, marks=pytest.mark.once) for name in ("int8", "int4")),
    ],
)
def test_steps_equal_those_on_the_dequantized_kernels(preset, name):
    packed = GemmaCausalLM.from_preset(preset, dtype="float32")
    plain = GemmaCausalLM.from_preset(preset, dtype="float32")
    plain.set_weights(packed.get_weights())
    packed.quantize(**SETTINGS[name])
    layers = layers_of(plain)
    for path, layer in layers_of(packed).items():
        kernel = to_numpy(layer.wide_kernel())
        assert np.abs(kernel - to_numpy(layers[path].kernel)).max() > 1e-4
        layers[path].kernel.assign(kernel)
    (losses, ours), (expected, theirs) = tuned(packed), tuned(plain)
    assert max(np.abs(ours[path]).max() for path in ours if path.endswith("lora_b")) > 1e-3
    np.testing.assert_allclose(
        losses, expected, rtol=0, atol=tolerance("quantized_step", "float32")
    )
    for path, values in theirs.items():
        np.testing.assert_allclose(
            ours[path], values, err_msg=path, rtol=0, atol=tolerance("quantized_step", "float32")
        )


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.parametrize("name", [pytest.param("int4", marks=pytest.mark.once), "nf4"])
def test_quantized_experts_are_saved_and_planned(name, tmp_path):
    model = GemmaCausalLM.from_preset(EXPERTS, dtype="float32", preprocessor=None)
    model.quantize(name)
    down = expert_layers(model.backbone)["block_0/experts/down"]
    assert down.kernel is None and down.quantized.mode == name
    assert {str(v.dtype) for v in down.quantized.variables} <= {"uint8", "int8", "float32"}
    model.save_to_preset(tmp_path / "quantized")
    again = GemmaCausalLM.from_preset(tmp_path / "quantized", preprocessor=None)
    np.testing.assert_array_equal(predicted(again), predicted(model))
    lora = LoraSettings(2)
    planned = Plan(EXPERTS, Setup(1, 16, lora=lora, quantize=name)).estimate.part("frozen weights")
    own = sum(np.prod(v.shape) * np.dtype(str(v.dtype)).itemsize for v in model.weights)
    assert planned == own
    model.dequantize()
    np.testing.assert_allclose(predicted(model), predicted(again), rtol=0, atol=tolerance("logits"))


@pytest.mark.once
@pytest.mark.parametrize("mode", ["int8", "int4", "nf4"])
def test_kernels_of_experts_of_an_odd_width(mode):
    layer = GroupedDense(3, 4, dtype="float32")
    layer.build((None, 7))
    kernel = to_numpy(layer.kernel)
    layer.quantize_kernel(Quantization(mode))
    one = GroupedDense(1, 4, dtype="float32")
    one.build((None, 7))
    one.kernel.assign(kernel[1:2])
    one.quantize_kernel(Quantization(mode))
    wide = to_numpy(layer.wide_kernel())
    np.testing.assert_array_equal(wide[1:2], to_numpy(one.wide_kernel()))
    assert 0 < np.abs(wide - kernel).max() < 0.2 * np.abs(kernel).max()


@pytest.mark.once
def test_bytes_of_a_parameter():
    bits = {"int8": 8, "int4": 4 + 40 / 128, "nf4": 4 + 8 / 64 + 32 / 64 / 256}
    for mode, wanted in bits.items():
        shapes = Quantization(mode).shapes(1152, 6912).values()
        stored = sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)
        assert stored * 8 / (1152 * 6912) == pytest.approx(wanted, rel=0.01)
    shapes = Quantization("nf4", double=False).shapes(1152, 6912).values()
    stored = sum(np.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)
    assert stored * 8 == (4 + 32 / 64) * 1152 * 6912


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "nf5"}, "mode is 'nf5'; choose int8, int4, nf4, fp4"),
        ({"mode": "int8", "block": 64}, "block is 64 for 'int8'; give an even number from 32 for"),
        ({"mode": "nf4", "block": 16}, "block is 16 for 'nf4'; give an even number from 32"),
        ({"mode": "nf4", "block": 64.0}, "block is 64.0; give a whole number"),
        ({"mode": "int4", "double": True}, "double is True for 'int4', whose scales are float32"),
        ({"mode": "nf4", "filters": "x"}, "filters is 'x', which no linear layer passes; they are"),
        ({"mode": "nf4", "filters": "["}, "filters is .* .unterminated character set"),
        ({"mode": "nf4", "filters": 3}, "filters is 3 .* give a regular expression"),
        ({"mode": "nf4", "config": INT8}, "mode is 'nf4' and config is for 'int8'"),
        ({"mode": None}, "mode is None; choose int8, int4"),
        ({"mode": None, "config": 3}, "mode is None; choose int8, int4"),
        ({"mode": "gptq"}, "mode is 'gptq'; choose int8, int4"),
        (
            {"config": quantizers.AWQConfig(dataset=["a"], tokenizer=len)},
            "mode is 'awq'; choose int8, int4",
        ),
        ({"config": quantizers.Int4QuantizationConfig(block_size=-1)}, "block_size is -1; give a"),
        (
            {"config": quantizers.Int8QuantizationConfig(quantizers.AbsMaxQuantizer(axis=0))},
            "quantize does not support weight_quantizer of a config",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    model = GemmaCausalLM.from_preset("gemma3_debug")
    before = len(model.get_weights())
    refused(message, model.quantize, **{"mode": None, **settings})
    assert len(model.get_weights()) == before


@pytest.mark.once
def test_a_refused_model_is_left_as_it_was():
    model = GemmaCausalLM.from_preset("gemma3_debug")
    model.enable_lora(2, modules_to_save=["block_1/mlp/down"])
    refused("block_1/mlp/down is trained as a whole; quantize the base", model.quantize, "int8")
    assert not quantized_layers(model)


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "wanted", "count"),
    [
        ({"config": INT8}, Quantization("int8"), 14),
        ({"config": quantizers.Int8QuantizationConfig()}, Quantization("int8"), 14),
        ({"config": "int8"}, Quantization("int8"), 14),
        ({"config": quantizers.Int4QuantizationConfig()}, Quantization("int4"), 14),
        (
            {"config": quantizers.Int4QuantizationConfig(block_size=32)},
            Quantization("int4", 32),
            14,
        ),
        ({"mode": "nf4", "filters": "^(up|down)$"}, Quantization("nf4"), 4),
        ({"mode": "nf4", "filters": ["^up$", "^down$"]}, Quantization("nf4"), 4),
        ({"mode": "nf4", "filters": lambda x: "block_0" in x.path}, Quantization("nf4"), 7),
    ],
)
def test_configs_and_filters_of_keras(settings, wanted, count):
    model = GemmaCausalLM.from_preset("gemma3_debug")
    model.quantize(**settings)
    kernels = quantized_layers(model)
    assert len(kernels) == count
    assert {layer.quantized.settings for layer in kernels.values()} == {wanted}


def test_quantized_after_it_was_tuned():
    """Adapters stay beside the kernels, or are rounded into them once they are merged."""
    model = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32", preprocessor=None)
    values = model.get_weights()
    _, matrices = tuned(model)
    other = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32", preprocessor=None)
    other.set_weights(values)
    other.quantize("int8")
    other.enable_lora(3, targets="all-linear")
    for variable in other.trainable_variables:
        variable.assign(matrices[variable.path])
    plain = predicted(model)
    model.quantize("int8")
    np.testing.assert_array_equal(predicted(model), predicted(other))
    assert 0 < np.abs(predicted(model) - plain).max() < 0.1
    assert {v.path for v in model.trainable_variables} == set(matrices)

    merged = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32", preprocessor=None)
    merged.set_weights(values)
    merged.enable_lora(3, targets="all-linear")
    for variable in merged.trainable_variables:
        variable.assign(matrices[variable.path])
    merged.merge_lora()
    merged.quantize("int8")
    assert 0 < np.abs(predicted(merged) - plain).max() < 0.1
    refused("unmerge_lora found no merged adapters", merged.unmerge_lora)


@pytest.mark.nightly("jax", "tensorflow")
def test_a_model_of_the_user_is_quantized_by_keras(tmp_path):
    backbone = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32").backbone
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    outputs = keras.layers.Dense(2, dtype="float32")(backbone({"token_ids": ids}))
    model = keras.Model({"token_ids": ids}, outputs)
    x = {"token_ids": IDS}
    plain = model.predict(x, verbose=0)
    with pytest.warns(UserWarning, match="does not have a `quantize` method"):
        model.quantize("int8")
    assert len(quantized_layers(backbone)) == 14
    coarse = model.predict(x, verbose=0)
    assert 0 < np.abs(coarse - plain).max() < 0.1
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), coarse)


@pytest.mark.once
def test_settings_of_a_config():
    for settings in (
        *(Quantization(mode) for mode in ("int8", "int4", "nf4", "fp4")),
        *(Quantization("int4", 32), Quantization("nf4", 128, False)),
    ):
        assert Quantization.of(settings.to_config()) == settings
    assert Quantization("nf4", 64, True).to_config() == "nf4"
    assert Quantization("nf4", 128, False).to_config() == {
        **{"mode": "nf4", "block": 128, "double": False}
    }
    for wrong in (3, {"mode": "nf4", "size": 3}, {}, ["nf4"]):
        refused("quantization", Quantization.of, wrong)


@pytest.mark.once
@pytest.mark.parametrize(
    ("rows", "groups"), [(64, 1), (192, 3), (96, 3), (32, 1), (100, 1), (27, 1), (1, 1)]
)
def test_widths_that_a_block_does_not_divide(rows, groups):
    settings = Quantization("nf4", double=False)
    assert settings.groups(rows) == groups


def predicted(model):
    inputs = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
    return to_numpy(model(inputs))


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("gemma3_debug", "int8"),
        pytest.param("gemma3_debug", "nf4", marks=pytest.mark.once),
        pytest.param(EXPERTS, "nf4", marks=pytest.mark.once),
    ],
)
def test_adapters_are_merged_onto_floats(preset, name, tmp_path, caplog):
    model = GemmaCausalLM.from_preset(preset, dtype="float32", preprocessor=None)
    model.save_to_preset(tmp_path / "base")
    model.quantize(name)
    refused("give onto='dequantized', or onto='original' and base", _adapted(model).merge_lora)
    before, plain = predicted(model), numbers(model)
    model.merge_lora(onto="dequantized")
    np.testing.assert_allclose(predicted(model), before, rtol=0, atol=tolerance("logits"))
    fresh = GemmaCausalLM.from_preset(preset, dtype="float32", preprocessor=None)
    assert {v.path for v in model.weights} == {v.path for v in fresh.weights}
    assert not caplog.text
    model.save_to_preset(tmp_path / "merged")
    again = GemmaCausalLM.from_preset(tmp_path / "merged", dtype="float32", preprocessor=None)
    np.testing.assert_array_equal(predicted(again), predicted(model))

    other = GemmaCausalLM.from_preset(tmp_path / "base", dtype="float32", preprocessor=None)
    other.quantize(name)
    _adapted(other, plain).merge_lora(onto="original", base=tmp_path / "base")
    expected = GemmaCausalLM.from_preset(tmp_path / "base", dtype="float32", preprocessor=None)
    _adapted(expected, plain).merge_lora()
    np.testing.assert_allclose(
        predicted(other), predicted(expected), rtol=0, atol=tolerance("logits")
    )
    assert np.abs(predicted(other) - before).max() > 1e-4
    assert "merge_lora: the kernels of" in caplog.text and "which the adapters were" in caplog.text


def _adapted(model, values=None):
    """The model with adapters that matter: its own, or those of `values`."""
    model.enable_lora(2, targets="all-linear")
    rng = np.random.default_rng(5)
    for variable in model.trainable_variables:
        drawn = rng.normal(size=variable.shape) * 0.05
        variable.assign(drawn if values is None else values[variable.path])
    return model


def numbers(model):
    return {v.path: to_numpy(v) for v in model.trainable_variables}


@pytest.mark.once
def test_a_merge_that_cannot_be_is_refused(tmp_path):
    model = GemmaCausalLM.from_preset("gemma3_debug")
    GemmaCausalLM.from_preset("gemma3_debug", hidden_dim=64).save_to_preset(tmp_path / "wider")
    refused("dequantize found no quantized kernels", model.dequantize)
    model.enable_lora(2)
    refused("found no quantized kernels, which onto is about", model.merge_lora, "dequantized")
    model = GemmaCausalLM.from_preset("gemma3_debug")
    model.quantize("nf4")
    refused("merge_lora found no adapters; call", model.merge_lora, "dequantized")
    model.enable_lora(2)
    for wrong in ({"onto": "floats"}, {"onto": "original"}, {"base": tmp_path}):
        refused("give onto='dequantized', or onto='original' with base", model.merge_lora, **wrong)
    given = {"onto": "original", "base": tmp_path / "wider"}
    refused("has no kernel for block_0", model.merge_lora, **given)
    assert model.backbone.blocks[0].mlp.up.quantized is not None


@pytest.mark.once
def test_a_dequantized_model_is_exported_and_trained(tmp_path):
    model = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32", preprocessor=None)
    model.quantize("nf4")
    before = predicted(model)
    model.dequantize()
    np.testing.assert_allclose(predicted(model), before, rtol=0, atol=tolerance("logits"))
    model.export_to_transformers(tmp_path / "hf")
    again = GemmaCausalLM.from_preset(tmp_path / "hf", dtype="float32", preprocessor=None)
    np.testing.assert_array_equal(predicted(again), predicted(model))
    fresh = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32", preprocessor=None)
    trained = {v.path for v in model.trainable_variables}
    assert trained == {v.path for v in fresh.trainable_variables}


@pytest.mark.once
def test_trained_copies_are_merged_onto_floats():
    model = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32", preprocessor=None)
    model.quantize("nf4")
    model.enable_lora(2, modules_to_save=["mlp/down"])
    base = predicted(model)
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign_add(rng.normal(size=variable.shape).astype("float32") * 0.05)
    before = predicted(model)
    assert np.abs(before - base).max() > 1e-2
    model.merge_lora(onto="dequantized")
    np.testing.assert_allclose(predicted(model), before, rtol=0, atol=tolerance("logits"))
    fresh = GemmaCausalLM.from_preset("gemma3_debug", dtype="float32", preprocessor=None)
    assert {v.path for v in model.weights} == {v.path for v in fresh.weights}
    model.unmerge_lora()
    np.testing.assert_allclose(predicted(model), before, rtol=0, atol=tolerance("logits"))
