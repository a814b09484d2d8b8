"""GGUF files of Gemma 4, beside one written by the names of the gguf package from transformers'."""

import json

import numpy as np
import pytest

from arrays import to_numpy
from decoder_case import DecoderCase
from gemma4_tokenizer import MARKED, TEMPLATE, write
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma.presets import PRESETS
from kmodels.text import Tokenizer
from kmodels.weights import read_safetensors
from tolerances import tolerance

pytestmark = pytest.mark.needs("gguf")

LOCAL = "sliding_attention"
FEATURES = ("plain", "heads", "key_is_value", "per_layer", "turned", "capped", "all")


def converted(folder, path, settings=None, tensors=None):
    """What llama.cpp's converter makes of a directory, with changes; gives keys and tensors."""
    import gguf

    text = json.loads((folder / "config.json").read_text())
    layers, kinds = text["num_hidden_layers"], text["layer_types"]
    by_layer = text.get("per_layer_config") or {}
    wide = {"head_dim": text["head_dim"], "num_key_value_heads": text["num_key_value_heads"]}
    wide |= next(iter(by_layer.values()), {})
    shared, width = text["num_kv_shared_layers"], text["intermediate_size"]
    ropes = text["rope_parameters"]
    pairs = wide["head_dim"] // 2
    share = ropes["full_attention"].get("partial_rotary_factor", 1.0)
    turned = int(wide["head_dim"] * share / 2)
    keys = {
        "context_length": 131072,
        "block_count": layers,
        "embedding_length": text["hidden_size"],
        "feed_forward_length": width,
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": [
            text["num_key_value_heads"] if kind == LOCAL else wide["num_key_value_heads"]
            for kind in kinds
        ],
        "attention.key_length": wide["head_dim"],
        "attention.value_length": wide["head_dim"],
        "attention.key_length_swa": text["head_dim"],
        "attention.value_length_swa": text["head_dim"],
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
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
    keys |= settings or {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    held = {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (pairs - turned), "float32")}
    for name, tensor in read_safetensors(folder).items():
        held[names.get_name(name.removesuffix(".weight")) + ".weight"] = tensor.read()
    held |= tensors or {}
    writer = gguf.GGUFWriter(path, "gemma4")
    kinds_of = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for name, value in keys.items():
        if value is not None:
            add = kinds_of.get(type(value), writer.add_array)
            add(f"gemma4.{name}", value)
    for name, array in held.items():
        if array is not None:
            writer.add_tensor(name, np.ascontiguousarray(array, "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return keys, held


def content(path):
    """Keys of the architecture and tensors of a file."""
    import gguf

    reader = gguf.GGUFReader(path)
    keys = {
        name.removeprefix("gemma4."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith("gemma4.")
    }
    return keys, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


@pytest.mark.parametrize("name", FEATURES)
def test_what_the_converter_makes_of_a_directory_is_read_and_written(references, tmp_path, name):
    case = DecoderCase(references / "gemma4" / name, GemmaCausalLM)
    keys, held = converted(case.path, tmp_path / "theirs.gguf")
    model = GemmaCausalLM.from_preset(tmp_path / "theirs.gguf")
    found, limit = to_numpy(model(case.inputs)), tolerance("logits")
    np.testing.assert_allclose(found, case.expected["logits"], rtol=0, atol=limit)
    model.export_to_gguf(tmp_path / "ours.gguf", "float32")
    written, tensors = content(tmp_path / "ours.gguf")
    assert set(tensors) == set(held)
    for tensor, array in held.items():
        np.testing.assert_array_equal(tensors[tensor], array.reshape(tensors[tensor].shape))
    assert written.pop("vocab_size") == model.backbone.config.vocabulary_size
    assert set(written) == set(keys)
    for key, value in keys.items():
        of_all = isinstance(value, list) and not isinstance(written[key], list)
        if of_all and len(set(value)) == 1:
            value = value[0]
        assert written[key] == pytest.approx(value, rel=1e-7), key


def debug(**changes):
    model = GemmaCausalLM(GemmaBackbone(**{**PRESETS["gemma4_debug"], **changes}))
    for i, weight in enumerate(model.weights):
        if "norm" in weight.path or "scalar" in weight.path:
            weight.assign(np.random.default_rng(i).normal(1.0, 0.4, weight.shape))
    return model


def test_every_feature_at_once_comes_back_bit_for_bit(tmp_path):
    model = debug()
    again = GemmaCausalLM.from_preset(model.export_to_gguf(tmp_path / "it.gguf", "float32"))
    for left, right in zip(model.weights, again.weights, strict=True):
        assert left.path == right.path
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right), err_msg=left.path)
    blocks = [
        [m.backbone.config.block(i) for i in range(m.backbone.config.num_layers)]
        for m in (model, again)
    ]
    assert blocks[0] == blocks[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_smaller_types_are_as_near_as_they_can_be(tmp_path, dtype):
    import gguf

    model = debug(hidden_size_per_layer_input=32)
    path = model.export_to_gguf(tmp_path / "it.gguf", dtype)
    again = GemmaCausalLM.from_preset(path)
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "q8_0": 0.5 / 127 + 2.0**-11}[dtype]
    for left, right in zip(model.weights, again.weights, strict=True):
        held = to_numpy(left)
        assert np.abs(to_numpy(right) - held).max() <= 1.01 * step * np.abs(held).max(), left.path
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["rope_freqs.weight"] == kinds["blk.0.layer_output_scale.weight"] == "F32"
    small = {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    assert kinds["per_layer_token_embd.weight"] == kinds["blk.0.attn_q.weight"] == small


def test_a_model_without_a_cap_says_so(tmp_path):
    path = debug(final_logit_soft_cap=None).export_to_gguf(tmp_path / "it.gguf")
    assert content(path)[0]["final_logit_softcapping"] == 0.0
    assert GemmaBackbone.from_preset(path).config.final_logit_soft_cap is None


def test_dropout_and_the_rounding_of_settings_stop_nothing(tmp_path):
    path = debug(dropout=0.1, final_logit_soft_cap=20.3).export_to_gguf(tmp_path / "it.gguf")
    config = GemmaBackbone.from_preset(path).config
    assert config.dropout == 0.0 and config.final_logit_soft_cap == np.float32(20.3)


def test_silence_about_the_cap_is_llama_cpps_30(references, tmp_path):
    folder = references / "gemma4" / "plain" / "model"
    converted(folder, tmp_path / "it.gguf", {"final_logit_softcapping": None})
    assert GemmaBackbone.from_preset(tmp_path / "it.gguf").config.final_logit_soft_cap == 30.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope.freq_base_swa": None}, "lacks gemma4.rope.freq_base_swa"),
        ({"attention.sliding_window_pattern": 6}, "sliding_window_pattern=6; a list with one"),
        ({"attention.head_count_kv": [2, 2]}, "says gemma4.attention.head_count_kv of 2 layers"),
        ({"attention.head_count_kv": [2, 2, 1, 2]}, "heads of another number in layers of one"),
        ({"feed_forward_length": [40, 40, 80, 40]}, "no counterpart for these feed_forward_length"),
        ({"expert_count": 4}, "no counterpart for experts"),
        ({"rope.scaling.factor": 2.0}, "no counterpart for rope.scaling"),
        ({"attention.value_length": 8}, "values of another width than keys"),
        ({"rope.dimension_count": 4}, "rope.dimension_count below the width"),
        ({"attention.shared_kv_layers": 2}, "shares keys and values of layers that llama.cpp"),
    ],
)
def test_what_is_not_known_of_a_file_is_named(references, tmp_path, settings, message):
    folder = references / "gemma4" / "plain" / "model"
    converted(folder, tmp_path / "it.gguf", settings)
    with pytest.raises(InputError, match=message) as raised:
        GemmaBackbone.from_preset(tmp_path / "it.gguf", load_weights=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"rope_freqs.weight": None}, "has no rope_freqs.weight of 5 numbers"),
        ({"rope_freqs.weight": np.array([1, 2, 1, 1, 1])}, "that are 1 and then 1e"),
        ({"blk.0.attn_v.weight": None}, "values of their own in some global layers alone"),
    ],
)
def test_tensors_that_say_something_else_are_named(references, tmp_path, tensors, message):
    converted(references / "gemma4" / "plain" / "model", tmp_path / "it.gguf", None, tensors)
    with pytest.raises(InputError, match=message):
        GemmaBackbone.from_preset(tmp_path / "it.gguf", load_weights=False)


def test_keys_and_values_that_shared_layers_do_not_use_are_passed_by(references, tmp_path):
    folder = references / "gemma4" / "all" / "model"
    more = {f"blk.5.attn_{name}.weight": np.zeros((2, 2)) for name in ("k", "v", "k_norm")}
    converted(folder, tmp_path / "it.gguf", None, more)
    GemmaBackbone.from_preset(tmp_path / "it.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size_per_layer_input": 340}, "vocab_size_per_layer_input=340, which is to be"),
        (
            {"layer_types": [LOCAL, "full_attention", LOCAL, LOCAL], "num_kv_shared_layers": 1},
            "keys and values of these layers for those that share",
        ),
        ({"use_value_norm": False}, "llama.cpp's gemma4 has no place for use_value_norm=False"),
        ({"global_rope_scaling_factor": 2.0}, "no place for rope_scaling of layer 1=2.0"),
        ({"query_pre_attention_scalar": 4.0}, "no place for query_scale=0.5"),
    ],
)
def test_what_a_file_has_no_place_for_is_named(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        debug(**changes).export_to_gguf(tmp_path / "it.gguf")
    assert not list(tmp_path.iterdir())


def test_the_vocabulary_of_merges_and_the_template_go_along(tmp_path):
    import gguf

    write(tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path)
    model = debug(vocabulary_size=tokenizer.vocabulary_size() + 3)
    model.preprocessor = model.preprocessor_class(tokenizer)
    path = model.export_to_gguf(tmp_path / "it.gguf")
    again = Tokenizer.from_file(path)
    for text in MARKED:
        assert again.tokenize(text) == tokenizer.tokenize(text)
        ids = tokenizer.tokenize(text)
        assert again.detokenize(ids) == tokenizer.detokenize(ids)
    assert again.stop_token_ids == tokenizer.stop_token_ids
    assert again.chat_template == TEMPLATE
    reader = gguf.GGUFReader(path)
    value = {name: field.contents() for name, field in reader.fields.items()}
    assert value["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.pre" not in value
    assert value["tokenizer.ggml.eot_token_id"] == tokenizer.token_to_id("<turn|>")
    kinds = dict(
        zip(value["tokenizer.ggml.tokens"], value["tokenizer.ggml.token_type"], strict=True)
    )
    # The converter makes text of the marks that a parser of replies reads; 3 is control, 4 is text.
    assert kinds["<|turn>"] == 3 and kinds["<|channel>"] == kinds["<tool_call|>"] == 4


def test_merges_across_lines_are_refused(tmp_path):
    from tokenizers import Tokenizer as Core

    write(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    model = described["model"]
    model["vocab"]["\nu"] = len(model["vocab"])
    model["merges"].append(["\n", "u"])
    core = Core.from_str(json.dumps(described))
    model = debug(vocabulary_size=500)
    model.preprocessor = model.preprocessor_class(Tokenizer(core))
    with pytest.raises(InputError, match=r"this tokenizer merges '\\n' and 'u': write hf"):
        model.export_to_gguf(tmp_path / "it.gguf")
