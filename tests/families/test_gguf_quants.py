"""Weights in four to six bits: the bytes of llama.cpp's quantizer, and which tensor has which type.

The digests are of the bytes that llama.cpp itself made of `numbers` (benchmarks/gguf_quants.py
compares more of them with its library).
"""

import hashlib

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.models import Gemma3ImageTextLM, GemmaCausalLM, Qwen3CausalLM
from kmodels.models.blocks.gguf.quantizing import MIXTURES, choose_types, quantize
from refusals import refused

pytestmark = pytest.mark.needs("gguf")

DIGESTS = {
    "Q4_0": "d4901c2af0f715e2",
    "Q5_0": "ae16227b13d40a14",
    "Q5_1": "73c431da246115b8",
    "Q8_0": "e3a85806daf40314",
    "Q4_K": "97ff88a8f69fa312",
    "Q5_K": "ded868b715056139",
    "Q6_K": "2e86369364682a2d",
}


def numbers():
    """Rows of 256 numbers, made without rounding: drawn, offset, constant, zero, tiny and large."""
    draw = np.random.default_rng(0)
    whole = draw.integers(-(2**10), 2**10, (9, 16, 256)).astype("float32")
    powers = np.repeat(draw.integers(-30, 3, (16, 8)), 32, axis=1)
    kinds = [
        np.ldexp(whole[0], -15),
        np.ldexp(whole[1], powers),
        whole[2] ** 3 / 2**30,
        np.abs(whole[3]),
        np.ldexp(whole[4], -20) - 1,
        np.repeat(whole[5][:, :16], 16, axis=1),
        whole[6] * (whole[7] > 900) + np.float32(0),
        np.ldexp(whole[8], -60),
        np.zeros((16, 256)),
        -np.zeros((16, 256)),
    ]
    return np.concatenate(kinds).astype("float32")


@pytest.mark.parametrize("kind", DIGESTS)
def test_bytes_are_those_of_llama_cpp(kind):
    # In any shape, and across the pieces that are quantized at a time.
    data = quantize(np.tile(numbers(), (8, 1)).reshape(2, 4, -1, 512), kind, "it")
    assert data.dtype == np.uint8 and data.shape[:2] == (2, 4)
    once = data.reshape(8, -1)
    assert (once == once[0]).all()
    assert hashlib.sha256(once[0].tobytes()).hexdigest()[:16] == DIGESTS[kind]


def decoder(layers, **changes):
    """Shapes of a decoder's tensors; `changes` replaces some, or leaves them out by None."""
    block = {"attn_q": (64, 256), "attn_v": (64, 256), "ffn_down": (256, 512), "attn_norm": (256,)}
    shapes = {"token_embd.weight": (100, 256), "output_norm.weight": (256,)}
    shapes |= {f"blk.{i}.{x}.weight": shape for i in range(layers) for x, shape in block.items()}
    shapes |= {name.replace("__", "."): shape for name, shape in changes.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


# Layers 0 and 1, 14 and 15, and every third of those between.
SENSITIVE = [0, 1, 4, 7, 10, 13, 14, 15]


@pytest.mark.parametrize(
    ("dtype", "usual", "values", "down"),
    [
        ("q4_0", "Q4_0", {}, {}),
        ("q4_k", "Q4_K", {"Q6_K": SENSITIVE}, {"Q6_K": SENSITIVE}),
        ("q4_k_m", "Q4_K", {"Q6_K": SENSITIVE}, {"Q6_K": SENSITIVE}),
        ("q4_k_s", "Q4_K", {"Q5_K": [0, 1, 2, 3]}, {"Q5_K": [0, 1]}),
        ("q5_k", "Q5_K", {"Q6_K": SENSITIVE}, {"Q6_K": SENSITIVE}),
        ("q5_k_m", "Q5_K", {"Q6_K": SENSITIVE}, {"Q6_K": SENSITIVE}),
        ("q5_k_s", "Q5_K", {}, {}),
        ("q6_k", "Q6_K", {}, {}),
    ],
)
def test_types_are_those_that_llama_quantize_chooses(dtype, usual, values, down):
    types = choose_types(decoder(16), MIXTURES[dtype], "qwen3")
    for part, others in (("attn_q", {}), ("attn_v", values), ("ffn_down", down)):
        wanted = [usual] * 16
        for kind, layers in others.items():
            wanted = [kind if i in layers else own for i, own in enumerate(wanted)]
        assert [types[f"blk.{i}.{part}.weight"] for i in range(16)] == wanted, part
    assert types["token_embd.weight"] == "Q6_K"  # which is the output layer too
    assert types["output_norm.weight"] == types["blk.3.attn_norm.weight"] == "F32"
    untied = choose_types(decoder(16, output__weight=(100, 256)), MIXTURES[dtype], "qwen3")
    assert (untied["token_embd.weight"], untied["output.weight"]) == (usual, "Q6_K")


@pytest.mark.parametrize(
    ("dtype", "width", "kinds"),
    [
        ("q4_0", 288, ("Q4_0", "Q8_0")),
        ("q4_k_m", 288, ("Q5_0", "Q8_0")),
        ("q5_k_s", 288, ("Q5_1", "Q8_0")),
        ("q6_k", 288, ("Q8_0", "Q8_0")),
        ("q4_0", 40, ("F16", "F16")),
        ("q4_k_m", 40, ("F16", "F16")),
    ],
)
def test_rows_that_blocks_do_not_divide(dtype, width, kinds):
    changes = {"blk__0__attn_q__weight": (64, width), "token_embd__weight": (100, width)}
    types = choose_types(decoder(8, **changes), MIXTURES[dtype], "qwen3")
    assert (types["blk.0.attn_q.weight"], types["token_embd.weight"]) == kinds


def test_layers_without_values_and_special_tensors():
    # Layers that share the values of others have none, and the others are counted without them.
    shapes = decoder(8, **{f"blk__{i}__attn_v__weight": None for i in (1, 2, 3, 4)})
    shapes |= {"per_layer_token_embd.weight": (100, 512), "per_layer_model_proj.weight": (512, 256)}
    types = choose_types(shapes, "Q4_K_S", "gemma4")
    found = {i: types.get(f"blk.{i}.attn_v.weight") for i in range(8)}
    none = dict.fromkeys((1, 2, 3, 4))
    assert found == {**none, 0: "Q5_K", 5: "Q5_K", 6: "Q5_K", 7: "Q5_K"}
    assert types["per_layer_token_embd.weight"] == "Q6_K"
    assert types["per_layer_model_proj.weight"] == "F32"
    for architecture, kind in (("llama", "Q5_K"), ("qwen3", "Q4_K")):
        types = choose_types(decoder(80), "Q4_K_M", architecture)
        assert {types["blk.11.attn_v.weight"], types["blk.11.ffn_down.weight"]} == {kind, "Q4_K"}


SIZES = {"hidden_dim": 256, "num_layers": 2, "head_dim": 64, "preprocessor": None}
MODELS = {
    "gemma3": lambda: GemmaCausalLM.from_preset(
        *("gemma3_debug",), **SIZES, intermediate_dim=512, global_rope_scaling_factor=8.0
    ),
    "qwen3": lambda: Qwen3CausalLM.from_preset("qwen3_debug", **SIZES, intermediate_dim=288),
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", ["q4_0", "q4_k_m", "q5_k_s", "q6_k"])
def test_a_file_is_read_again(tmp_path, family, dtype):
    import gguf

    model = MODELS[family]()
    path = model.export_to_gguf(tmp_path / "it.gguf", dtype)
    reader = gguf.GGUFReader(path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    assert types == choose_types(shapes, MIXTURES[dtype], family)
    file_type = reader.fields["general.file_type"].contents()
    assert gguf.LlamaFileType(file_type).name == f"MOSTLY_{MIXTURES[dtype]}"
    assert reader.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    again = type(model).from_preset(path)
    for left, right in zip(model.weights, again.weights, strict=True):
        held, lost = to_numpy(left), to_numpy(right) - to_numpy(left)
        # Normal weights fill about six deviations, and an error is uniform within a step.
        limit = 6 / 12**0.5 / 2 ** int(dtype[1]) * held.std() if held.ndim > 1 else 0.0
        assert np.sqrt(np.mean(lost**2)) <= limit, left.path


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("float32", np.nan, r"blk\.0\.ffn_up\.weight holds NaN or infinite values; a GGUF file"),
        ("q4_k_m", np.inf, r"blk\.0\.ffn_up\.weight holds NaN or infinite values; a GGUF file"),
        ("float16", 1e5, r"has values up to 1\.0e\+05, too large for F16; write float32, bfloat16"),
        ("q8_0", 1e8, r"has values up to 1\.0e\+08, too large for Q8_0; write float32, bfloat16"),
        ("q4_0", 1e6, r"has values up to 1\.0e\+06, too large for Q4_0; write float32, bfloat16"),
        ("q4_k_m", 1e9, r"has values up to 1\.0e\+09, too large for Q4_K; write float32, bfloat16"),
        ("q6_k", 1e10, r"has values up to 1\.0e\+10, too large for Q6_K; write float32, bfloat16"),
    ],
)
def test_values_that_a_type_has_no_place_for(tmp_path, dtype, value, message):
    model = MODELS["gemma3"]()
    kernel = next(x for x in model.weights if x.path.endswith("block_0/mlp/up/kernel"))
    array = to_numpy(kernel).copy()
    array[3, 4] = value
    kernel.assign(array)
    refused(message, model.export_to_gguf, tmp_path / "it.gguf", dtype)
    assert not list(tmp_path.iterdir())


def test_a_vision_encoder_beside_a_mixture_is_float16(tmp_path):
    model = Gemma3ImageTextLM.from_preset("gemma3_vision_debug", num_layers=1)
    for dtype in ("q4_k_m", "float16"):
        paths = tmp_path / f"{dtype}.gguf", tmp_path / f"mmproj-{dtype}.gguf"
        model.export_to_gguf(paths[0], dtype, mmproj=paths[1])
    written = [(tmp_path / f"mmproj-{dtype}.gguf").read_bytes() for dtype in ("q4_k_m", "float16")]
    assert written[0] == written[1]
