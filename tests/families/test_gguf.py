"""GGUF files of families, beside those that the names of the gguf package give of a directory.

The directories are transformers', the keys those of llama.cpp's converter.
"""

import json

import numpy as np
import pytest

from arrays import to_numpy
from family_table import row_of, run
from kmodels.models import (
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    Llama3CausalLM,
    Qwen3CausalLM,
)
from kmodels.text import Tokenizer
from kmodels.text.training import train_tokenizer
from kmodels.weights import read_safetensors
from refusals import refused
from tolerances import tolerance

pytestmark = pytest.mark.needs("gguf")

LOCAL = "sliding_attention"
GEMMAS = ("gemma", "gemma2", "gemma3")
TASKS = {"gemma4": GemmaCausalLM, "llama3": Llama3CausalLM, "qwen3": Qwen3CausalLM}
FILES = (
    "gemma/gemma",
    *("gemma4/plain", "gemma4/heads", "gemma4/key_is_value", "gemma4/per_layer", "gemma4/turned"),
    *("gemma4/capped", "gemma4/all", "llama3/tied", "llama3/untied", "qwen3/tied", "qwen3/untied"),
)


# Types that the gguf package reads and does not write: bytes of 256 numbers of a row.
RANDOM = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def keys_of(text, family):
    """Keys of the architecture for a config of transformers, and tensors that it lacks."""
    keys = {
        "block_count": text["num_hidden_layers"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
    }
    flat = {"rope_theta": text.get("rope_theta"), **(text.get("rope_scaling") or {})}
    ropes = text.get("rope_parameters", flat)
    if family != "gemma4":
        keys |= {
            "context_length": text["max_position_embeddings"],
            "attention.head_count_kv": text["num_key_value_heads"],
            "attention.key_length": text["head_dim"],
            "attention.value_length": text["head_dim"],
        }
        if family == "gemma2":
            keys["attn_logit_softcapping"] = text["attn_logit_softcapping"]
            keys["final_logit_softcapping"] = text["final_logit_softcapping"]
        if family in ("gemma2", "gemma3"):
            keys["attention.sliding_window"] = text["sliding_window"]
        if family == "gemma3":
            ropes = ropes.get("full_attention", ropes)
            keys["rope.scaling.type"] = ropes["rope_type"]
            keys["rope.scaling.factor"] = ropes["factor"]
        keys["rope.freq_base"] = float(ropes["rope_theta"])
        return keys, llama_factors(text, ropes) if family == "llama" else {}
    layers, kinds = text["num_hidden_layers"], text["layer_types"]
    by_layer = text.get("per_layer_config") or {}
    wide = {"head_dim": text["head_dim"], "num_key_value_heads": text["num_key_value_heads"]}
    wide |= next(iter(by_layer.values()), {})
    shared, width = text["num_kv_shared_layers"], text["intermediate_size"]
    keys |= {
        "context_length": text["max_position_embeddings"],
        "attention.head_count_kv": [
            text["num_key_value_heads"] if kind == LOCAL else wide["num_key_value_heads"]
            for kind in kinds
        ],
        "attention.key_length": wide["head_dim"],
        "attention.value_length": wide["head_dim"],
        "attention.key_length_swa": text["head_dim"],
        "attention.value_length_swa": text["head_dim"],
        "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": [kind == LOCAL for kind in kinds],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": text["hidden_size_per_layer_input"],
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes[LOCAL]["rope_theta"]),
        "rope.dimension_count": wide["head_dim"],
        "rope.dimension_count_swa": text["head_dim"],
        "final_logit_softcapping": float(text["final_logit_softcapping"] or 0.0),
    }
    if text["use_double_wide_mlp"]:
        keys["feed_forward_length"] = [width] * (layers - shared) + [2 * width] * shared
    share = ropes["full_attention"].get("partial_rotary_factor", 1.0)
    turned = int(wide["head_dim"] * share / 2)
    idle = wide["head_dim"] // 2 - turned
    return keys, {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * idle, "float32")}


def llama_factors(text, rope):
    """The tensor of Llama 3.1's rotary embedding, by the formula of llama.cpp's converter."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length, found = rope["original_max_position_embeddings"], []
    for i in range(0, text["head_dim"], 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (i / text["head_dim"])
        if wave < length / high:
            found.append(1.0)
        elif wave > length / low:
            found.append(rope["factor"])
        else:
            smooth = (length / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    assert {1.0, rope["factor"]} < {*found}
    return {"rope_freqs.weight": np.array(found, "float32")}


def adjacent(array, heads):
    """Rows as llama.cpp's converter moves those of Llama's queries and keys."""
    return array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def converted(folder, path, settings=None, tensors=None, kinds=("F32",)):
    """Writes the file that llama.cpp's converter makes of a directory.

    Args:
        folder: the directory.
        path: the file.
        settings: keys that are other than the converter's; None leaves one out.
        tensors: tensors that are other than the converter's; None leaves one out.
        kinds: types of the matrices, one after the other.

    Returns:
        The keys, and the tensors as they are read.
    """
    import gguf

    text = json.loads((folder / "config.json").read_text())
    family = text["model_type"].removesuffix("_text")
    keys, held = keys_of(text, family)
    architecture = getattr(gguf.MODEL_ARCH, family.upper())
    names = gguf.get_tensor_name_map(architecture, text["num_hidden_layers"])
    for name, tensor in read_safetensors(folder).items():
        # llama.cpp multiplies by what transformers adds 1 to.
        shift = family in GEMMAS and name.endswith("norm.weight")
        array = tensor.read() + shift
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if family == "llama" and name.endswith(f"{part}_proj.weight"):
                array = adjacent(array, text[heads])
        held[names.get_name(name.removesuffix(".weight")) + ".weight"] = array
    keys |= settings or {}
    held |= tensors or {}
    writer = gguf.GGUFWriter(path, family)
    adders = {
        **{bool: writer.add_bool, int: writer.add_uint32},
        **{float: writer.add_float32, str: writer.add_string},
    }
    for name, value in keys.items():
        if value is not None:
            add = adders.get(type(value), writer.add_array)
            add(f"{family}.{name}", value)
    random = np.random.default_rng(0)
    for i, (name, array) in enumerate(held.items()):
        if array is None:
            continue
        array = np.ascontiguousarray(array, "float32")
        kind = gguf.GGMLQuantizationType[kinds[i % len(kinds)] if array.ndim == 2 else "F32"]
        if kind.name in RANDOM:
            shape = array.shape[0], array.shape[1] // 256 * RANDOM[kind.name]
            data = random.integers(0, 60, shape).astype("uint8")
        else:
            data = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        held[name] = gguf.quants.dequantize(data, kind).reshape(array.shape)
    finish(writer)
    return keys, held


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def content(path, family):
    """Keys of the architecture and tensors of a file."""
    import gguf

    reader = gguf.GGUFReader(path)
    keys = {
        name.removeprefix(f"{family}."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(f"{family}.")
    }
    return keys, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def debug(family="gemma4", preset="gemma4_debug", **changes):
    """A debug model whose norms and scalars count, with other settings."""
    task = TASKS.get(family, GemmaCausalLM)
    preset = preset if family == "gemma4" else f"{family}_debug"
    model = task.from_preset(preset, preprocessor=None, **changes)
    for i, weight in enumerate(model.weights):
        if "norm" in weight.path or "scalar" in weight.path:
            weight.assign(np.random.default_rng(i).normal(1.0, 0.4, weight.shape))
    return model


@pytest.mark.parametrize("name", FILES)
def test_what_the_converter_makes_of_a_directory_is_read_and_written(references, tmp_path, name):
    family = name.partition("/")[0]
    row = row_of(name, references)
    settings = {"rope.scaling.original_context_length": 64} if family == "llama3" else None
    keys, held = converted(row.path, tmp_path / "theirs.gguf", settings)
    assert ("output.weight" in held) == name.endswith("/untied")
    model = row.task.from_preset(tmp_path / "theirs.gguf")
    if family != "gemma4":  # whose file has another spelling of some settings
        assert model.backbone.config == row.model.backbone.config
    logits, limit = to_numpy(model(row.inputs)), tolerance("logits")
    np.testing.assert_allclose(logits, row.expected["logits"], rtol=0, atol=limit)
    model.export_to_gguf(tmp_path / "ours.gguf", "float32")
    written, tensors = content(tmp_path / "ours.gguf", family.replace("llama3", "llama"))
    assert set(tensors) == set(held)
    for tensor, array in held.items():
        np.testing.assert_array_equal(tensors[tensor], array.reshape(tensors[tensor].shape))
    assert written.pop("vocab_size") == model.backbone.config.vocabulary_size
    if family != "gemma4":
        keys["rope.dimension_count"] = model.backbone.config.head_dim  # which llama.cpp infers
    assert set(written) == set(keys)
    for key, value in keys.items():
        of_all = isinstance(value, list) and not isinstance(written[key], list)
        if of_all and len(set(value)) == 1:
            value = value[0]
        assert written[key] == pytest.approx(value, rel=1e-7), key


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma", {"global_rope_wavelength": 500.0, "local_rope_wavelength": 500.0}),
        ("gemma2", {"query_head_dim_normalize": True, "attention_logit_soft_cap": 3.0}),
        ("gemma3", {"global_rope_scaling_factor": 8.0}),
        ("gemma4", {}),
        ("gemma4", {"tie_word_embeddings": False}),
        ("llama3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama3", {"head_dim": 16, "rope_frequency_adjustment_factor": 32.0}),
        ("llama3", {"head_dim": 32, "rope_low_freq_factor": 0.5, "rope_high_freq_factor": 6.25}),
        ("qwen3", {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}),
        ("qwen3", {"rope_scaling_factor": 4.0, "rope_max_wavelength": 5e5, "dropout": 0.1}),
        ("qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    ],
)
def test_a_model_comes_back_bit_for_bit(tmp_path, family, changes):
    model = debug(family, **changes)
    again = type(model).from_preset(model.export_to_gguf(tmp_path / "it.gguf", "float32"))
    # Norms are stored with the 1 that llama.cpp does not add.
    near, limit = (2.4e-7, tolerance("logits")) if family in GEMMAS else (0, 0)
    for left, right in zip(model.weights, again.weights, strict=True):
        assert left.path == right.path
        found, held = to_numpy(right), to_numpy(left)
        np.testing.assert_allclose(found, held, rtol=0, atol=near, err_msg=left.path)
    if family == "gemma4":
        blocks = [[m.backbone.config.block(i) for i in range(4)] for m in (model, again)]
        assert blocks[0] == blocks[1]
    elif family not in GEMMAS:
        # What counts in training alone is in no file, and the length is that of published models.
        config = model.backbone.config
        config = {
            **config.to_dict(),
            "dropout": 0.0,
            "max_sequence_length": config.published_length,
        }
        assert again.backbone.config.to_dict() == config
    ids = np.arange(24).reshape(2, 12)
    np.testing.assert_allclose(run(again, ids), run(model, ids), rtol=0, atol=limit)


@pytest.mark.parametrize("family", ["gemma3", *TASKS])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_smaller_types_are_as_near_as_they_can_be(tmp_path, family, dtype):
    import gguf

    # Kernels with 32 numbers in each row.
    changes = {"hidden_size_per_layer_input": 32} if family == "gemma4" else {}
    model = debug(family, **changes)
    path = model.export_to_gguf(tmp_path / "it.gguf", dtype)
    again = type(model).from_preset(path)
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "q8_0": 0.5 / 127 + 2.0**-11}[dtype]
    for left, right in zip(model.weights, again.weights, strict=True):
        held = to_numpy(left)
        assert np.abs(to_numpy(right) - held).max() <= 1.01 * step * np.abs(held).max(), left.path
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    small = {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    tables = {"gemma3": "token_embd.weight", "gemma4": "per_layer_token_embd.weight"}
    table = tables.get(family, "output.weight")
    whole = ("output_norm.weight", "blk.0.attn_norm.weight")
    if family != "llama3":
        whole += ("blk.0.attn_q_norm.weight",)
    if family in ("gemma4", "llama3"):
        whole += ("rope_freqs.weight",)
    if family == "gemma4":
        whole += ("blk.0.layer_output_scale.weight",)
    assert kinds[table] == kinds["blk.0.attn_q.weight"] == small
    assert {kinds[name] for name in whole} == {"F32"}


@pytest.mark.parametrize(
    ("family", "changes", "kinds"),
    [
        ("gemma", {}, ("F32", "F16", "BF16")),
        ("gemma2", {"attention_logit_soft_cap": 20.0, "final_logit_soft_cap": 10.0}, ("Q8_0",)),
        ("gemma3", {"global_rope_scaling_factor": 8.0}, ("Q4_K", "Q5_K", "Q6_K")),
        ("gemma3", {"global_rope_scaling_factor": 8.0, "tie_word_embeddings": False}, ("F32",)),
    ],
)
def test_config_and_tensors_of_each_generation(tmp_path, family, changes, kinds):
    # K-quants take 256 numbers of a row together.
    sizes = {"hidden_dim": 256, "num_layers": 1, "vocabulary_size": 24, "head_dim": 64}
    sizes |= {"intermediate_dim": 512, "query_head_dim_normalize": True, "max_sequence_length": 64}
    model = debug(family, **sizes, **changes)
    model.export_to_transformers(tmp_path / "model")
    _, held = converted(tmp_path / "model", tmp_path / "theirs.gguf", kinds=kinds)
    again = GemmaCausalLM.from_preset(tmp_path / "theirs.gguf")
    pattern = again.backbone.config.sliding_window_pattern
    wanted = {**model.backbone.config.to_dict(), "sliding_window_pattern": pattern}
    assert again.backbone.config.to_dict() == wanted
    for left, right in zip(model.weights, again.weights, strict=True):
        if "norm" in left.path:
            np.testing.assert_allclose(to_numpy(right), to_numpy(left), rtol=0, atol=1e-6)
    again.export_to_gguf(tmp_path / "ours.gguf", "float32")
    _, tensors = content(tmp_path / "ours.gguf", family)
    assert set(tensors) == set(held)
    for name, array in held.items():
        np.testing.assert_allclose(tensors[name], array, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loses_nothing(tmp_path, dtype):
    model = GemmaCausalLM.from_preset("gemma2_debug", dtype=dtype, preprocessor=None)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(0, 0.1, weight.shape).astype("float32"))
    model.export_to_gguf(tmp_path / "it.gguf", "float32")
    again = GemmaCausalLM.from_preset(tmp_path / "it.gguf", dtype=dtype)
    for left, right in zip(model.weights, again.weights, strict=True):
        left, right = (np.asarray(to_numpy(x), "float32") for x in (left, right))
        np.testing.assert_allclose(right, left, rtol=0, atol=1e-6)


def test_a_gemma_3_without_sliding_window_has_no_windows(tmp_path):
    sizes = {"max_sequence_length": 64, "query_head_dim_normalize": True}
    debug("gemma3", **sizes, global_rope_scaling_factor=8.0).export_to_transformers(tmp_path / "it")
    silent = {"attention.sliding_window": None}
    converted(tmp_path / "it", tmp_path / "silent.gguf", silent)
    model = GemmaCausalLM.from_preset(tmp_path / "silent.gguf")
    assert {block.attention.window for block in model.backbone.blocks} == {None}
    assert {block.block.rope_scaling for block in model.backbone.blocks} == {8.0}
    model.export_to_gguf(tmp_path / "ours.gguf", "float32")
    assert "attention.sliding_window" not in content(tmp_path / "ours.gguf", "gemma3")[0]


@pytest.mark.parametrize("name", ["gemma/gemma", "gemma/gemma3", "qwen3/tied"])
def test_silence_about_a_setting_is_that_of_llama_cpp(references, tmp_path, name):
    row = row_of(name, references)
    read = row.task.backbone_class.from_preset
    converted(row.path, tmp_path / "silent.gguf", {"rope.freq_base": None})
    config = read(tmp_path / "silent.gguf", load_weights=False).config
    assert config.block(config.num_layers - 1).rope_wavelength == 10_000.0
    converted(row.path, tmp_path / "none.gguf", {"attention.layer_norm_rms_epsilon": None})
    refused("lacks .*layer_norm_rms_epsilon", read, tmp_path / "none.gguf", load_weights=False)


@pytest.mark.parametrize(
    ("name", "title"),
    [("gemma/gemma", "Gemma"), ("llama3/tied", "Llama 3"), ("qwen3/tied", "Qwen 3")],
)
def test_biases_are_refused(references, tmp_path, name, title):
    row = row_of(name, references)
    biases = {"blk.0.attn_q.bias": np.zeros(8, "float32")}
    settings = {"rope.scaling.original_context_length": 64}
    converted(row.path, tmp_path / "it.gguf", settings, biases)
    message = rf"has biases \(blk.0.attn_q.bias, ...\), and a GGUF file of {title} has none; give"
    for weights in (True, False):
        read = row.task.backbone_class.from_preset
        refused(message, read, tmp_path / "it.gguf", load_weights=weights)


def test_broken_files_are_named(tmp_path):
    import gguf

    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    read = GemmaBackbone.from_preset
    refused(r"cut\.gguf is not a whole GGUF file", read, tmp_path / "cut.gguf")
    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), "float32"))
    finish(writer)
    # The last 8 bytes before the padding say where the only tensor begins.
    whole = (tmp_path / "llama.gguf").read_bytes()
    at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8 + 4
    message = (
        r"moved\.gguf is not .* GGUF file: tensor token_embd.weight begins at byte \d+, not at"
    )
    for moved in (4, 32):  # not aligned, and aligned behind a gap
        changed = whole[:at] + bytes([moved]) + whole[at + 1 :] + bytes(64)
        (tmp_path / "moved.gguf").write_bytes(changed)
        refused(message, read, tmp_path / "moved.gguf")
    message = "holds 'llama'; the model reads gemma, gemma2, gemma3"
    refused(message, read, tmp_path / "llama.gguf")


SCALED = {"query_head_dim_normalize": True, "query_pre_attention_scalar": 5.0}
UNTIED = {"tie_word_embeddings": False}
LARGER = {"vocab_size_per_layer_input": 340}
# No channel turns so often that it lies between the two.
TOO_CLOSE = {"rope_low_freq_factor": 0.5, "rope_high_freq_factor": 0.51}
SHARING = {"layer_types": [LOCAL, "full_attention", LOCAL, LOCAL], "num_kv_shared_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma", UNTIED, "Gemma has no place for tie_word_embeddings=False; use ex"),
        ("gemma2", SCALED, "gemma2 has no place for query_scale="),
        ("gemma2", {"sliding_window_pattern": 1}, "gemma2 has no place for window of layer 0=None"),
        ("gemma2", {"final_logit_soft_cap": None}, "final_logit_soft_cap=None"),
        ("gemma2", UNTIED, "Gemma has no place for tie_word_embeddings=False; use ex"),
        ("gemma4", LARGER, "vocab_size_per_layer_input=340, which is to be"),
        ("gemma4", SHARING, "keys and values of these layers for those that share"),
        ("gemma4", {"use_value_norm": False}, "gemma4 has no place for use_value_norm=False"),
        ("gemma4", {"global_rope_scaling_factor": 2.0}, "place for rope_scaling of layer 1=2.0"),
        ("gemma4", {"query_pre_attention_scalar": 4.0}, "no place for query_scale=0.5"),
        ("gemma4", {"preset": "gemma4_moe_debug"}, "Gemma has no place for .*enable_moe_block"),
        ("llama3", {"attention_bias": True}, "Llama 3 has no place for attention_bias; use ex"),
        ("llama3", TOO_CLOSE, "no place for this rope_low_freq_factor, this rope_high_freq_factor"),
        ("qwen3", {"attention_bias": True}, "Qwen 3 has no place for attention_bias; use ex"),
        ("qwen3", {"sliding_window_size": 4}, "Qwen 3 has no place for sliding_window_size;"),
        ("qwen3", {"layer_norm_epsilon": 1e-14}, "qwen3 has no place for epsilon=1e-14"),
    ],
)
def test_what_a_file_has_no_place_for_is_named(tmp_path, family, changes, message):
    message = rf"(a GGUF file of|llama.cpp's) .*{message}"
    refused(message, debug(family, **changes).export_to_gguf, tmp_path / "it.gguf")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_leaves_the_former(tmp_path):
    (path := tmp_path / "it.gguf").write_bytes(b"before")
    model = debug("gemma2")
    refused(r"ends in \.gguf", model.export_to_gguf, tmp_path / "it.bin")
    message = "'int3'; GGUF files are written as float32, bfloat16, fl"
    refused(message, model.export_to_gguf, path, "int3")
    refused(
        "has no place for final_logit",
        debug("gemma2", final_logit_soft_cap=None).export_to_gguf,
        path,
    )
    model.backbone.enable_lora(2)
    refused("no place for LoRA adapters; call merge_lora first", model.export_to_gguf, path)
    assert [x.read_bytes() for x in tmp_path.iterdir()] == [b"before"]


def test_a_vocabulary_of_scores_goes_along(tmp_path):
    texts = ["the cat sat on the mat", "the dog sat on the log, and the cat ate the rat"] * 4
    tokenizer = train_tokenizer(texts, 400)
    size = tokenizer.vocabulary_size()
    model = debug("gemma", vocabulary_size=size + 3)
    model.preprocessor = GemmaCausalLMPreprocessor(tokenizer)
    model.export_to_gguf(tmp_path / "model.gguf")
    again = Tokenizer.from_file(tmp_path / "model.gguf")
    for text in (*texts[:2], "  The Ca t\n\n… ratatat <start_of_turn>user\nhät 貓<eos>"):
        assert again.tokenize(text) == tokenizer.tokenize(text)
        assert again.detokenize(again.tokenize(text)) == tokenizer.detokenize(
            tokenizer.tokenize(text)
        )
    assert again.start_token_id == tokenizer.start_token_id
    assert again.stop_token_ids == tokenizer.stop_token_ids
    assert again.vocabulary_size() == size + 3


# === Llama 3 ===


def test_a_gguf_file_of_another_rotary_embedding_is_refused(references, tmp_path):
    row = row_of("llama3/tied", references)
    message = "has a rope_freqs.weight that no low_freq_factor and high_freq_factor of Llama 3 give"
    for values in ([1.0, 4.0, 2.0, 8.0], [1.0] * 3):
        factors = {"rope_freqs.weight": np.array(values, "float32")}
        converted(row.path, tmp_path / "other.gguf", None, factors)
        refused(message, row.task.backbone_class.from_preset, tmp_path / "other.gguf")
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    converted(row.path, tmp_path / "yarn.gguf", yarn)
    refused(
        "by YaRN; the model does not", row.task.backbone_class.from_preset, tmp_path / "yarn.gguf"
    )


# === Gemma 4 ===


def test_caps_that_a_file_has_or_lacks(references, tmp_path):
    path = debug(final_logit_soft_cap=None).export_to_gguf(tmp_path / "none.gguf")
    assert content(path, "gemma4")[0]["final_logit_softcapping"] == 0.0
    assert GemmaBackbone.from_preset(path).config.final_logit_soft_cap is None
    # The rounding of a setting stops nothing, and dropout neither.
    path = debug(dropout=0.1, final_logit_soft_cap=20.3).export_to_gguf(tmp_path / "rounded.gguf")
    config = GemmaBackbone.from_preset(path).config
    assert config.dropout == 0.0 and config.final_logit_soft_cap == np.float32(20.3)
    # Silence about the cap is llama.cpp's 30.
    path = tmp_path / "silent.gguf"
    converted(references / "gemma4/plain/model", path, {"final_logit_softcapping": None})
    assert GemmaBackbone.from_preset(path).config.final_logit_soft_cap == 30.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rope.freq_base_swa", None, "lacks gemma4.rope.freq_base_swa"),
        ("attention.sliding_window_pattern", 6, "sliding_window_pattern=6; a list with one"),
        ("attention.head_count_kv", [2, 2], "says gemma4.attention.head_count_kv of 2 layers"),
        ("attention.head_count_kv", [2, 2, 1, 2], "heads of another number in layers of one"),
        ("feed_forward_length", [40, 40, 80, 40], "no counterpart for these feed_forward_length"),
        ("expert_count", 4, "no counterpart for experts"),
        ("rope.scaling.factor", 2.0, "no counterpart for rope.scaling"),
        ("attention.value_length", 8, "attention.value_length=8, and its heads are 10 wide"),
        ("rope.dimension_count", 4, "rope.dimension_count=4, and its heads are 10 wide"),
        ("attention.shared_kv_layers", 2, "shares keys and values of layers that llama.cpp"),
        # Tensors.
        ("rope_freqs.weight", None, "has no rope_freqs.weight of 5 numbers"),
        ("rope_freqs.weight", np.array([1, 2, 1, 1, 1]), "that are 1 and then 1e"),
        ("blk.0.attn_v.weight", None, "values of their own in some global layers alone"),
    ],
)
def test_what_is_not_known_of_a_file_is_named(references, tmp_path, name, value, message):
    folder = references / "gemma4" / "plain" / "model"
    changes = ({}, {name: value}) if name.endswith(".weight") else ({name: value}, {})
    converted(folder, tmp_path / "it.gguf", *changes)
    refused(message, GemmaBackbone.from_preset, tmp_path / "it.gguf", load_weights=False)


def test_keys_and_values_that_shared_layers_do_not_use_are_passed_by(references, tmp_path):
    folder = references / "gemma4" / "all" / "model"
    more = {f"blk.5.attn_{name}.weight": np.zeros((2, 2)) for name in ("k", "v", "k_norm")}
    converted(folder, tmp_path / "it.gguf", None, more)
    GemmaBackbone.from_preset(tmp_path / "it.gguf")
