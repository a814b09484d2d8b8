"""Weights in four to six bits: the bytes of llama.cpp's quantizer, and which tensor has which type.

The digests are of the bytes that llama.cpp itself made of `numbers` (benchmarks/gguf_quants.py
compares more of them with its library).
"""

import hashlib
import struct

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.models import Gemma3ImageTextLM, GemmaCausalLM, Qwen3CausalLM
from kmodels.models.blocks.gguf.quantizing import MIXTURES, choose_types, quantize
from kmodels.tools.convert import convert
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
    """Rows of 256, equal on each processor: drawn, offset, constant, zero, tiny and large."""
    draw = np.random.default_rng(0)
    whole = draw.integers(-(2**10), 2**10, (9, 16, 256)).astype("float32")
    powers = np.repeat(draw.integers(-30, 3, (16, 8)), 32, axis=1)
    kinds = [
        np.ldexp(whole[0], -15),
        np.ldexp(whole[1], powers),
        whole[2] * whole[2] * whole[2] / 2**30,  # NumPy's powers differ among processors
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


WEIGHTED_DIGESTS = {
    "Q4_0": "7054f1dadeb03c80",
    "Q4_1": "9a23bf24b08dc6c9",
    "Q5_0": "37e64b139002018a",
    "Q5_1": "c62eb1316b35d92c",
    "Q8_0": DIGESTS["Q8_0"],
    "Q4_K": "9daa50bff7cd9fa9",
    "Q5_K": "226e75f59a11744b",
    "Q6_K": "ee50a58ed676faf4",
}


def importance():
    """Weights of 512 columns, some of them zero."""
    whole = np.random.default_rng(1).integers(0, 2**10, 512).astype("float32")
    return whole**2 * (whole > 100)


@pytest.mark.parametrize("kind", WEIGHTED_DIGESTS)
def test_bytes_with_an_importance_matrix_are_those_of_llama_cpp(kind):
    values, own = numbers().reshape(-1, 512), importance()
    data = quantize(values, kind, "it", own)
    assert hashlib.sha256(data.tobytes()).hexdigest()[:16] == WEIGHTED_DIGESTS[kind]
    # Each expert has its own weights, and a single row is quantized like several.
    experts = quantize(np.stack([values, values]), kind, "it", np.stack([own, own[::-1]]))
    np.testing.assert_array_equal(experts[0], data)
    assert (kind == "Q8_0") == np.array_equal(experts[1], data)
    np.testing.assert_array_equal(quantize(values[3:4], kind, "it", own), data[3:4])


def test_an_importance_matrix_changes_types_of_q4_0():
    for weighted, kind in ((False, "Q4_0"), (True, "Q4_1")):
        types = choose_types(decoder(16), "Q4_0", "qwen3", weighted)
        found = [types[f"blk.{i}.ffn_down.weight"] for i in range(16)]
        assert found == [kind] * 2 + ["Q4_0"] * 14


def matrix(path, values, form):
    """Writes an importance matrix, by name the mean of squares of each column."""
    if form == "dat":
        data = struct.pack("<i", len(values))
        for name, x in values.items():
            data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, len(x))
            data += (4 * x).astype("<f4").tobytes()
        path.write_bytes(data + struct.pack("<i", 4))
        return path
    import gguf

    writer = gguf.GGUFWriter(path, "")
    writer.add_string("general.type", form)
    for name, x in values.items():
        writer.add_tensor(f"{name}.in_sum2", 8 * x[None].astype("float32"))
        writer.add_tensor(f"{name}.counts", np.full((1, 1), 8, "float32"))
    for write in (
        writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
        writer.close,
    ):  # fmt: skip
        write()
    return path


def weighted_model():
    return Qwen3CausalLM.from_preset("qwen3_debug", **SIZES, intermediate_dim=512, dtype="float32")


def columns(skip=()):
    """Importance of the columns of every kernel of `weighted_model`."""
    rng, widths = np.random.default_rng(2), {"ffn_down": 512, "attn_output": 256}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return {
        f"blk.{i}.{x}.weight": rng.chisquare(1, widths.get(x, 256)).astype("float32")
        for i in range(2)
        for x in names
        if x not in skip
    }


@pytest.mark.parametrize("form", ["imatrix", "dat"])
def test_a_file_is_written_with_an_importance_matrix(tmp_path, form, caplog):
    import gguf

    model, values = weighted_model(), columns(skip=("attn_k",))
    path = matrix(tmp_path / "of.it", {**values, "blk.9.attn_q.weight": np.ones(256)}, form)
    model.export_to_gguf(tmp_path / "plain.gguf", "q4_k_m")
    model.export_to_gguf(tmp_path / "it.gguf", "q4_k_m", imatrix=path)
    assert "of blk.0.attn_k.weight, blk.1.attn_k.weight; they are quantized without" in caplog.text
    assert "blk.9.attn_q.weight are no tensors of the model and are not used" in caplog.text
    reader = gguf.GGUFReader(tmp_path / "it.gguf")
    assert reader.fields["quantize.imatrix.file"].contents() == "of.it"
    assert reader.fields["quantize.imatrix.entries_count"].contents() == 12
    plain = {x.name: x for x in gguf.GGUFReader(tmp_path / "plain.gguf").tensors}
    for tensor in reader.tensors:
        same = np.array_equal(tensor.data, plain[tensor.name].data)
        assert same == (tensor.name not in values), tensor.name
    name = "blk.1.ffn_up.weight"
    kernel = to_numpy(model.backbone.blocks[1].mlp.up.kernel).T
    (found,) = [tensor for tensor in reader.tensors if tensor.name == name]
    np.testing.assert_array_equal(
        found.data, quantize(kernel, found.tensor_type.name, name, values[name])
    )
    errors = [
        (values[name] * (gguf.quants.dequantize(x.data, x.tensor_type) - kernel) ** 2).mean()
        for x in (found, plain[name])
    ]
    assert errors[0] < 0.9 * errors[1]


NO_MATRICES = {
    "another kind of file": ({}, "model", "general.type is 'model'.*; give a file that llama-ima"),
    "no sums": ({}, "imatrix", "holds no tensor that ends in .in_sum2"),
    "a matrix of another width": (
        {"blk.0.attn_q.weight": np.ones(64)}, "imatrix", "64 values of blk.0.attn_q.weight, whi",
    ),
    "one of another model": (
        {"blk.0.other.weight": np.ones(64)}, "dat", "none of the quantized .*, but blk.0.other.wei",
    ),
    "NaN": ({"blk.0.attn_q.weight": np.full(256, np.nan)}, "dat", "holds NaN, infinite or nega"),
    "negative numbers": ({"blk.0.attn_q.weight": -np.ones(256)}, "imatrix", "or negative values"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_MATRICES)
def test_an_importance_matrix_that_does_not_fit_is_refused_in_a_line(tmp_path, name):
    values, form, message = NO_MATRICES[name]
    path = matrix(tmp_path / "of.it", values, form)
    refused(message, weighted_model().export_to_gguf, tmp_path / "it.gguf", "q6_k", imatrix=path)
    assert not (tmp_path / "it.gguf").exists()


def test_a_damaged_importance_matrix_is_refused_in_a_line(tmp_path):
    model = weighted_model()
    whole = matrix(tmp_path / "of.it", columns(), "dat").read_bytes()
    for content, message in (
        (whole[:1000], "is not an importance matrix .it ends inside blk"),
        (whole[:2], "is not an importance matrix"),
        (b"\xff" * 64, "it announces -1 tensors"),
        (struct.pack("<ii", 1, -5), "it has a name of -5 bytes"),
        (b"GGUF" + bytes(60), "is not a whole GGUF file"),
    ):
        (tmp_path / "damaged").write_bytes(content)
        given = {"dtype": "q6_k", "imatrix": tmp_path / "damaged"}
        refused(message, model.export_to_gguf, tmp_path / "it.gguf", **given)
    given = {"dtype": "q8_0", "imatrix": tmp_path / "of.it"}
    refused("which q8_0 does not use; give one of q4_0", model.export_to_gguf, "x.gguf", **given)
    refused("No such file", model.export_to_gguf, tmp_path / "x.gguf", "q6_k", imatrix="none")


def test_convert_takes_an_importance_matrix(tmp_path):
    model = weighted_model()
    path = matrix(tmp_path / "of.it", columns(), "imatrix")
    model.export_to_gguf(tmp_path / "it.gguf", "q4_0", imatrix=path)
    convert(model, tmp_path / "converted.gguf", "gguf", dtype="q4_0", imatrix=path)
    assert (tmp_path / "converted.gguf").read_bytes() == (tmp_path / "it.gguf").read_bytes()
    given = {"to": "hf", "imatrix": path}
    refused("only gguf uses it: leave imatrix out", convert, model, tmp_path / "hf", **given)


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
