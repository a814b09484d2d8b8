"""Qwen 3 itself: what its directories and its vocabulary of bytes say."""

import json
import shutil

import keras
import numpy as np
import pytest
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Core
from tokenizers.processors import TemplateProcessing

from family_table import row_of
from kmodels.models import (
    Qwen3Backbone,
    Qwen3CausalLM,
    Qwen3CausalLMPreprocessor,
    Qwen3Config,
    Qwen3TextEmbedder,
    Qwen3Tokenizer,
    TextEmbedder,
)
from kmodels.models.qwen3 import FILES
from kmodels.text import byte_level, gguf
from kmodels.text.gguf import BYTES
from kmodels.text.training import train_tokenizer
from kmodels.weights import engine
from refusals import refused
from tolerances import tolerance

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


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("bias", False, r"12 tensors without a variable: \S*self_attn\.\w_proj\.bias"),
        ("tied", True, r"12 variables without a tensor: block_0/attention/query/bias"),
    ],
)
def test_biases_are_in_the_config_and_in_the_file_or_in_neither(
    references, tmp_path, name, said, message
):
    source = references / "qwen3" / name / "model"
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    text = json.loads((source / "config.json").read_text())
    assert text["attention_bias"] is not said
    (tmp_path / "config.json").write_text(json.dumps({**text, "attention_bias": said}))
    refused(message, Qwen3Backbone.from_preset, tmp_path)


# === Text ===


def test_ids_are_those_of_transformers(folder, said):
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    for tokenizer in (
        Qwen3Tokenizer.from_preset(folder),
        Qwen3Tokenizer(folder / "vocab.json", folder / "merges.txt"),
        Qwen3Tokenizer(vocabulary, merges),
    ):
        config = keras.saving.serialize_keras_object(tokenizer)
        for one in (tokenizer, keras.saving.deserialize_keras_object(config)):
            assert one.tokenize(said["texts"]) == said["ids"]
        assert (tokenizer.end_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
        assert tokenizer.start_token_id is None
        assert [tokenizer.detokenize(ids) for ids in said["ids"]] == said["texts"]


def test_a_chat_is_written_as_the_template_of_the_tokenizer_writes_it(folder, said):
    tokenizer = Qwen3Tokenizer.from_preset(folder)
    found = tokenizer.apply_chat_template(said["chat"], tokenize=False, add_generation_prompt=True)
    assert found == said["written"]
    # The preprocessor's own chat format gives the same text, except for a system's own turn.
    preprocessor = Qwen3CausalLMPreprocessor(
        tokenizer, template="qwen3", sequence_length=64, loss_on="responses"
    )
    own = preprocessor.generate_preprocess(CHAT)
    expected = tokenizer.apply_chat_template(
        CHAT["messages"][:1], tokenize=False, add_generation_prompt=True
    )
    ids = own["token_ids"][own["padding_mask"].astype(bool)].tolist()
    assert ids == tokenizer.tokenize(expected)
    # Labels end with the turn.
    _, labels, weights = preprocessor([CHAT])
    learnt = labels[0][weights[0] > 0].tolist()
    assert tokenizer.core.decode(learnt, skip_special_tokens=False) == "Hello!<|im_end|>"


def test_a_directory_with_a_tokenizer_generates_text(folder, tmp_path):
    preprocessor = Qwen3CausalLMPreprocessor.from_preset(folder, sequence_length=16)
    backbone = Qwen3Backbone.from_preset("qwen3_debug", num_layers=1)
    model = Qwen3CausalLM(backbone, preprocessor=preprocessor)
    model.save_to_preset(tmp_path / "model")
    again = Qwen3CausalLM.from_preset(tmp_path / "model")
    assert isinstance(again.preprocessor.tokenizer, Qwen3Tokenizer)
    text = model.generate("Hello", max_length=8)
    assert text.startswith("Hello") and again.generate("Hello", max_length=8) == text


def test_damaged_vocabularies_and_pictures_are_named(folder, tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    images = {"prompts": ["a"], "responses": ["b"], "images": [np.zeros(3)]}
    for read, arguments, message in (
        (Qwen3Tokenizer, ({"a": 0}, None), "needs merges; give the merges.txt too"),
        (Qwen3Tokenizer, ({"a": 0}, ["ab"]), "'ab' is not a merge; give two tokens"),
        (Qwen3Tokenizer, ("none.json", ["a b"]), "none.json is not readable JSON"),
        (Qwen3Tokenizer, (3, ["a b"]), "vocabulary is a int; give token to id"),
        (byte_level.read, (tmp_path / "vocab.json", ["a b"]), r"vocab\.json is not readable JSON"),
        (Qwen3CausalLMPreprocessor.from_preset(folder), (images,), "Qwen 3 takes only text here"),
    ):
        refused(message, read, *arguments)


# === GGUF files ===


def test_biases_have_no_place_in_a_table_of_names():
    config = Qwen3Config(8, 2, 2, 1, 4, 8, 8, attention_bias=True)
    message = "no place for 8 variables: block_0/attention/query/bias"
    backbone = Qwen3Backbone.from_config(config.to_dict())
    refused(message, engine.export, backbone, FILES.gguf_rules(config))


@pytest.mark.needs("gguf")
def test_the_vocabulary_of_merges_and_the_template_go_along(folder, said, tmp_path):
    import gguf

    tokenizer = Qwen3Tokenizer.from_preset(folder)
    tokenizer.core.add_tokens(["<think>"])
    known = tokenizer.vocabulary_size()
    model = Qwen3CausalLM.from_preset(
        "qwen3_debug", vocabulary_size=known + 3, preprocessor=Qwen3CausalLMPreprocessor(tokenizer)
    )
    path = model.export_to_gguf(tmp_path / "it.gguf")
    again = Qwen3CausalLM.from_preset(path).preprocessor.tokenizer
    assert type(again) is type(Qwen3Tokenizer.from_file(path)) is Qwen3Tokenizer
    text = said["written"] + "<think>h\u00e4t \u8c93"
    for texts in (said["texts"], text, "<|im_end|>"):
        assert again.tokenize(texts) == tokenizer.tokenize(texts)
    assert again.tokenize(said["texts"]) == said["ids"]
    assert again.tokenize("<|im_end|>") == [tokenizer.end_token_id]
    assert again.detokenize(again.tokenize(text)) == tokenizer.detokenize(tokenizer.tokenize(text))
    assert (again.start_token_id, again.end_token) == (None, "<|im_end|>")
    for name in ("end_token_id", "stop_token_ids", "special_token_ids", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name) is not None
    # The keys are those of llama.cpp's converter.
    fields = gguf.GGUFReader(path).fields
    keys = {n.removeprefix("tokenizer.ggml."): field.contents() for n, field in fields.items()}
    assert (keys["model"], keys["pre"]) == ("gpt2", "qwen2")
    assert keys["merges"] == (folder / "merges.txt").read_text().splitlines()[1:]
    padding = [f"[PAD{known + i}]" for i in range(3)]
    assert keys["tokens"] == [*tokenizer.get_vocabulary(), *padding]
    kinds = [gguf.TokenType.NORMAL] * known + [gguf.TokenType.UNUSED] * 3
    for i in tokenizer.special_token_ids:
        kinds[i] = gguf.TokenType.CONTROL
    kinds[tokenizer.token_to_id("<think>")] = gguf.TokenType.USER_DEFINED
    assert keys["token_type"] == kinds
    assert keys["eos_token_id"] == tokenizer.end_token_id
    # Without this llama.cpp takes token 11 for the start.
    assert keys["bos_token_id"] == keys["padding_token_id"] == tokenizer.pad_token_id
    assert keys["add_bos_token"] is False


@pytest.mark.needs("gguf")
def test_tokenizers_that_a_file_cannot_hold_are_named(folder):
    core = Qwen3Tokenizer.from_preset(folder).core
    # Tokens behind the table are left out.
    rows = core.get_vocab_size() - 5
    found = gguf.describe(core, rows, BYTES)
    merged = {"".join(pair.split(" ")) for pair in found.merges}
    assert len(found.texts) == rows and merged <= set(found.texts)
    described = json.loads(core.to_str())
    described["model"]["ignore_merges"] = True
    whole = Core.from_str(json.dumps(described))
    pieces = train_tokenizer(["the cat sat on the mat"] * 4, 300).core
    cut = Core.from_str(core.to_str())
    cut.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_tokens([AddedToken("ld", single_word=True)])
    merges = "text that is cut as by qwen2 or llama-bpe; this tokenizer is BPE and cuts it"
    for other, message in (
        (core, "cuts text by more than the merges of its pieces, which"),
        (cut, merges),
        (whole, merges),
        (pieces, merges),
    ):
        refused(message, gguf.describe, other, 400, BYTES)


@pytest.mark.across("torch")
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_transformers_reads_what_is_written(references, folder, said, tmp_path, name):
    import torch
    import transformers

    row = row_of(f"qwen3/{name}", references)
    model, tokenizer = row.read(), Qwen3Tokenizer.from_preset(folder)
    model.resize_token_embeddings(tokenizer.vocabulary_size() + 3)
    model.preprocessor = Qwen3CausalLMPreprocessor(tokenizer)
    model.export_to_gguf(tmp_path / "it.gguf", "float32")
    file = {"gguf_file": "it.gguf", "attn_implementation": "eager"}
    # All but the width of heads, for which transformers takes that of the published models.
    config = transformers.AutoConfig.from_pretrained(tmp_path, **file)
    config.head_dim = model.backbone.config.head_dim
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, dtype=torch.float32, **file
    )
    with torch.no_grad():
        logits = theirs(torch.as_tensor(row.expected["token_ids"])).logits.numpy()
    expected, limit = row.expected["logits"], tolerance("logits")
    np.testing.assert_allclose(logits[..., : expected.shape[-1]], expected, rtol=0, atol=limit)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="it.gguf")
    found = [reader.encode(text, add_special_tokens=False) for text in said["texts"]]
    assert found == said["ids"]
    assert reader.eos_token_id == tokenizer.end_token_id
    chat = reader.apply_chat_template(said["chat"], tokenize=False, add_generation_prompt=True)
    assert chat == said["written"]


# === Embedders ===


@pytest.mark.across
@pytest.mark.parametrize(
    ("pooling", "ends", "tied"), [("lasttoken", "<|endoftext|>", False), ("mean", "", True)]
)
def test_a_directory_of_sentence_transformers(pooling, ends, tied, folder, tmp_path):
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.chat_template = None  # by which sentence-transformers would write every text
    if ends:  # which is not the end token, as in the published Qwen 3 embedders
        assert tokenizer.eos_token != ends
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {ends}", special_tokens=[(ends, tokenizer.convert_tokens_to_ids(ends))]
        )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.Qwen3Config(**sizes, vocab_size=len(tokenizer), tie_word_embeddings=tied)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    modules = [Transformer(str(tmp_path / "bare")), Pooling(32, pooling_mode=pooling), Normalize()]
    theirs = SentenceTransformer(modules=modules, prompts={"query": "Find: ", "document": ""})
    theirs.max_seq_length = 16
    theirs.eval().save(str(tmp_path / "model"))
    with_chats = shutil.copytree(tmp_path / "model", tmp_path / "chats")
    (with_chats / "sentence_bert_config.json").write_text('{"modality_config": {"message": {}}}')
    refused("modality_config has 'message'", TextEmbedder.from_preset, with_chats)
    model = TextEmbedder.from_preset(tmp_path / "model")
    assert isinstance(model, Qwen3TextEmbedder) and model.settings["pooling"] == pooling
    texts = ["a", "the quick brown fox", "it is raining cats and dogs " * 4]
    for name in (None, "query"):
        expected = theirs.encode(texts, prompt_name=name)
        found = model.encode(texts, prompt_name=name)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance("logits_across"))
    again = TextEmbedder.from_preset(model.export_to_transformers(tmp_path / "again"))
    assert again.settings == model.settings
    np.testing.assert_array_equal(again.encode(texts), model.encode(texts))
    # As a causal model it keeps the settings of one.
    assert Qwen3CausalLM.from_preset(tmp_path / "model").preprocessor.add_end_token
