"""Kernels of GGUF files that stay in few bits; the gguf package says what their numbers are."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.layers.quantized import Quantization
from kmodels.lora.modules import linear_layers
from kmodels.models import GemmaCausalLM, Llama3CausalLM, Qwen3CausalLM
from kmodels.models.blocks.gguf.reading import UNPACKED
from kmodels.ops.quantized_dense import dequantize
from refusals import refused
from tolerances import tolerance

pytestmark = pytest.mark.needs("gguf")
IDS = np.arange(1, 17)[None]
WIDTHS = {
    **{"vocabulary_size": 64, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2},
    **{"hidden_dim": 256, "intermediate_dim": 512, "head_dim": 64, "preprocessor": None},
}
FAMILIES = {
    "gemma3_debug": (GemmaCausalLM, "q4_k_m"),
    "qwen3_debug": (Qwen3CausalLM, "q6_k"),
    "llama3_debug": (Llama3CausalLM, "q4_0"),
}


def logits(model):
    return to_numpy(model({"token_ids": IDS, "padding_mask": np.ones_like(IDS)}))


@pytest.mark.each_backend
@pytest.mark.parametrize("kind", UNPACKED)
def test_numbers_equal_those_of_the_package(kind):
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    rng, rows, units = np.random.default_rng(3), 2 * max(block, 256), 5
    data = rng.integers(0, 256, (units, rows // block, size), "uint8")
    # Each float16 of a block is a number of usual size.
    places = {"q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}[kind]
    for at in places:
        drawn = rng.normal(size=(*data.shape[:2], 1)).astype("<f2")
        data[..., at : at + 2] = drawn.view("uint8")
    data = data.reshape(units, -1)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
    arrays = UNPACKED[kind](data)
    shapes = Quantization(kind).shapes(rows, units).values()
    assert [(x.shape, str(x.dtype)) for x in arrays] == [*shapes]
    arrays = [keras.ops.convert_to_tensor(array) for array in arrays]
    found = to_numpy(dequantize(arrays, kind, rows=rows, dtype="float32"))
    np.testing.assert_array_equal(found.T, expected)


@pytest.mark.each_backend
@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_is_kept_in_few_bits(name, tmp_path):
    task, dtype = FAMILIES[name]
    source = task.from_preset(name, dtype="float32", **WIDTHS)
    source.export_to_gguf(tmp_path / "it.gguf", dtype)
    plain = task.from_preset(tmp_path / "it.gguf", dtype="float32")
    packed = task.from_preset(tmp_path / "it.gguf", dtype="float32", quantized=True)
    assert not [x for x in linear_layers(plain.backbone).values() if x.quantized]
    layers = linear_layers(packed.backbone)
    assert all(layer.quantized for layer in layers.values())
    modes = {layer.quantized.mode for layer in layers.values()}
    assert modes == {"q4_k_m": {"q4_k", "q6_k"}}.get(dtype, {dtype})
    for path, layer in linear_layers(plain.backbone).items():
        np.testing.assert_array_equal(
            to_numpy(layers[path].wide_kernel()), to_numpy(layer.kernel), err_msg=path
        )
    ours, expected = logits(packed), logits(plain)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance("logits"))
    assert np.abs(expected - logits(source)).max() > 1e-3
    packed.enable_lora(2)
    packed.save_to_preset(tmp_path / "saved")
    again = task.from_preset(tmp_path / "saved", dtype="float32")
    np.testing.assert_array_equal(logits(again), ours)


def test_types_of_files_are_not_made(tmp_path):
    model = GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None)
    read = GemmaCausalLM.from_preset
    few = model.export_to_gguf(tmp_path / "few.gguf", "q8_0")
    refused("is q8_0 in its file, which no random", read, few, load_weights=False, quantized=True)
    whole = model.export_to_gguf(tmp_path / "whole.gguf", "float16")
    for origin in (whole, "gemma3_debug"):
        refused("has no quantized kernels that a layer keeps; leave", read, origin, quantized=True)
    refused("mode is 'q4_k', which is only read from files; choose int8", model.quantize, "q4_k")
