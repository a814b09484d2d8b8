"""Chats with a Gemma 4: its own template, the one that is built in, and what ends a reply."""

import io
import json

import keras
import numpy as np
import pytest

import gemma4_tokenizer
from arrays import to_numpy
from gemma4_tokenizer import TEMPLATE
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.models.gemma.presets import PRESETS
from kmodels.text import Tokenizer
from kmodels.tools import cli

SYSTEM = {"role": "system", "content": " You are kind. "}
ASKED = {"role": "user", "content": "What is 2 + 2?\n"}
SAID = {"role": "assistant", "content": "<|channel>thought\nthe cat<channel|>It is 4. "}
AGAIN = {"role": "user", "content": "the dog?"}
CHATS = [[ASKED], [SYSTEM, ASKED], [ASKED, SAID, AGAIN], [SYSTEM, ASKED, SAID, AGAIN]]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    gemma4_tokenizer.write(made)
    return made


@pytest.fixture
def text(folder):
    return GemmaCausalLMPreprocessor(folder, sequence_length=96)


def test_what_is_built_in_writes_what_the_template_writes(text):
    own = text.chat_token_ids(CHATS)
    assert text.chat_format is None
    made = GemmaCausalLMPreprocessor(text.tokenizer, template="gemma4")
    assert made.chat_token_ids(CHATS) == own
    text.tokenizer.chat_template = None
    assert text.chat_format == "gemma4"
    assert text.chat_token_ids(CHATS) == own
    assert {ids.count(text.tokenizer.start_token_id) for ids in own} == {1}
    with pytest.raises(InputError, match=r"'gemma' needs the tokens <start_of_turn>, <end_of_turn"):
        made.template = "gemma"


def test_records_teach_replies_alone_and_the_same_by_both(text):
    record = {"messages": [SYSTEM, ASKED, SAID, AGAIN, {**SAID, "content": "the dog sat"}]}
    text.loss_on = "responses"
    own = text([record])
    text.tokenizer.chat_template = None
    one, other = (keras.tree.flatten(found) for found in (own, text([record])))
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right))
    _, labels, weights = own
    learnt = to_numpy(labels)[0][to_numpy(weights)[0] > 0].tolist()
    assert text.tokenizer.decode(learnt) == "It is 4.<turn|>the dog sat<turn|>"


def test_thinking_and_functions_are_the_templates(text):
    (ids,) = text.chat_token_ids([[ASKED]], tools=[TOOL], enable_thinking=True)
    assert text.tokenizer.decode(ids) == (
        '<bos><|turn>system\n<|think|>\n<|tool>declaration:weather{description:<|"|>the weather'
        '<|"|>}<tool|><turn|>\n<|turn>user\nWhat is 2 + 2?<turn|>\n<|turn>model\n'
    )
    (ids,) = text.chat_token_ids([[ASKED, CALLED, AGAIN]])
    assert '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><turn|>' in (
        text.tokenizer.decode(ids)
    )
    text.tokenizer.chat_template = None
    with pytest.raises(InputError, match="'gemma4' does not support tools, enable_thinking; give"):
        text.chat_token_ids([[ASKED]], tools=[TOOL], enable_thinking=True)


@pytest.mark.needs("transformers")
def test_text_and_ids_are_those_of_transformers(folder):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_file(folder), AutoTokenizer.from_pretrained(folder)
    for settings in ({}, {"enable_thinking": True}, {"tools": [TOOL]}):
        for chat in (*CHATS, [ASKED, CALLED, AGAIN]):
            given = {"add_generation_prompt": True, **settings}
            wanted = theirs.apply_chat_template(chat, tokenize=False, **given)
            assert ours.apply_chat_template(chat, tokenize=False, **given) == wanted
            ids = theirs.apply_chat_template(chat, **given, return_dict=True)["input_ids"]
            assert ours.apply_chat_template(chat, **given) == ids


def test_stops_and_what_stays_in_a_text(text):
    tokenizer = text.tokenizer
    ends = [tokenizer.token_to_id(name) for name in ("<eos>", "<turn|>")]
    assert tokenizer.stop_token_ids == text.chat_stop_token_ids == ends
    reply = "<|channel>thought\nthe cat<channel|>It is 4.<turn|>"
    ids = tokenizer.tokenize(reply)
    assert tokenizer.detokenize(ids) == reply.removesuffix("<turn|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "thought\nthe catIt is 4."


@pytest.fixture(scope="module")
def directory(folder, tmp_path_factory):
    """A directory of Hugging Face whose model says one piece and ends its turn."""
    text = GemmaCausalLMPreprocessor(folder)
    size = text.tokenizer.vocabulary_size()
    backbone = GemmaBackbone(**{**PRESETS["gemma4_debug"], "vocabulary_size": size})
    # Blocks add nothing, so that a token's row is compared with all rows: what follows the opened
    # turn is nearest to the piece, and the piece to the end of the turn.
    for block in backbone.blocks:
        for norm in (block.post_attention_norm, block.post_mlp_norm, block.per_layer.norm):
            norm.scale.assign(np.zeros(norm.scale.shape))
    table = np.zeros(backbone.token_embedding.embeddings.shape, "float32")
    first, piece, end = (text.tokenizer.tokenize(x)[0] for x in ("<channel|>", "Paris", "<turn|>"))
    table[first, 0], table[piece, :2], table[end, 1] = 1.0, (2.0, 1.0), 10.0
    backbone.token_embedding.embeddings.assign(table)
    made = tmp_path_factory.mktemp("gemma4") / "model"
    GemmaCausalLM(backbone, text).export_to_transformers(made)
    return made, text.tokenizer.detokenize([piece])


def test_a_directory_chats_in_the_terminal(directory, monkeypatch, capsys):
    path, piece = directory
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 + 2?\n"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["chat", str(path), "--max-new-tokens", "6"])
    assert stop.value.code == 0
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == [1, 16]
    assert GemmaCausalLMPreprocessor.from_preset(path).tokenizer.chat_template == TEMPLATE
    assert capsys.readouterr().out == f"{piece}\n"
