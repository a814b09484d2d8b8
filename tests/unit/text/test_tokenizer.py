"""Tokenizers from each kind of file give the ids of the packages that wrote them."""

import io
import json
import os
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import tokenizers

import hub_models
from kmodels.core.files import MOST_BYTES
from kmodels.models import GemmaTokenizer
from kmodels.text import Tokenizer, byte_level, demo
from kmodels.text.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from kmodels.text.sentencepiece import model_class, parse
from kmodels.text.training import train_tokenizer
from refusals import refused
from sentencepiece_files import field, sentencepiece_model, words_model

TEXT = "Hello  wörld,\n\n 123 times\ttab \U0001f600   end "
SPECIAL = "<start_of_turn>user\nHello<end_of_turn>\n"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(demo.texts(), 800)


def test_ids_of_special_tokens_are_gemmas(tokenizer):
    ids = tokenizer.pad_token_id, tokenizer.end_token_id, tokenizer.start_token_id
    assert ids == (0, 1, 2)
    assert tokenizer.special_token_ids == [0, 1, 2, 3, 4, 5]
    assert tokenizer.stop_token_ids == [1, 5]
    assert tokenizer.vocabulary_size() == 800
    assert tokenizer.tokenize(SPECIAL)[0] == 4 and 5 in tokenizer(SPECIAL)


def test_text_comes_back_whole_without_special_tokens(tokenizer):
    assert tokenizer.detokenize(tokenizer(TEXT)) == TEXT
    assert tokenizer.detokenize([[2, *ids, 1, 0] for ids in tokenizer([TEXT, "a"])]) == [TEXT, "a"]
    assert tokenizer.detokenize(tokenizer(SPECIAL)) == "user\nHello\n"
    refused("this is not text: it holds half of a surrogate pair", tokenizer, "\ud800")
    assert tokenizer.id_to_token(-1) is None is tokenizer.id_to_token(2**40)
    refused("expected text, got int", tokenizer, [3])


def test_training_gives_the_same_tokenizer_each_time(tokenizer):
    assert train_tokenizer(demo.texts(), 800).core.to_str() == tokenizer.core.to_str()


def test_saved_and_read_again(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for again in (
        Tokenizer.from_file(tmp_path),
        Tokenizer.from_file(tmp_path / "tokenizer.json"),
        Tokenizer.from_dict(tokenizer.to_dict()),
    ):
        assert again(TEXT + SPECIAL) == tokenizer(TEXT + SPECIAL)
        assert again.start_token == "<bos>" and again.stop_token_ids == [1, 5]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("starts", [True, False])
def test_tokens_around_a_text_are_saved(tmp_path, starts, ends):
    described = {"bos_token": "<s>", "add_bos_token": starts, "add_eos_token": ends}
    tokenizer = _small(tmp_path, "BPE", **described)
    expected = [*([1] if starts else []), 2, *([0] if ends else [])]
    assert tokenizer.encode("a") == expected
    tokenizer.save(tmp_path / "again")
    (tmp_path / "again" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert Tokenizer.from_file(tmp_path / "again").encode("a") == expected


@pytest.mark.needs("transformers")
def test_transformers_reads_it_with_equal_ids(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    ours, theirs = GemmaTokenizer.from_preset(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "the cat sat", " two  blanks\n\n", "wörld \U0001f600"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text) == [2, *tokenizer(text)]
        assert ours.encode(text, add_special_tokens=False) == ours(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == ours.detokenize(ids) == text
        assert theirs.decode(ids, skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (2, 1, 0)


def test_a_file_that_is_no_tokenizer(tmp_path):
    refused("holds no tokenizer: neither tokenizer.json nor tokeni", Tokenizer.from_file, tmp_path)
    refused("no tokenizer at .*a.json: no such file", Tokenizer.from_file, tmp_path / "a.json")
    for name, message in (
        ("a.json", "holds no whole tokenizer"),
        ("a.model", "is not a SentencePiece model"),
    ):
        (tmp_path / name).write_bytes(b"\xff not this")
        refused(f"{name} {message}", Tokenizer.from_file, tmp_path / name)
        os.truncate(tmp_path / name, MOST_BYTES + 1)
        refused("has 134,217,729 bytes, at most 134,217,728", Tokenizer.from_file, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text("")
    os.truncate(tmp_path / "chat_template.jinja", 2**40)
    refused("jinja cannot be read: it has 1,099,511", Tokenizer.from_file, tmp_path / "a.json")
    (tmp_path / "chat_template.jinja").unlink()
    merges = (tmp_path / "vocab.json", tmp_path / "a.model")
    merges[0].write_text("{}")
    refused("a.model cannot be read: it has 134,217,729", byte_level.read, *merges)
    other = model_file(tmp_path / "a.model", kind=4)
    refused("model of kind 4; unigram, BPE and word are read", Tokenizer.from_file, other)
    (tmp_path / "tokenizer_config.json").write_text("{")
    refused("tokenizer_config.json is not readable JSON", Tokenizer.from_file, tmp_path / "a.json")


# --- SentencePiece --------------------------------------------------------------------------------

TURNS = ("<start_of_turn>", "<end_of_turn>", "\n\n", "\u2581\u2581")
PIECES = [
    *((text, 0.0, CONTROL) for text in ("<pad>", "<eos>", "<bos>")),
    ("<unk>", 0.0, UNKNOWN),
    *((text, 0.0, USER_DEFINED) for text in TURNS),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((text, float(-rank), NORMAL) for rank, text in enumerate(("ab", "bc", "\u2581ab", "abc"))),
    *((char, -10.0, NORMAL) for char in "abc\u2581"),
]
FIRST = 8 + 256


def model_file(path, kind=2):
    path.write_bytes(sentencepiece_model(PIECES, kind))
    return path


def test_sentencepiece_merges_by_score(tmp_path):
    tokenizer = Tokenizer.from_file(model_file(tmp_path / "tokenizer.model"))
    ab, bc, space_ab, abc, a, _, c, space = range(FIRST, FIRST + 8)
    byte = 8
    assert tokenizer("abc") == [abc]
    assert tokenizer("bcab") == [bc, ab]
    assert tokenizer(" abc") == [space_ab, c]
    assert tokenizer("a  c") == [a, 7, c]
    assert tokenizer(" c\n\nd") == [space, c, 6, byte + ord("d")]
    assert tokenizer("<end_of_turn>é") == [5, byte + 0xC3, byte + 0xA9]
    assert tokenizer.special_token_ids == [0, 1, 2, 4, 5]
    for text in (" abc", "a  c", " c\n\nd é"):
        assert tokenizer.detokenize(tokenizer(text)) == text


def test_a_model_of_words_cuts_at_blanks(tmp_path):
    (tmp_path / "words.model").write_bytes(words_model(["the", "fox"]))
    tokenizer = Tokenizer.from_file(tmp_path / "words.model")
    assert tokenizer(["the fox", " the bear"]) == [[4, 5], [3, 4, 3]]
    assert tokenizer.detokenize([1, 4, 5, 2]) == "the fox"


@pytest.mark.needs("sentencepiece")
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepieces_own_ids(tmp_path, kind):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(demo.texts()),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type=kind,
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        # A unigram model may cut three blanks either way, so there they are not tested.
        user_defined_symbols=[
            *("<start_of_turn>", "<end_of_turn>", "\n", "\n\n"),
            *(["\u2581\u2581"] if kind == "bpe" else []),
        ],
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.from_file(tmp_path)
    assert ours.vocabulary_size() == theirs.vocab_size()
    texts = [TEXT, SPECIAL, *(str(row) for row in demo.instructions().rows[:300])]
    for text in texts:
        assert ours(text) == theirs.encode(text), text
        if "turn>" not in text:
            assert ours.detokenize(ours(text)) == text


@pytest.mark.needs("gguf")
def test_the_vocabulary_inside_a_gguf(tmp_path):
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in PIECES])
    writer.add_token_scores([score for _, score, _ in PIECES])
    writer.add_token_types([kind for _, _, kind in PIECES])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = Tokenizer.from_file(path)
    theirs = Tokenizer.from_file(model_file(tmp_path / "tokenizer.model"))
    text = " abc a  c\n\nd <end_of_turn>é"
    assert ours(text) == theirs(text)
    assert ours.detokenize(ours(text)) == theirs.detokenize(theirs(text))
    assert (ours.start_token, ours.end_token, ours.pad_token) == ("<bos>", "<eos>", "<pad>")


@pytest.fixture(scope="module")
def complete():
    return hub_models.tokenizer(demo.texts())


def test_sentencepiece_file_written_and_read_again(complete):
    again = GemmaTokenizer.from_sentencepiece(complete.to_sentencepiece())
    assert again(TEXT + SPECIAL) == complete(TEXT + SPECIAL)
    assert again.stop_token_ids == complete.stop_token_ids
    assert again.vocabulary_size() == complete.vocabulary_size()
    assert again.to_sentencepiece() == complete.to_sentencepiece()


@pytest.mark.needs("sentencepiece")
def test_sentencepiece_reads_what_was_written_with_equal_ids(complete):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_proto=complete.to_sentencepiece())
    assert theirs.vocab_size() == complete.vocabulary_size()
    for text in (TEXT, SPECIAL, " a  b", "\u4f60\u597d"):
        assert theirs.encode(text) == complete(text)
    assert (theirs.pad_id(), theirs.eos_id(), theirs.bos_id(), theirs.unk_id()) == (0, 1, 2, 3)


def test_what_a_sentencepiece_file_cannot_hold(complete):
    lower = tokenizers.Tokenizer.from_str(complete.core.to_str())
    lower.normalizer = tokenizers.normalizers.Lowercase()
    write = Tokenizer(lower, end="<eos>").to_sentencepiece
    refused("a SentencePiece file holds.*BPE over Lowercase", write)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    refused("a SentencePiece file holds.*WordLevel", Tokenizer(words, end="<eos>").to_sentencepiece)


# Fields 2, 3 and 5 of a model are those of its trainer, normalizer and denormalizer; of two fields
# with one number, the last one counts.
NOT_FOLLOWED = {
    "treat_whitespace_as_suffix=true": field(2, field(3, 2) + field(24, 1)),
    "escape_whitespaces=false": field(3, field(5, 0)),
    "a denormalizer_spec": field(5, field(2, b"map")),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_settings_of_sentencepiece_that_are_not_followed(name):
    content = sentencepiece_model(PIECES)
    parse(content, "x")
    refused(f"x is a SentencePiece model with {name}", parse, content + NOT_FOLLOWED[name], "x")


def test_blanks_beside_symbols_of_a_users_own_are_named(caplog):
    for prefix in (False, True):
        parse(sentencepiece_model(PIECES, prefix=prefix), "x")
        assert ("x has user_defined_symbols and add_dummy_prefix" in caplog.text) == prefix


@pytest.mark.needs("sentencepiece")
@pytest.mark.parametrize("rule", ["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"])
def test_blanks_that_sentencepiece_takes_away(rule):
    import sentencepiece

    settings = {"model_writer": (file := io.BytesIO()), "normalization_rule_name": rule}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(demo.texts()), vocab_size=400, byte_fallback=True, **settings,
        model_type="bpe", minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    ours = Tokenizer.from_sentencepiece(file.getvalue())
    for text in ("\n the\t", "  the   cat  ", "\u3000the\u00a0 cat\r\n", " ", "\n", "the \n cat"):
        assert ours.tokenize(text) == theirs.encode(text)
    refused("merges with bytes for what is unknown, over plain text", ours.to_sentencepiece)


# === The messages of .model files ===

HAND_MADE = [
    *(("<unk>", 0.0, 2), ("\u2581a", -1.5, NORMAL)),
    *(("é", -2.0, UNUSED), ("<0x00>", 0.0, BYTE)),
]


def test_fields_are_those_of_a_file_written_by_hand():
    model = model_class().FromString(sentencepiece_model(HAND_MADE, kind=2, prefix=True))
    assert [(p.piece.decode(), p.score, p.type) for p in model.pieces] == HAND_MADE
    assert (model.trainer_spec.model_type, model.trainer_spec.byte_fallback) == (2, True)
    rules = model.normalizer_spec
    assert (rules.name, rules.precompiled_charsmap) == (b"identity", b"")
    assert (rules.add_dummy_prefix, rules.remove_extra_whitespaces) == (True, False)


def test_what_a_file_leaves_out_is_the_default_of_sentencepiece():
    model = model_class().FromString(field(1, field(1, b"a")))
    (piece,) = model.pieces
    assert (piece.score, piece.type, model.trainer_spec.model_type) == (0.0, NORMAL, 1)
    assert not model.trainer_spec.byte_fallback
    rules = model.normalizer_spec
    assert rules.add_dummy_prefix and rules.remove_extra_whitespaces and rules.escape_whitespaces


@pytest.mark.parametrize(
    "content",
    [
        sentencepiece_model(HAND_MADE)[:-3],
        field(1, field(1, b"\xff\xfe")),
        field(1, b"\x0a\xff"),
        b"\x0f\x01",
        b"\xff" * 20,
        b"",
    ],
    ids=["cut", "no UTF-8", "cut piece", "wire type 7", "long varint", "empty"],
)
def test_a_damaged_file_is_told_in_a_line(content):
    refused("x is not a SentencePiece model: ", parse, content, "x")


def test_a_panic_of_tokenizers_is_told_in_a_line(tmp_path):
    merged = {"a": 0, "b": 1, "ab": 2}
    model = {"type": "BPE", "vocab": merged, "merges": [["a", "b"]]}
    prefix = {"model": {**model, "continuing_subword_prefix": "../x"}}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(prefix))
    refused("tokenizer.json holds no whole tokenizer: .*; copy it again", Tokenizer.from_file, file)
    fields = {"json": file.read_text()}
    refused("the config holds no whole tokenizer: .*", Tokenizer.from_dict, fields)


VOCABULARY = {"</s>": 0, "<s>": 1, "a": 2}
# Models without their unknown token, which fails at the first text that needs it.
WITHOUT_UNKNOWN = {
    "WordLevel": {"vocab": VOCABULARY, "unk_token": "<unk>"},
    "WordPiece": {
        "vocab": VOCABULARY, "unk_token": "<unk>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 9,
    },
    "Unigram": {
        "vocab": [["</s>", 0.0], ["<s>", 0.0], ["a", -1.0]], "unk_id": None,
        "byte_fallback": False,
    },
    "BPE": {"vocab": VOCABULARY, "merges": [], "unk_token": "<unk>"},
}  # fmt: skip
STRIP = {"type": "Strip", "content": "a", "start": 1, "stop": 1}


def _small(tmp_path, kind, decoder=None, **settings):
    described = {"model": {"type": kind, **WITHOUT_UNKNOWN[kind]}, "decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    return Tokenizer.from_file(tmp_path)


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_a_text_that_a_tokenizer_cannot_cut_is_told_in_a_line(tmp_path, kind):
    tokenizer = _small(tmp_path, kind)
    assert tokenizer.tokenize("a") == [2]
    for encode in (tokenizer.tokenize, tokenizer.encode):
        refused("the tokenizer cannot cut this text into tokens: .*", encode, "b")


def test_ids_that_make_no_text_are_told_in_a_line(tmp_path):
    tokenizer = _small(tmp_path, "BPE", decoder=STRIP)  # which panics at a text of one character
    for decode in (tokenizer.decode, tokenizer.detokenize):
        refused("the tokenizer cannot make text of these ids: .*", decode, [2])
        for number in (-100, 2**40):
            refused(f"there is no token {number}; ids go from 0 to 2", decode, [2, number])
        for strange in (None, [None], ["a"], "a", np.array(["a"]), {"input_ids": [1]}, object()):
            refused("expected token ids, got ", decode, strange)


def test_a_batch_of_ids_gives_a_list_of_texts(tokenizer):
    ids = tokenizer.encode("the cat")
    text = tokenizer.decode(ids)
    for batch in ([ids, ids], np.array([ids, ids]), np.array([ids, ids], "float32")):
        assert tokenizer.decode(batch) == [text, text]
    assert tokenizer.decode(ids[1]) == tokenizer.decode([ids[1]])
    assert tokenizer.decode(np.array(ids)) == text and tokenizer.decode([]) == ""


@pytest.mark.needs("sentencepiece")
def test_the_package_writes_the_same_bytes(complete):
    proto: Any = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto
    ours = complete.to_sentencepiece()
    theirs = proto.FromString(ours)
    assert len(theirs.pieces) > 300 and theirs.trainer_spec.model_type == 2
    # Nothing in the file is unknown to them, and the order of fields is theirs.
    assert theirs.SerializeToString(deterministic=True) == ours
    assert model_class().FromString(ours).SerializeToString(deterministic=True) == ours
    kept = model_class().FromString(theirs.SerializeToString())
    for mine, other in zip(kept.pieces, theirs.pieces, strict=True):
        assert (mine.piece.decode(), mine.score, mine.type) == (
            other.piece, other.score, other.type
        )  # fmt: skip
    for spec in ("trainer_spec", "normalizer_spec"):
        for place, value in getattr(kept, spec).ListFields():
            found = getattr(getattr(theirs, spec), place.name)
            assert found == (
                value.decode()
                if isinstance(value, bytes) and not isinstance(found, bytes)
                else value
            )
