"""Qwen 3's tokenizer and preprocessor against transformers."""

import json

import keras
import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import Qwen3CausalLM, Qwen3CausalLMPreprocessor, Qwen3Tokenizer
from kmodels.text import byte_level

CHAT = {
    "messages": [
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello!"},
    ]
}


@pytest.fixture(scope="module")
def folder(references):
    return references / "qwen3" / "tokenizer"


@pytest.fixture(scope="module")
def said(folder):
    return json.loads((folder / "texts.json").read_text())


def test_ids_are_those_of_transformers(folder, said):
    from_json = Qwen3Tokenizer.from_preset(folder)
    from_files = Qwen3Tokenizer(folder / "vocab.json", folder / "merges.txt")
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    for tokenizer in (from_json, from_files, Qwen3Tokenizer(vocabulary, merges)):
        assert tokenizer.tokenize(said["texts"]) == said["ids"]
        assert (tokenizer.end_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
        assert tokenizer.start_token_id is None
        for text, ids in zip(said["texts"], said["ids"], strict=True):
            assert tokenizer.detokenize(ids) == text
        again = keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(tokenizer)
        )
        assert again.tokenize(said["texts"]) == said["ids"]


def test_a_chat_is_written_as_the_template_of_the_tokenizer_writes_it(folder, said):
    tokenizer = Qwen3Tokenizer.from_preset(folder)
    found = tokenizer.apply_chat_template(said["chat"], tokenize=False, add_generation_prompt=True)
    assert found == said["written"]
    # The preprocessor's own chat format gives the same text, except for a system's own turn.
    preprocessor = Qwen3CausalLMPreprocessor(tokenizer, template="qwen3")
    own = preprocessor.generate_preprocess(CHAT, sequence_length=64)
    expected = tokenizer.apply_chat_template(
        CHAT["messages"][:1], tokenize=False, add_generation_prompt=True
    )
    ids = own["token_ids"][own["padding_mask"].astype(bool)].tolist()
    assert ids == tokenizer.tokenize(expected)


def test_labels_end_with_the_turn(folder):
    preprocessor = Qwen3CausalLMPreprocessor.from_preset(
        folder, template="qwen3", sequence_length=48, loss_on="responses"
    )
    _, labels, weights = preprocessor([CHAT])
    learnt = labels[0][weights[0] > 0]
    assert preprocessor.tokenizer.core.decode(learnt.tolist(), skip_special_tokens=False) == (
        "Hello!<|im_end|>"
    )


def test_a_directory_with_a_tokenizer_generates_text(folder, tmp_path):
    from kmodels.models import Qwen3Backbone

    preprocessor = Qwen3CausalLMPreprocessor.from_preset(folder, sequence_length=16)
    backbone = Qwen3Backbone.from_preset("qwen3_debug", num_layers=1)
    model = Qwen3CausalLM(backbone, preprocessor=preprocessor)
    model.save_to_preset(tmp_path / "model")
    again = Qwen3CausalLM.from_preset(tmp_path / "model")
    assert isinstance(again.preprocessor.tokenizer, Qwen3Tokenizer)
    text = model.generate("Hello", max_length=8)
    assert text.startswith("Hello") and again.generate("Hello", max_length=8) == text


@pytest.mark.needs("gguf")
def test_the_vocabulary_of_a_gguf_file(folder, said, tmp_path):
    import gguf

    tokenizer = Qwen3Tokenizer.from_preset(folder)
    texts = tokenizer.get_vocabulary()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*texts, "[PAD]"])
    special = set(tokenizer.special_token_ids)
    kinds = [gguf.TokenType.CONTROL if i in special else 1 for i in range(len(texts))]
    writer.add_token_types([*kinds, gguf.TokenType.UNUSED])
    writer.add_token_merges((folder / "merges.txt").read_text().splitlines()[1:])
    writer.add_eos_token_id(tokenizer.end_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_bos_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = Qwen3Tokenizer.from_file(tmp_path / "model.gguf")
    assert found.tokenize(said["texts"]) == said["ids"]
    assert found.start_token_id is None and found.end_token_id == tokenizer.end_token_id
    assert found.tokenize("<|im_end|>") == [tokenizer.end_token_id]


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        ({"a": 0}, None, "needs merges; give the merges.txt too"),
        ({"a": 0}, ["ab"], "'ab' is not a merge; give two tokens"),
        ("none.json", ["a b"], "none.json cannot be read"),
        (3, ["a b"], "vocabulary is a int; give token to id"),
    ],
)
def test_damaged_vocabularies_are_named(vocabulary, merges, message):
    with pytest.raises(InputError, match=message):
        Qwen3Tokenizer(vocabulary, merges)


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(InputError, match=r"vocab\.json is not a vocab\.json"):
        byte_level.read(tmp_path / "vocab.json", ["a b"])


def test_pictures_are_refused(folder):
    preprocessor = Qwen3CausalLMPreprocessor.from_preset(folder)
    with pytest.raises(InputError, match="Qwen 3 takes only text here"):
        preprocessor({"prompts": ["a"], "responses": ["b"], "images": [np.zeros(3)]})
