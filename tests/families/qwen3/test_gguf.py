"""GGUF files of Qwen 3: beside transformers' model, by the names of the gguf package, and read."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Core

from arrays import to_numpy
from decoder_case import DecoderCase
from kmodels.core.errors import InputError
from kmodels.models import (
    Qwen3Backbone,
    Qwen3CausalLM,
    Qwen3CausalLMPreprocessor,
    Qwen3Tokenizer,
)
from kmodels.models.qwen3.presets import PRESETS
from kmodels.text import gguf_writer
from kmodels.text.gguf import BYTES
from kmodels.text.training import train_tokenizer
from kmodels.weights import read_safetensors
from tolerances import tolerance

pytestmark = pytest.mark.needs("gguf")


def converted(folder, path):
    """What llama.cpp's converter makes of a directory; gives keys and tensors."""
    import gguf

    text = json.loads((folder / "config.json").read_text())
    keys = {
        "context_length": 40960,
        "block_count": text["num_hidden_layers"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "rope.freq_base": float(text["rope_parameters"]["rope_theta"]),
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, text["num_hidden_layers"])
    held = {
        f"{names.get_name(name.removesuffix('.weight'))}.weight": tensor.read()
        for name, tensor in read_safetensors(folder).items()
    }
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, value in keys.items():
        if isinstance(value, float):
            writer.add_float32(f"qwen3.{name}", value)
        else:
            writer.add_uint32(f"qwen3.{name}", value)
    for name, array in held.items():
        writer.add_tensor(name, np.ascontiguousarray(array, "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return keys, held


def content(path):
    """All keys and tensors of a file."""
    import gguf

    reader = gguf.GGUFReader(path)
    keys = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    return keys, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def debug(**changes):
    """One with norms that are not trivial, and 32 numbers in each row of a kernel."""
    model = Qwen3CausalLM(Qwen3Backbone(**{**PRESETS["qwen3_debug"], **changes}))
    for i, weight in enumerate(model.weights):
        if "norm" in weight.path:
            weight.assign(np.random.default_rng(i).normal(1.0, 0.4, weight.shape))
    return model


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_what_the_converter_makes_of_a_directory_is_read_and_written(references, tmp_path, name):
    case = DecoderCase(references / "qwen3" / name, Qwen3CausalLM)
    keys, held = converted(case.path, tmp_path / "theirs.gguf")
    model = Qwen3CausalLM.from_preset(tmp_path / "theirs.gguf")
    found, limit = to_numpy(model(case.inputs)), tolerance("logits")
    np.testing.assert_allclose(found, case.expected["logits"], rtol=0, atol=limit)
    model.export_to_gguf(tmp_path / "ours.gguf", "float32")
    written, tensors = content(tmp_path / "ours.gguf")
    assert set(tensors) == set(held) and ("output.weight" in held) == (name == "untied")
    for tensor, array in held.items():
        np.testing.assert_array_equal(tensors[tensor], array)
    ours = {n.removeprefix("qwen3."): v for n, v in written.items() if n.startswith("qwen3.")}
    assert ours.pop("vocab_size") == model.backbone.config.vocabulary_size
    assert ours.pop("rope.dimension_count") == model.backbone.config.head_dim
    assert ours == pytest.approx(keys, rel=1e-7)


@pytest.mark.across("torch")
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_transformers_reads_what_is_written(references, tmp_path, name):
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    case = DecoderCase(references / "qwen3" / name, Qwen3CausalLM)
    tokenizer = Qwen3Tokenizer.from_preset(references / "qwen3" / "tokenizer")
    case.model.resize_token_embeddings(tokenizer.vocabulary_size() + 3)
    case.model.preprocessor = Qwen3CausalLMPreprocessor(tokenizer)
    case.model.export_to_gguf(tmp_path / "it.gguf", "float32")
    file: dict[str, Any] = {"gguf_file": "it.gguf", "attn_implementation": "eager"}
    # All but the width of heads, for which transformers takes that of the published models.
    config = transformers.AutoConfig.from_pretrained(tmp_path, **file)
    config.head_dim = case.model.backbone.config.head_dim
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, dtype=torch.float32, **file
    )
    with torch.no_grad():
        logits = theirs(torch.as_tensor(case.expected["token_ids"])).logits.numpy()
    rows = case.expected["logits"].shape[-1]
    limit = tolerance("logits")
    np.testing.assert_allclose(logits[..., :rows], case.expected["logits"], rtol=0, atol=limit)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="it.gguf")
    said = json.loads((references / "qwen3" / "tokenizer" / "texts.json").read_text())
    found = [reader.encode(text, add_special_tokens=False) for text in said["texts"]]
    assert found == said["ids"]
    assert reader.eos_token_id == tokenizer.end_token_id
    chat = reader.apply_chat_template(said["chat"], tokenize=False, add_generation_prompt=True)
    assert chat == said["written"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        {"rope_scaling_factor": 4.0, "rope_max_wavelength": 5e5, "dropout": 0.1},
        {"head_dim": 16, "num_key_value_heads": 1},
    ],
)
def test_a_model_comes_back_bit_for_bit(tmp_path, changes):
    model = debug(**changes)
    again = Qwen3CausalLM.from_preset(model.export_to_gguf(tmp_path / "it.gguf", "float32"))
    for left, right in zip(model.weights, again.weights, strict=True):
        assert left.path == right.path
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right), err_msg=left.path)
    # What counts in training alone is in no file.
    assert again.backbone.config.to_dict() == {**model.backbone.config.to_dict(), "dropout": 0.0}
    ids = np.arange(24).reshape(2, 12)
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    np.testing.assert_array_equal(to_numpy(again(inputs)), to_numpy(model(inputs)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_smaller_types_are_as_near_as_they_can_be(tmp_path, dtype):
    import gguf

    model = debug()
    path = model.export_to_gguf(tmp_path / "it.gguf", dtype)
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "q8_0": 0.5 / 127 + 2.0**-11}[dtype]
    for left, right in zip(model.weights, Qwen3CausalLM.from_preset(path).weights, strict=True):
        held = to_numpy(left)
        assert np.abs(to_numpy(right) - held).max() <= 1.01 * step * np.abs(held).max(), left.path
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    small = {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    assert kinds["output.weight"] == kinds["blk.0.attn_q.weight"] == small
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_q_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "a GGUF file of Qwen 3 has no place for attention_bias; use ex"),
        ({"sliding_window_size": 4}, "a GGUF file of Qwen 3 has no place for sliding_window_size;"),
        ({"layer_norm_epsilon": 1e-14}, "llama.cpp's qwen3 has no place for epsilon=1e-14"),
    ],
)
def test_what_a_file_has_no_place_for_is_named(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        debug(**changes).export_to_gguf(tmp_path / "it.gguf")
    assert not list(tmp_path.iterdir())


# === The vocabulary ===


@pytest.fixture(scope="module")
def folder(references):
    return references / "qwen3" / "tokenizer"


def test_the_vocabulary_of_merges_and_the_template_go_along(folder, tmp_path):
    tokenizer = Qwen3Tokenizer.from_preset(folder)
    tokenizer.core.add_tokens(["<think>"])
    model = debug(vocabulary_size=tokenizer.vocabulary_size() + 3)
    model.preprocessor = Qwen3CausalLMPreprocessor(tokenizer)
    path = model.export_to_gguf(tmp_path / "it.gguf")
    again = Qwen3CausalLM.from_preset(path).preprocessor.tokenizer
    said = json.loads((folder / "texts.json").read_text())
    assert isinstance(again, Qwen3Tokenizer) and again.tokenize(said["texts"]) == said["ids"]
    text = said["written"] + "<think>h\u00e4t \u8c93"
    assert again.tokenize(text) == tokenizer.tokenize(text)
    assert again.detokenize(again.tokenize(text)) == tokenizer.detokenize(tokenizer.tokenize(text))
    assert (again.start_token_id, again.end_token) == (None, "<|im_end|>")
    assert again.stop_token_ids == tokenizer.stop_token_ids
    assert again.special_token_ids == tokenizer.special_token_ids
    assert again.chat_template == tokenizer.chat_template is not None
    keys, _ = content(path)
    value = {n.removeprefix("tokenizer.ggml."): v for n, v in keys.items()}
    assert (value["model"], value["pre"]) == ("gpt2", "qwen2")
    assert value["merges"] == (folder / "merges.txt").read_text().splitlines()[1:]
    kinds = dict(zip(value["tokens"], value["token_type"], strict=True))
    assert (kinds["<|im_end|>"], kinds["<think>"], kinds["Hello"]) == (3, 4, 1)
    assert value["tokens"][-3:] == [f"[PAD{len(kinds) - i}]" for i in (3, 2, 1)]
    assert value["token_type"][-3:] == [5, 5, 5]
    # Without this llama.cpp takes token 11 for the start.
    assert value["bos_token_id"] == tokenizer.pad_token_id and value["add_bos_token"] is False


def test_tokens_behind_the_table_are_left_out(folder):
    core = Qwen3Tokenizer.from_preset(folder).core
    rows = core.get_vocab_size() - 5
    found = gguf_writer.describe(core, rows, BYTES)
    merged = {"".join(pair.split(" ")) for pair in found.merges}
    assert len(found.texts) == rows and merged <= set(found.texts)


def test_tokens_that_are_cut_out_by_rules_of_their_own_are_refused(folder):
    core = Qwen3Tokenizer.from_preset(folder).core
    core.add_tokens([AddedToken("ld", single_word=True)])
    with pytest.raises(InputError, match="cuts text by more than the merges of its pieces, which"):
        gguf_writer.describe(core, 400, BYTES)


def test_other_tokenizers_are_named(folder):
    usual, cut = (Qwen3Tokenizer.from_preset(folder).core for _ in range(2))
    cut.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    described = json.loads(usual.to_str())
    described["model"]["ignore_merges"] = True
    whole = Core.from_str(json.dumps(described))
    pieces = train_tokenizer(["the cat sat on the mat"] * 4, 300).core
    message = "merges of bytes in text that is cut as by qwen2; this tokenizer is BPE and cuts it"
    for other in (cut, whole, pieces):
        with pytest.raises(InputError, match=message):
            gguf_writer.describe(other, 400, BYTES)
