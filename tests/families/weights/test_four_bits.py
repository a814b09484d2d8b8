"""Directories in few bits of bitsandbytes, GPTQ, AWQ and in FP8, written by their definitions."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import op_cases
from arrays import to_numpy
from kmodels.layers.quantized import Quantization, quantize_array
from kmodels.lora.modules import linear_layers
from kmodels.models import (
    Gemma3ImageTextLM,
    GemmaCausalLM,
    Qwen3Backbone,
    Qwen3CausalLM,
    ViTImageClassifier,
)
from refusals import refused
from tolerances import tolerance

BLOCK, NESTED = 64, 256
TABLES = {
    "nf4": np.float32([*map(float, op_cases.NF4.split())]),
    "fp4": np.float32([*op_cases.FP4, *(-x for x in op_cases.FP4)]) / np.float32(12),
}
DYNAMIC = op_cases.dynamic().astype("float32")
IDS = np.arange(1, 20)[None]


def nearest(values, numbers):
    """The place of the number next to each value."""
    return np.abs(values[..., None] - numbers).argmin(-1).astype("uint8")


def packed(weight, kind, double):
    """The tensors of a weight (out, in) by their endings, and the floats that they stand for."""
    blocks = weight.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1)
    codes = nearest(blocks / np.maximum(scale, 1e-30)[:, None], TABLES[kind])
    state = {
        **{"quant_type": kind, "blocksize": BLOCK, "dtype": "float32"},
        "shape": list(weight.shape),
    }
    parts = {"absmax": scale, "quant_map": TABLES[kind]}
    if double:
        offset = scale.mean()
        padded = np.pad(scale - offset, (0, -len(scale) % NESTED)).reshape(-1, NESTED)
        largest = np.abs(padded).max(1)
        small = nearest(padded / largest[:, None], DYNAMIC)
        parts |= {"absmax": small.reshape(-1)[: len(scale)], "nested_absmax": largest}
        parts["nested_quant_map"] = _exact_dynamic()
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32"}
        state["nested_offset"] = float(offset)
        scale = parts["nested_quant_map"][small] * largest[:, None]
        scale = scale.reshape(-1)[: len(codes)] + offset
    described = np.frombuffer(json.dumps(state).encode(), "uint8")
    parts[f"quant_state.bitsandbytes__{kind}"] = described
    flat = codes.reshape(-1)
    parts[""] = (flat[::2] << 4 | flat[1::2])[:, None]
    return parts, (TABLES[kind][codes] * scale[:, None]).reshape(weight.shape)


def _exact_dynamic():
    # Of the definition's numbers a few are another float32 in the package, which files repeat.
    from kmodels.core.few_bits import DYNAMIC as STORED

    assert np.abs(STORED - DYNAMIC).max() < 1e-7
    return STORED


def write_floats(folder):
    """Writes a directory of transformers whose widths are multiples of a block."""
    backbone = Qwen3Backbone(
        **{"vocabulary_size": 96, "num_layers": 2, "num_query_heads": 4},
        **{"num_key_value_heads": 2, "hidden_dim": 64, "intermediate_dim": 128, "head_dim": 16},
        dtype="float32",
    )
    Qwen3CausalLM(backbone, preprocessor=None).export_to_transformers(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_floats(tmp_path_factory.mktemp("source") / "floats")


def both(folder, described, own, small, floats, change):
    """Writes a directory with its quantization_config, changed if asked, and one of floats."""
    for at, config, values in (
        ("small", {**described, "quantization_config": own}, small),
        ("floats", described, floats),
    ):
        (folder / at).mkdir()
        if change is not None and at == "small":
            change(config, values)
        (folder / at / "config.json").write_text(json.dumps(config))
        save_file(values, folder / at / "model.safetensors")
    return folder / "small", folder / "floats"


def written(source, folder, kind="nf4", double=True, change=None):
    """The directory in 4 bits, and one with the floats that they stand for."""
    tensors = load_file(source / "model.safetensors")
    described = json.loads((source / "config.json").read_text())
    small, floats = {}, {}
    for name, tensor in tensors.items():
        small[name] = floats[name] = tensor
        if name.endswith("proj.weight"):
            parts, floats[name] = packed(tensor, kind, double)
            small |= {f"{name}.{part}".rstrip("."): x for part, x in parts.items()}
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return both(folder, described, own, small, floats, change)


def logits(folder, **settings):
    model = Qwen3CausalLM.from_preset(folder, dtype="float32", preprocessor=None, **settings)
    return model, to_numpy(model({"token_ids": IDS, "padding_mask": np.ones_like(IDS)}))


@pytest.mark.each_time("nf4-True", on=("jax", "tensorflow"))
@pytest.mark.each_backend
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False)])
def test_a_directory_is_kept_in_4_bits(source, tmp_path, kind, double):
    small, floats = written(source, tmp_path, kind, double)
    model, ours = logits(small)
    expected = logits(floats)[1]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance("logits"))
    assert np.abs(expected - logits(source)[1]).max() > 1e-2
    layers = linear_layers(model.backbone)
    assert {layer.quantized.settings for layer in layers.values()} == {
        Quantization(kind, double=double)
    }
    plain, theirs = logits(small, quantized=False)
    assert not [layer for layer in linear_layers(plain.backbone).values() if layer.quantized]
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=tolerance("logits"))
    # With an adapter, saved and read again.
    model.enable_lora(2)
    model.save_to_preset(tmp_path / "saved")
    again, same = logits(tmp_path / "saved")
    np.testing.assert_array_equal(same, ours)
    assert [v.path for v in again.weights] == [v.path for v in model.weights]


def test_random_weights_have_the_variables_of_the_file(source, tmp_path):
    small, _ = written(source, tmp_path)
    random = Qwen3CausalLM.from_preset(small, load_weights=False)
    model = Qwen3CausalLM.from_preset(small)
    assert [(v.path, v.shape) for v in random.weights] == [(v.path, v.shape) for v in model.weights]


def test_the_same_kernels_quantized_here_have_the_same_codes(source, tmp_path):
    small, _ = written(source, tmp_path, "nf4", False)
    stored, floats = load_file(small / "model.safetensors"), load_file(source / "model.safetensors")
    for name in [name for name in floats if name.endswith("proj.weight")]:
        numbers, scale = quantize_array(floats[name].T, Quantization("nf4", double=False))
        np.testing.assert_array_equal(numbers.T.reshape(-1, 1), stored[name])
        np.testing.assert_array_equal(scale.T.reshape(-1), stored[f"{name}.absmax"])


NAME = "model.layers.0.mlp.up_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


def restated(**changes):
    def change(config, values):
        state = json.loads(values[STATE].tobytes()) | changes
        values[STATE] = np.frombuffer(json.dumps(state).encode(), "uint8")

    return change


DAMAGED = {
    "no scales": (lambda c, v: v.pop(f"{NAME}.absmax"), "has no absmax of 128 numbers; copy"),
    "fewer codes": (
        lambda c, v: v.update({NAME: v[NAME][:-1]}), "does not hold 8,192 numbers of 4 bits",
    ),
    "another table": (
        lambda c, v: v.update({f"{NAME}.quant_map": v[f"{NAME}.quant_map"] * 2}),
        "has a quant_map of its own; only that of nf4 is read",
    ),
    "no JSON": (lambda c, v: v.update({STATE: v[STATE][:-3]}), "is described by no JSON object"),
    "another kind": (restated(quant_type="nf5"), "numbers of kind 'nf5'; nf4 and fp4 are read"),
    "a huge shape": (restated(shape=[2**40, 2**40]), "shape.* is 1099511627776; give a whole"),
    "another nested block": (restated(nested_blocksize=64), "nested_blocksize is not 256"),
    "a shape of words": (restated(shape=["x", 3]), "shape.* is 'x'; give a whole number"),
    "8 bits": (
        lambda c, v: c["quantization_config"].update(load_in_4bit=False, load_in_8bit=True),
        r'by bitsandbytes in 8 bits.*call quantize\("int8"\)',
    ),
    "scales of another dtype": (
        lambda c, v: v.update({f"{NAME}.absmax": v[f"{NAME}.absmax"].astype("float32")}),
        "has absmax of dtype float32; copy",
    ),
    "a method that is no text": (
        lambda c, v: c["quantization_config"].update(quant_method=["x"]),
        "quant_method is .*'x'.*; give a text",
    ),
    "another program": (
        lambda c, v: c["quantization_config"].update(quant_method="aqlm"),
        "is quantized by aqlm, which is not read yet; open",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_what_cannot_be_read_is_refused_in_a_line(source, tmp_path, name):
    change, message = DAMAGED[name]
    small, _ = written(source, tmp_path, change=change)
    refused(message, Qwen3CausalLM.from_preset, small)


def test_a_setting_that_is_not_known_is_named(source, tmp_path, caplog):
    small, _ = written(
        source, tmp_path, change=lambda c, v: c["quantization_config"].update(new_setting=1)
    )
    Qwen3CausalLM.from_preset(small)
    assert "config.json sets new_setting, which kmodels does not know" in caplog.text


# === Written for bitsandbytes ===

WIDTHS = {
    **{"vocabulary_size": 96, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2},
    **{"hidden_dim": 64, "intermediate_dim": 192, "head_dim": 32},
}
WRITTEN = {
    "Gemma 3, nf4": (GemmaCausalLM, "gemma3_debug", {"mode": "nf4"}),
    "Qwen 3, fp4": (Qwen3CausalLM, "qwen3_debug", {"mode": "fp4", "block": 32}),
    "Qwen 3, plain scales": (Qwen3CausalLM, "qwen3_debug", {"mode": "nf4", "double": False}),
}


def unpacked(tensors, name):
    """The floats (out, in) of tensors of bitsandbytes, by its definition."""
    (state,) = [x for x in tensors if x.startswith(f"{name}.quant_state.bitsandbytes__")]
    described = json.loads(tensors[state].tobytes())
    assert state.endswith(described["quant_type"])
    np.testing.assert_array_equal(tensors[f"{name}.quant_map"], TABLES[described["quant_type"]])
    scale = tensors[f"{name}.absmax"]
    if f"{name}.nested_absmax" in tensors:
        assert described["nested_blocksize"], described["nested_dtype"] == (NESTED, "float32")
        np.testing.assert_allclose(tensors[f"{name}.nested_quant_map"], DYNAMIC, atol=1e-7)
        own = np.repeat(tensors[f"{name}.nested_absmax"], NESTED)[: len(scale)]
        offset = np.float32(described["nested_offset"])
        scale = tensors[f"{name}.nested_quant_map"][scale] * own + offset
    assert tensors[name].dtype == np.uint8 and tensors[name].shape[1] == 1
    codes = np.concatenate([tensors[name] >> 4, tensors[name] & 15], 1).reshape(-1)
    numbers = tensors[f"{name}.quant_map"][codes].reshape(-1, described["blocksize"])
    return (numbers * scale[:, None]).reshape(described["shape"])


@pytest.mark.each_backend
@pytest.mark.parametrize("name", WRITTEN)
def test_a_quantized_model_is_written_for_bitsandbytes(name, tmp_path):
    task, preset, settings = WRITTEN[name]
    model = task.from_preset(preset, dtype="float32", preprocessor=None, **WIDTHS)
    model.quantize(**settings)
    model.export_to_transformers(tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    names = [x for x in tensors if x.endswith("proj.weight")]
    layers = linear_layers(model.backbone)
    assert len(names) == len(layers) == 14
    query = layers["block_1/attention/query"]
    np.testing.assert_array_equal(
        unpacked(tensors, "model.layers.1.self_attn.q_proj.weight"), to_numpy(query.wide_kernel()).T
    )
    again = task.from_preset(tmp_path / "out", dtype="float32", preprocessor=None)
    assert [v.path for v in again.weights] == [v.path for v in model.weights]
    for ours, theirs in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs), err_msg=ours.path)
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert described["bnb_4bit_quant_type"] == settings["mode"]
    assert described["bnb_4bit_use_double_quant"] == settings.get("double", True)
    assert described["llm_int8_skip_modules"] == ["lm_head", "model.embed_tokens"]


@pytest.mark.needs("transformers")
def test_the_config_is_that_of_transformers(tmp_path):
    from transformers import BitsAndBytesConfig

    model = Qwen3CausalLM.from_preset("qwen3_debug", dtype="bfloat16", preprocessor=None, **WIDTHS)
    model.quantize("nf4")
    model.export_to_transformers(tmp_path / "out")
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    expected = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype="bfloat16",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head", "model.embed_tokens"],
    )
    assert described == expected.to_dict()


def vision(hidden=64):
    sizes = {"image_size": 16, "patch_size": 4, "pool_size": 2, "num_layers": 1, "num_heads": 2}
    encoder = sizes | {"hidden_dim": hidden, "intermediate_dim": 64}
    sizes = WIDTHS | {"vocabulary_size": 384, "vision_encoder": encoder}
    return Gemma3ImageTextLM.from_preset("gemma3_vision_debug", preprocessor=None, **sizes)


NOT_WRITTEN = {
    "int8": (
        lambda: GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None), "int8",
        "is quantized to int8; a directory of transformers holds nf4 and fp4: call dequantize",
    ),
    "a width that no block divides": (
        lambda: ViTImageClassifier.from_preset("vit_debug", num_classes=3), "nf4",
        r"block_\d/.* has a scale for each 16 of its 16 inputs; bitsandbytes has blocks of 32, 64",
    ),
    "a bare parameter": (
        vision, "fp4", "vision_encoder/input_projection is quantized, and its weight in a direc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_a_kernel_that_bitsandbytes_cannot_hold_is_refused_in_a_line(name, tmp_path):
    make, mode, message = NOT_WRITTEN[name]
    model = make()
    model.quantize(mode)
    refused(message, model.export_to_transformers, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_format_of_floats_says_what_to_do(tmp_path):
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    model.quantize("nf4")
    refused("no place for .*kernel_nf4.*; call deq", model.export_to_timm, tmp_path / "out")


# === GPTQ and AWQ ===


def as_int32(codes):
    """Codes (..., n, 8) of 4 bits in an int32, the first in its lowest bits."""
    shifted = codes.astype("uint64") << np.arange(0, 32, 4, dtype="uint64")
    return shifted.sum(-1).astype("uint32").view("int32")


def of_outputs(codes, order):
    """(rows, out) codes as (rows, out / 8) int32."""
    return as_int32(codes.reshape(len(codes), -1, 8)[..., order])


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def in_ints(weight, kind, group, version="gptq", shuffled=False):
    """The tensors of a weight (out, in) by their endings, and the floats that they stand for."""
    out, width = weight.shape
    rng = np.random.default_rng(abs(int(weight.sum() * 1e4)))
    codes = rng.integers(0, 16, (width, out))
    zeros = rng.integers(1, 16, (width // group, out))
    scales = (rng.uniform(0.5, 1.5, zeros.shape) * 0.01).astype("float16")
    index = np.arange(width) // group
    if shuffled:
        index = rng.permutation(index)
    floats = ((codes - zeros[index]) * scales.astype("float32")[index]).T
    if kind == "awq":
        parts = {
            "qweight": of_outputs(codes, AWQ_ORDER),
            "qzeros": of_outputs(zeros, AWQ_ORDER),
            "scales": scales,
        }
        return parts, floats
    stored = zeros - (version == "gptq")
    parts = {
        "qweight": as_int32(codes.reshape(-1, 8, out).swapaxes(1, 2)),
        "qzeros": of_outputs(stored, list(range(8))),
        "scales": scales,
        "g_idx": index.astype("int32"),
    }
    return parts, floats


def written_in_ints(source, folder, kind, group=32, version="gptq", shuffled=False, change=None):
    """The directory in 4 bits, and one with the floats that they stand for."""
    tensors = load_file(source / "model.safetensors")
    described = json.loads((source / "config.json").read_text())
    small, floats = {}, {}
    for name, tensor in tensors.items():
        small[name] = floats[name] = tensor
        if name.endswith("proj.weight"):
            del small[name]
            parts, wide = in_ints(tensor, kind, group, version, shuffled)
            floats[name] = np.ascontiguousarray(wide.astype("float32"))
            small |= {name.replace("weight", part): x for part, x in parts.items()}
    own = {"quant_method": kind, "bits": 4, "group_size": group}
    own |= {"version": "gemm"} if kind == "awq" else {"checkpoint_format": version}
    return both(folder, described, own, small, floats, change)


KINDS = {
    "GPTQ": {"kind": "gptq"},
    "GPTQ, second format": {"kind": "gptq", "version": "gptq_v2", "group": 64},
    "AWQ": {"kind": "awq"},
}


@pytest.mark.each_time("AWQ", on=("jax", "tensorflow"))
@pytest.mark.each_backend
@pytest.mark.parametrize("name", KINDS)
def test_gptq_and_awq_are_kept_in_4_bits(source, tmp_path, name):
    small, floats = written_in_ints(source, tmp_path, **KINDS[name])
    model, ours = logits(small)
    np.testing.assert_allclose(ours, logits(floats)[1], rtol=0, atol=tolerance("logits"))
    block = KINDS[name].get("group", 32)
    layers = linear_layers(model.backbone)
    assert {x.quantized.settings for x in layers.values()} == {Quantization("int4", block)}
    plain = linear_layers(logits(small, quantized=False)[0].backbone)
    expected = load_file(floats / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].T
    for found in (plain["block_1/mlp/down"].kernel, layers["block_1/mlp/down"].wide_kernel()):
        np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=1e-7)
    model.save_to_preset(tmp_path / "saved")
    np.testing.assert_array_equal(logits(tmp_path / "saved")[1], ours)


@pytest.mark.parametrize("settings", [{"shuffled": True}, {"group": 16}])
def test_groups_that_no_layer_keeps_become_floats(source, tmp_path, settings, caplog):
    small, floats = written_in_ints(source, tmp_path, "gptq", **settings)
    model, ours = logits(small)
    np.testing.assert_allclose(ours, logits(floats)[1], rtol=0, atol=tolerance("logits"))
    assert not [x for x in linear_layers(model.backbone).values() if x.quantized]
    assert "are kept by no layer, so it becomes floats" in caplog.text


UP = "model.layers.0.mlp.up_proj"
WRONG = {
    "no scales": ("gptq", lambda c, v: v.pop(f"{UP}.scales"), "up_proj has no scales; copy"),
    "8 bits": (
        "gptq", lambda c, v: c["quantization_config"].update(bits=8), "bits of its quant.* is 8",
    ),
    "other bits of a layer": (
        "gptq", lambda c, v: v.update({f"{UP}.qweight": np.zeros((16, 128), "int32")}),
        "up_proj has a g_idx of other groups; copy",
    ),
    "another group": (
        "gptq", lambda c, v: v.update({f"{UP}.g_idx": v[f"{UP}.g_idx"] + 9}), "g_idx of other gr",
    ),
    "zeros of another size": (
        "awq", lambda c, v: v.update({f"{UP}.qzeros": v[f"{UP}.qzeros"][:, :-1].copy()}),
        "has a qzeros of another size",
    ),
    "numbers of another dtype": (
        "awq", lambda c, v: v.update({f"{UP}.qweight": v[f"{UP}.qweight"].astype("int64")}),
        "has qweight of dtype int64; copy",
    ),
    "another version": (
        "awq", lambda c, v: c["quantization_config"].update(version="gemv"), "version of.*'gemv'",
    ),
    "another format": (
        "gptq", lambda c, v: c["quantization_config"].update(checkpoint_format="marlin"),
        "checkpoint_format of its quantization_config is 'marlin'",
    ),
    "layers of other bits": (
        "gptq", lambda c, v: c["quantization_config"].update(dynamic={"-:.*": {}}), "dynamic of",
    ),
    "no description": ("gptq", lambda c, v: c.pop("quantization_config"), "no config.json with"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_parts_of_ints_that_do_not_fit_are_refused_in_a_line(source, tmp_path, name):
    kind, change, message = WRONG[name]
    small, _ = written_in_ints(source, tmp_path, kind, change=change)
    refused(message, Qwen3CausalLM.from_preset, small)


# === FP8 ===


def in_float8(weight, grid, scale_dtype):
    """Numbers and scales of a weight (out, in), and the floats that they stand for.

    Args:
        weight: float32.
        grid: the outputs and inputs that share a scale.
        scale_dtype: of the scales.
    """
    counts = [-(-size // block) for size, block in zip(weight.shape, grid, strict=True)]
    rng = np.random.default_rng(abs(int(weight.sum() * 1e4)))
    scale = (rng.uniform(0.5, 1.5, counts) * 1e-3).astype(scale_dtype)
    wide = scale.astype("float32").repeat(grid[0], 0)[: weight.shape[0]]
    wide = wide.repeat(grid[1], 1)[:, : weight.shape[1]]
    largest = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # beyond it there is NaN
    numbers = np.clip(weight / wide, -largest, largest).astype(ml_dtypes.float8_e4m3fn)
    return numbers, scale, numbers.astype("float32") * wide


def stored(path, tensors):
    """Writes safetensors in FP8, which the NumPy side of its package has no name for."""
    header, data = {}, b""
    for name, x in tensors.items():
        kind = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float32": "F32", "uint8": "U8"}[
            str(x.dtype)
        ]
        offsets = [len(data), len(data) + x.nbytes]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": offsets}
        data += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def compressed(strategy, activations=None, **more):
    weights = {**SCHEME, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        **{"quant_method": "compressed-tensors", "format": "float-quantized"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"]},
        **{"quantization_status": "compressed", "kv_cache_scheme": None},
    }


FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
# The settings, the blocks (None for all), the dtype of scales, and the block that layers keep.
FLOATS = {
    "blocks": (FINE | {"weight_block_size": [48, 32]}, (48, 32), "float32", 32),
    "blocks, scales in bfloat16": (
        FINE | {"weight_block_size": [32, 64]}, (32, 64), ml_dtypes.bfloat16, 64,
    ),
    "one scale": (compressed("tensor"), (10**6, 10**6), "float32", None),
    "a scale for each output": (
        compressed("channel", {"num_bits": 8, "type": "float", "dynamic": True}),
        (1, 10**6), ml_dtypes.bfloat16, None,
    ),
    "groups": (compressed("group", group_size=32), (1, 32), "float32", 32),
}  # fmt: skip


def written_in_float8(source, folder, name, change=None):
    """The directory in FP8, and one with the floats that its numbers stand for."""
    own, grid, dtype, _ = FLOATS[name]
    end = "weight_scale_inv" if own["quant_method"] == "fp8" else "weight_scale"
    described = json.loads((source / "config.json").read_text())
    small, floats = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        small[key] = floats[key] = tensor
        if key.endswith("proj.weight"):
            small[key], scale, wide = in_float8(tensor, grid, dtype)
            small[key.replace("weight", end)] = scale.reshape(1) if name == "one scale" else scale
            small[key.replace("weight", "input_scale")] = np.ones(1, "float32")
            floats[key] = np.ascontiguousarray(wide)
    own = json.loads(json.dumps(own))
    for at, config, values in (
        ("small", {**described, "quantization_config": own}, small),
        ("floats", described, floats),
    ):
        (folder / at).mkdir()
        if change is not None and at == "small":
            change(own, values)
        (folder / at / "config.json").write_text(json.dumps(config))
        stored(folder / at / "model.safetensors", values)
    return folder / "small", folder / "floats"


@pytest.mark.each_time("groups")
@pytest.mark.each_backend
@pytest.mark.parametrize("name", FLOATS)
def test_fp8_is_kept_in_8_bits(source, tmp_path, name, caplog):
    small, floats = written_in_float8(source, tmp_path, name)
    model, ours = logits(small)
    rounds = "kmodels keeps them in the compute dtype" in caplog.text
    assert rounds == (name in ("blocks", "blocks, scales in bfloat16", "a scale for each output"))
    np.testing.assert_allclose(ours, logits(floats)[1], rtol=0, atol=tolerance("logits"))
    layers = linear_layers(model.backbone)
    block = FLOATS[name][3]
    for path, layer in layers.items():
        one = layer.input_dim == block
        assert layer.quantized.settings == Quantization("fp8", None if one else block), path
    plain = linear_layers(logits(small, quantized=False)[0].backbone)
    expected = load_file(floats / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].T
    for found in (plain["block_1/mlp/down"].kernel, layers["block_1/mlp/down"].wide_kernel()):
        np.testing.assert_array_equal(to_numpy(found), expected)
    model.enable_lora(2)
    model.save_to_preset(tmp_path / "saved")
    np.testing.assert_array_equal(logits(tmp_path / "saved")[1], ours)


@pytest.mark.parametrize("block", [[32, 48], [32, 16]])
def test_blocks_of_fp8_that_no_layer_keeps_become_floats(source, tmp_path, block, caplog):
    FLOATS["other blocks"] = FINE | {"weight_block_size": block}, block, "float32", None
    small, floats = written_in_float8(source, tmp_path, "other blocks")
    del FLOATS["other blocks"]
    model, ours = logits(small)
    np.testing.assert_allclose(ours, logits(floats)[1], rtol=0, atol=tolerance("logits"))
    assert not [x for x in linear_layers(model.backbone).values() if x.quantized]
    assert f"blocks of {block[1]} inputs of 64 are kept by no layer" in caplog.text


def of_weights(**changes):
    def change(config, values):
        config["config_groups"]["group_0"]["weights"].update(changes)

    return change


NOT_FLOAT8 = {
    "no scales": (
        "blocks", lambda c, v: v.pop(f"{UP}.weight_scale_inv"),
        r"up_proj.weight is in FP8, and only weights of linear layers with a weight_scale_inv or",
    ),
    "scales of other blocks": (
        "blocks", lambda c, v: c.update(weight_block_size=[128, 128]),
        r"is \(64, 128\) and has scales \(2, 4\); with the blocks of config.json they are",
    ),
    "scales of another dtype": (
        "one scale", lambda c, v: v.update({f"{UP}.weight_scale": np.ones(1, "uint8")}),
        "has scales of dtype uint8; copy",
    ),
    "a table in FP8": (
        "blocks", lambda c, v: v.update({"other": v[f"{UP}.weight"]}), "other is in FP8, and only",
    ),
    "another FP8": ("blocks", lambda c, v: c.update(fmt="e5m2"), "fmt of its quant.* is 'e5m2'"),
    "experts in 4 bits": (
        "blocks", lambda c, v: c.update(expert_dtype="fp4"), "expert_dtype of its quan.* is 'fp4'",
    ),
    "no block": (
        "blocks", lambda c, v: c.update(weight_block_size=[0, 32]), r"weight_block_size.* is 0; gi",
    ),
    "another format": (
        "groups", lambda c, v: c.update(format="pack-quantized"), "format of .* 'pack-quantized'",
    ),
    "a quantized cache": (
        "groups", lambda c, v: c.update(kv_cache_scheme=SCHEME), "kv_cache_scheme of its quantiza",
    ),
    "rotations": (
        "groups", lambda c, v: c.update(transform_config={"config_groups": {"R1": {}}}),
        "transform_config of its quantization_config is",
    ),
    "sparse weights": (
        "groups", lambda c, v: c.update(sparsity_config={"format": "sparse-24-bitmask"}),
        "format of its quantization_config is 'sparse-24-bitmask'; compressed-tensors is read w",
    ),
    "whole numbers": ("groups", of_weights(type="int"), "type of its quantization_config is 'int'"),
    "a zero point": ("groups", of_weights(symmetric=False), "symmetric of its quant.* is False"),
    "a name of a scheme": (
        "groups", lambda c, v: c.update(config_groups={"FP8": ["Linear"]}), "FP8.* give an object",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FLOAT8)
def test_fp8_that_does_not_fit_is_refused_in_a_line(source, tmp_path, name):
    kind, change, message = NOT_FLOAT8[name]
    small, _ = written_in_float8(source, tmp_path, kind, change)
    refused(message, Qwen3CausalLM.from_preset, small)


@pytest.mark.parametrize(
    "change",
    [
        lambda c, v: c.update(new_setting=1),
        lambda c, v: c["config_groups"]["group_0"].update(new_setting=1),
        of_weights(new_setting=1),
    ],
)
def test_a_setting_of_fp8_that_is_not_known_is_named(source, tmp_path, change, caplog):
    small, _ = written_in_float8(source, tmp_path, "groups", change)
    Qwen3CausalLM.from_preset(small)
    assert "config.json sets new_setting, which kmodels does not know" in caplog.text
