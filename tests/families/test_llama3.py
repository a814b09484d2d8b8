"""Llama 3 itself: its tokenizer, its chat format and its rotary embedding in files."""

import json
from typing import Any

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.models import Llama3CausalLM, Llama3CausalLMPreprocessor, Llama3Tokenizer
from refusals import refused
from tolerances import tolerance


@pytest.fixture(scope="module")
def folder(references):
    return references / "llama3" / "tokenizer"


@pytest.fixture(scope="module")
def said(folder):
    return json.loads((folder / "texts.json").read_text())


def test_ids_begin_with_the_start_token_and_several_end_a_text(folder, said):
    files = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [" ".join(pair) for pair in files["merges"]]
    read = Llama3Tokenizer.from_preset(folder)
    assert read.end_token == "<|eot_id|>" and {*read.stop_token_ids} == {*said["stops"]}
    marks = {"misc_special_tokens": {"<|eom_id|>"}}
    made = Llama3Tokenizer(files["vocab"], merges, "<|begin_of_text|>", "<|eot_id|>", **marks)
    for tokenizer in (read, made, Llama3Tokenizer.from_config(made.get_config())):
        assert [tokenizer.encode(text) for text in said["texts"][:3]] == said["ids"][:3]
        assert tokenizer.tokenize(said["texts"]) == [ids[1:] for ids in said["ids"]]
        assert tokenizer.detokenize(said["ids"]) == said["texts"]
    for more in ({"merges": merges}, marks):
        refused("has its own merges and control tokens", Llama3Tokenizer, read.core, **more)


def test_the_chat_format_is_that_of_the_template(folder, said):
    tokenizer = Llama3Tokenizer.from_preset(folder)
    kind = {"tokenizer": tokenizer, "template": "llama3", "sequence_length": 128}
    preprocessor = Llama3CausalLMPreprocessor(**kind)
    found = preprocessor.generate_preprocess({"messages": said["chat"]})
    ids = found["token_ids"][found["padding_mask"] == 1].tolist()
    assert ids == tokenizer.tokenize(said["written"])


@pytest.mark.needs("gguf")
def test_a_gguf_file_keeps_the_vocabulary_and_the_start_token(folder, said, tmp_path):
    text = Llama3CausalLMPreprocessor.from_preset(folder, sequence_length=16)
    model = Llama3CausalLM.from_preset("llama3_debug", preprocessor=text)
    again = Llama3CausalLM.from_preset(model.export_to_gguf(tmp_path / "it.gguf", "float32"))
    tokenizer = again.preprocessor.tokenizer
    assert type(tokenizer) is Llama3Tokenizer
    assert [tokenizer.encode(text) for text in said["texts"]] == said["ids"]
    assert {*tokenizer.stop_token_ids} == {*said["stops"]}
    assert again.generate("Hello", max_length=8) == model.generate("Hello", max_length=8)


@pytest.mark.across("torch")
def test_transformers_reads_queries_and_keys_of_a_gguf_file(tmp_path):
    import torch
    import transformers

    # transformers reads neither rope_freqs.weight nor linear scaling from such files.
    plain: dict[str, Any] = {"rope_frequency_adjustment_factor": None, "rope_low_freq_factor": None}
    plain |= {"rope_high_freq_factor": None, "rope_pretraining_sequence_length": None}
    model = Llama3CausalLM.from_preset("llama3_debug", preprocessor=None, **plain)
    model.export_to_gguf(tmp_path / "it.gguf", "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="it.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    ids = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = theirs(torch.as_tensor(ids)).logits.numpy()
    np.testing.assert_allclose(to_numpy(model(ids)), expected, rtol=0, atol=tolerance("logits"))
