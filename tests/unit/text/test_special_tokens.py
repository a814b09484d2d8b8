"""A token has a role only if a file says so, whatever its text is."""

import json

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from kmodels.models import GemmaTokenizer, Qwen3Tokenizer
from kmodels.text import Tokenizer
from refusals import refused
from sentencepiece_files import words_model

EOS = {"__type": "AddedToken", "content": "<eos>"}
WORDS = (
    "a",
    "<s>",
    "</s>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<|im_end|>",
    "<|endoftext|>",
    "<end_of_turn>",
)
# tokenizer_config.json (None: there is none), the post-processor, config.json; and the texts of the
# start, end and padding token, and of those that end a reply.
CASES = {
    "null": ({"bos_token": None, "eos_token": "</s>"}, None, {}, (None, "</s>", "</s>"), ["</s>"]),
    "absent": ({"eos_token": "</s>"}, None, {}, (None, "</s>", "</s>"), ["</s>"]),
    "named": (
        {"bos_token": "<s>", "eos_token": EOS, "pad_token": "<pad>"},
        None, {}, ("<s>", "<eos>", "<pad>"), ["<eos>"],
    ),
    "named and not added": (
        {"bos_token": "<s>", "eos_token": "<eos>", "add_bos_token": False},
        None, {}, (None, "<eos>", "<eos>"), ["<eos>"],
    ),
    "post-processor": (None, ("<bos>", "</s>"), {}, ("<bos>", "</s>", "</s>"), ["</s>"]),
    "post-processor's start alone": (
        {"eos_token": "<eos>"}, ("<s>", None), {}, ("<s>", "<eos>", "<eos>"), ["<eos>"],
    ),
    "config.json": (
        None, None, {"eos_token_id": [4, 8]}, (None, "<eos>", "<eos>"), ["<eos>", "<end_of_turn>"],
    ),
}  # fmt: skip


def write(folder, settings, around, config):
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(list(WORDS[1:]))
    if around:
        start, end = around
        single = " ".join(filter(None, (start, "$A", end)))
        special = [(text, vocabulary[text]) for text in around if text]
        core.post_processor = TemplateProcessing(single=single, special_tokens=special)
    core.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))


def roles_of(tokenizer):
    stops = [tokenizer.id_to_token(number) for number in tokenizer.stop_token_ids]
    return (tokenizer.start_token, tokenizer.end_token, tokenizer.pad_token), stops


@pytest.mark.parametrize("name", CASES)
def test_roles_are_those_that_the_files_name(tmp_path, name):
    settings, around, config, *expected = CASES[name]
    write(tmp_path, settings, around, config)
    tokenizer = Tokenizer.from_file(tmp_path)
    assert roles_of(tokenizer) == tuple(expected)
    assert roles_of(Tokenizer.from_dict(tokenizer.to_dict())) == tuple(expected)
    tokenizer.save(tmp_path / "again")
    assert roles_of(Tokenizer.from_file(tmp_path / "again")) == tuple(expected)
    saved = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    named = settings or {}
    assert all(saved[key] == value for key, value in named.items())


def test_a_file_that_names_no_end_token_is_refused(tmp_path):
    write(tmp_path, {"bos_token": "<s>"}, None, {})
    refused("no file says which token ends a text; set eos_token in", Tokenizer.from_file, tmp_path)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (GemmaTokenizer, (("<bos>", "<eos>", "<pad>"), ["<eos>", "<end_of_turn>"])),
        (Qwen3Tokenizer, ((None, "<|im_end|>", "<|endoftext|>"), ["<|im_end|>"])),
    ],
)
def test_a_family_has_its_own_where_the_files_are_silent(tmp_path, kind, expected):
    write(tmp_path, None, None, {})
    assert roles_of(kind.from_file(tmp_path)) == expected
    write(tmp_path, {"bos_token": None, "eos_token": "</s>"}, None, {})
    (start, end, _), _ = roles_of(kind.from_file(tmp_path))
    assert (start, end) == (None, "</s>")


# Its plain class adds what the post-processor does, and no start token that is only named.
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0] and name != "named"])
def test_ids_are_those_of_transformers(tmp_path, name):
    from transformers import PreTrainedTokenizerFast

    write(tmp_path, *CASES[name][:3])
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert Tokenizer.from_file(tmp_path).encode("a a") == theirs("a a").input_ids


ADDED = {"<think>": 5, "<call>": 6}
DECODER = {"5": {"content": "<think>", "special": True}, "6": {"content": "<call>"}}


@pytest.mark.parametrize(
    ("files", "ids", "special"),
    [
        ({}, [3], []),
        ({"added_tokens.json": ADDED}, [4, 6, 5], []),
        ({"tokenizer_config.json": {"added_tokens_decoder": DECODER}}, [4, 6, 5], [5]),
    ],
)
def test_tokens_added_behind_a_sentencepiece_model(tmp_path, files, ids, special):
    (tmp_path / "tokenizer.model").write_bytes(words_model(["cat"]))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer("cat<call><think>" if files else "dog") == ids
    assert [i for i in tokenizer.special_token_ids if i > 4] == special


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens.json": {"<think>": 9}}, "'<think>' is to have id 9, which it cannot get"),
        ({"added_tokens.json": {"<bos>": 5}}, "'<bos>' is to have id 5, which is 1 in the voca"),
        (
            {"added_tokens.json": {"<think>": None}},
            "added_tokens.json: <think> is missing or null; give a who",
        ),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"5": 3}}},
            "added_tokens_decoder: 5 is 3; give an object",
        ),
    ],
)
def test_added_tokens_that_do_not_fit_are_refused(tmp_path, files, message):
    (tmp_path / "tokenizer.model").write_bytes(words_model(["cat"]))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    refused(message, Tokenizer.from_file, tmp_path)


@pytest.mark.parametrize("number", [2**31, 2**24])
def test_an_id_that_no_vocabulary_has(tmp_path, number):
    """Everything that lists a vocabulary counts up to the largest id, for minutes or for ever."""
    write(tmp_path, {"eos_token": "<eos>"}, None, {})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused(f"tokenizer.json: the id of 'a' is {number}", Tokenizer.from_file, tmp_path)
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"
    files[1].write_text("")
    for wrong in (number, -1, 0.5, True, "1", None):
        files[0].write_text(json.dumps({"b": 0, "a": wrong}))
        message = f"vocabulary: the id of 'a' is {wrong!r}; give a whole number from 0 to "
        refused(message, Qwen3Tokenizer, *files)
