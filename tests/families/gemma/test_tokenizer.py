"""Gemma's tokenizers as keras-hub's users call them, and what fit takes as text."""

import base64
import copy
import pickle

import keras
import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import (
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
    GemmaCausalLMPreprocessor,
    GemmaTokenizer,
)
from kmodels.text import Tokenizer, demo
from kmodels.text.training import train_tokenizer
from sentencepiece_files import words_model

WORDS = ("the", "quick", "fox")
PROTO = words_model(WORDS)
PROMPTS = ["the cat", "a dog", "one", "two"]
RESPONSES = [" sat", " ran", " 1", " 2"]
TEXTS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


@pytest.fixture
def tokenizer():
    return GemmaTokenizer(PROTO)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(demo.texts(), 500)


def test_every_way_to_give_a_model_and_texts(tokenizer, tmp_path):
    (tmp_path / "a.spm").write_bytes(PROTO)
    long = words_model([*WORDS, *(f"word{i}" for i in range(200))])
    coded = base64.b64encode(long).decode()
    for given in (tmp_path / "a.spm", str(tmp_path / "a.spm"), PROTO, coded):
        one = GemmaTokenizer(given)
        for texts in (["the fox"], ("the fox",), np.array(["the fox"]), [b"the fox"]):
            assert one(texts) == [[4, 6]]
        assert one("the fox") == one(b"the fox") == one.tokenize(np.array("the fox")) == [4, 6]
    assert tokenizer.proto == PROTO
    for ids in ([4, 6], np.array([4, 6]), keras.ops.convert_to_tensor([1, 4, 6, 2])):
        assert tokenizer.detokenize(ids) == "the fox"
    assert tokenizer.detokenize([[4], [4, 6]]) == ["the", "the fox"]


def test_vocabulary_and_special_tokens(tokenizer):
    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", "▁the", "▁quick", "▁fox"]
    assert tokenizer.get_vocabulary() == vocabulary
    assert tokenizer.vocabulary_size() == 7
    assert (tokenizer.start_token, tokenizer.start_token_id) == ("<bos>", 1)
    assert (tokenizer.end_token_id, tokenizer.pad_token_id) == (2, 0)
    assert set(tokenizer.special_tokens) >= {"<pad>", "<bos>", "<eos>"}
    assert tokenizer.token_to_id("▁fox") == 6 and tokenizer.id_to_token(6) == "▁fox"
    assert tokenizer.token_to_id("absent") == tokenizer.token_to_id("<unk>")
    for number in (7, -1):
        with pytest.raises(InputError, match=f"there is no token {number}; ids go from 0 to 6"):
            tokenizer.id_to_token(number)


def test_arguments_and_copies():
    tokenizer = GemmaTokenizer(PROTO, 4, add_bos=True, add_eos=True, name="mine")
    assert tokenizer(["the", "the quick fox"]) == [[1, 4, 2, 0], [1, 4, 5, 6]]
    assert tokenizer([]) == []
    pickled = pickle.loads(pickle.dumps(tokenizer))
    serialized = keras.saving.serialize_keras_object(tokenizer)
    for again in (
        copy.deepcopy(tokenizer),
        pickled,
        keras.saving.deserialize_keras_object(serialized),
    ):
        assert type(again) is GemmaTokenizer and again.name == "mine"
        assert again("the") == [1, 4, 2, 0]
    assert GemmaTokenizer(PROTO, dtype="string")("the fox") == ["▁the", "▁fox"]
    for wrong, message in (
        ({"dtype": "float32"}, "dtype is 'float32'; tokens are int32, int64, string"),
        ({"sequence_length": 0}, "sequence_length is 0; give at least 1"),
        ({"proto": 3}, "proto is a int; give the path of a SentencePiece model"),
        ({"proto": "absent.spm"}, "absent.spm cannot be read: No such file"),
        ({"proto": b"no model"}, "proto is not a SentencePiece model"),
    ):
        with pytest.raises(InputError, match=message):
            GemmaTokenizer(**{"proto": PROTO, **wrong})


def test_presets_come_back_and_those_of_keras_hub(tokenizer, trained, tmp_path):
    trained.save(tmp_path / "saved")
    again = GemmaTokenizer.from_preset(tmp_path / "saved", sequence_length=3)
    assert again("the cat sat") == trained("the cat sat")[:3]
    assert again.stop_token_ids == trained.stop_token_ids
    again.save_to_preset(tmp_path / "twice")
    assert Tokenizer.from_file(tmp_path / "twice")("the cat") == trained("the cat")
    theirs = tmp_path / "hub" / "assets" / "tokenizer"
    theirs.mkdir(parents=True)
    (theirs / "vocabulary.spm").write_bytes(PROTO)
    (tmp_path / "hub" / "tokenizer.json").write_text('{"class_name": "GemmaTokenizer"}')
    assert GemmaTokenizer.from_preset(tmp_path / "hub")("the fox") == tokenizer("the fox")


def test_a_preprocessor_keeps_its_tokenizer_through_config_and_preset(tmp_path):
    tokenizer = Gemma3Tokenizer(PROTO, has_vision_tokens=False)
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=5, name="mine")
    assert preprocessor.tokenizer is tokenizer and preprocessor.loss_on == "responses"
    preprocessor.save_to_preset(tmp_path / "saved")
    for again in (
        Gemma3CausalLMPreprocessor.from_config(preprocessor.get_config()),
        Gemma3CausalLMPreprocessor.from_preset(tmp_path / "saved"),
        copy.deepcopy(preprocessor),
    ):
        assert isinstance(again.tokenizer, Gemma3Tokenizer)
        assert again.sequence_length == 5 and again.loss_on == "responses"
        data = {"prompts": "the", "responses": "fox"}
        np.testing.assert_array_equal(again(data)[1], preprocessor(data)[1])
    with pytest.raises(InputError, match="tokenizer is a int; give a GemmaTokenizer, or the path"):
        GemmaCausalLMPreprocessor(3)
    (tmp_path / "saved" / "preprocessor.json").write_text('{"class_name": "Other"}')
    with pytest.raises(InputError, match="json holds a Other, not a GemmaCausalLMPreprocessor"):
        GemmaCausalLMPreprocessor.from_preset(tmp_path / "saved")
    with pytest.raises(InputError, match="there are 1 sample weights for 2 texts; give one each"):
        preprocessor(["the", "fox"], sample_weight=[1.0])


@pytest.mark.needs("tensorflow")
def test_tokenizers_and_preprocessors_in_tf_data(tokenizer):
    import tensorflow as tf

    texts = ["the fox", "the quick fox"]
    data = tf.data.Dataset.from_tensor_slices(texts)
    rows = data.batch(2).map(tokenizer).map(tokenizer.detokenize)
    assert rows.get_single_element().numpy().tolist() == [text.encode() for text in texts]
    single = data.map(tokenizer).map(tokenizer.detokenize)
    assert [text.numpy().decode() for text in single] == texts
    fixed = data.batch(2).map(GemmaTokenizer(PROTO, 4, dtype="string"))
    assert fixed.element_spec.shape == (None, 4)
    assert fixed.get_single_element()[0].numpy().tolist() == [
        "▁the".encode(),
        "▁fox".encode(),
        b"<pad>",
        b"<pad>",
    ]
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=6)
    prompts = data.batch(2).map(preprocessor.generate_preprocess).get_single_element()
    wanted = preprocessor.generate_preprocess(texts)
    np.testing.assert_array_equal(prompts["token_ids"], wanted["token_ids"])
    weighted = tf.data.Dataset.from_tensor_slices((texts, [1.0, 2.0])).batch(2)
    weighted = weighted.map(lambda x, w: preprocessor(x, sample_weight=w)).get_single_element()
    np.testing.assert_array_equal(weighted[2], preprocessor(texts, sample_weight=[1.0, 2.0])[2])
    # TensorFlow hands on the message in an error of its own.
    numbers = tf.data.Dataset.from_tensor_slices([[1, 2]])
    with pytest.raises(Exception, match=r"a tokenizer in tf.data got int32 with 1 axes; give"):
        numbers.map(tokenizer)
    with pytest.raises(
        InputError, match=r"the preprocessor got int32 with 1 axes in tf.data; give"
    ):
        numbers.map(preprocessor)


def pairs(kind):
    """Prompts with responses as users hold them."""
    records = [{"prompts": p, "responses": r} for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    columns = {"prompts": PROMPTS, "responses": RESPONSES}
    if kind == "columns":
        return columns
    if kind == "records":
        return records
    if kind == "generator":
        return ({name: part[i : i + 2] for name, part in columns.items()} for i in (0, 2))
    if kind == "pandas":
        return pytest.importorskip("pandas").DataFrame(columns)
    if kind == "datasets":
        return pytest.importorskip("datasets").Dataset.from_dict(columns)
    if kind == "torch":
        return pytest.importorskip("torch").utils.data.DataLoader(records, batch_size=2)
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(columns).batch(2)


def texts(kind):
    """Plain texts likewise."""
    if kind == "columns":
        return np.array(TEXTS)
    if kind == "records":
        return TEXTS
    if kind == "generator":
        return (TEXTS[i : i + 2] for i in (0, 2))
    if kind == "pandas":
        return pytest.importorskip("pandas").Series(TEXTS)
    if kind == "datasets":
        return pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS})["text"]
    if kind == "torch":
        return pytest.importorskip("torch").utils.data.DataLoader(TEXTS, batch_size=2)
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(TEXTS).batch(2)


PLAIN = ("columns", "records", "generator")
PEERS = {"pandas": "pandas", "datasets": "datasets", "torch": "torch", "tf.data": "tensorflow"}
KINDS = [*PLAIN, *(pytest.param(kind, marks=pytest.mark.needs(of)) for kind, of in PEERS.items())]


@pytest.fixture(scope="module")
def model(trained):
    preprocessor = Gemma3CausalLMPreprocessor(trained, sequence_length=12)
    model = Gemma3CausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=preprocessor
    )
    model.compile()
    return model


@pytest.mark.parametrize("make", [texts, pairs])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_as_they_come_are_what_the_preprocessor_makes_of_them(model, kind, make):
    x, y, weights = model.preprocessor(pairs("columns") if make is pairs else TEXTS)
    wanted = model.evaluate(x, y, sample_weight=weights, batch_size=2, verbose=0)
    found = model.evaluate(make(kind), batch_size=None if kind in BATCHED else 2, verbose=0)
    assert [float(x) for x in found] == pytest.approx([float(x) for x in wanted], rel=1e-5)


BATCHED = ("generator", "torch", "tf.data")
