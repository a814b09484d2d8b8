"""Gemma's text: tokenizers as keras-hub's users call them, what a preprocessor makes, and fits."""

import base64
import copy
import json
import pickle

import keras
import numpy as np
import pytest

import hub_models
from arrays import to_numpy
from chat_cases import said
from kmodels.models import (
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaTokenizer,
)
from kmodels.models.blocks.text_preprocessor import one_by_one
from kmodels.text import Tokenizer, demo
from kmodels.text.training import train_tokenizer
from refusals import refused
from sentencepiece_files import words_model

WORDS = ("the", "quick", "fox")
PROTO = words_model(WORDS)
END, START = 1, 2
ROWS = demo.instructions().rows[:9]


@pytest.fixture
def words():
    return GemmaTokenizer(PROTO)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(demo.texts(), 500)


@pytest.fixture
def preprocessor(tokenizer):
    return GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)


@pytest.fixture(scope="module")
def preset(tokenizer, tmp_path_factory):
    """A directory as a user has one."""
    keras.utils.set_random_seed(0)
    model = GemmaCausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=GemmaCausalLMPreprocessor(tokenizer)
    )
    folder = tmp_path_factory.mktemp("preset") / "gemma"
    model.save_to_preset(folder)
    return folder


# === Tokenizers ===


def test_every_way_to_give_a_model_and_texts(words, tmp_path):
    (tmp_path / "a.spm").write_bytes(PROTO)
    long = words_model([*WORDS, *(f"word{i}" for i in range(200))])
    coded = base64.b64encode(long).decode()
    for given in (tmp_path / "a.spm", str(tmp_path / "a.spm"), PROTO, coded):
        one = GemmaTokenizer(given)
        for texts in (["the fox"], ("the fox",), np.array(["the fox"]), [b"the fox"]):
            assert one(texts) == [[4, 6]]
        assert one("the fox") == one(b"the fox") == one.tokenize(np.array("the fox")) == [4, 6]
    assert words.proto == PROTO
    for ids in ([4, 6], np.array([4, 6]), keras.ops.convert_to_tensor([1, 4, 6, 2])):
        assert words.detokenize(ids) == "the fox"
    assert words.detokenize([[4], [4, 6]]) == ["the", "the fox"]
    for method in (words.detokenize, words.decode):
        refused("expected token ids, got 4.5; give whole numbers", method, np.array([4.0, 4.5]))


def test_vocabulary_and_special_tokens(words):
    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", "▁the", "▁quick", "▁fox"]
    assert words.get_vocabulary() == vocabulary
    assert words.vocabulary_size() == 7
    assert (words.start_token, words.start_token_id) == ("<bos>", 1)
    assert (words.end_token_id, words.pad_token_id) == (2, 0)
    assert set(words.special_tokens) >= {"<pad>", "<bos>", "<eos>"}
    assert words.token_to_id("▁fox") == 6 and words.id_to_token(6) == "▁fox"
    assert words.token_to_id("absent") == words.token_to_id("<unk>")
    for number in (7, -1):
        refused(f"there is no token {number}; ids go from 0 to 6", words.id_to_token, number)


def test_arguments_and_copies():
    tokenizer = GemmaTokenizer(PROTO, 4, add_bos=True, add_eos=True, name="mine")
    assert tokenizer(["the", "the quick fox"]) == [[1, 4, 2, 0], [1, 4, 5, 6]]
    assert tokenizer([]) == []
    serialized = keras.saving.serialize_keras_object(tokenizer)
    for again in (
        copy.deepcopy(tokenizer),
        pickle.loads(pickle.dumps(tokenizer)),
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
        refused(message, GemmaTokenizer, **{"proto": PROTO, **wrong})
    refused("sequence_length is -4; give at least 1", setattr, tokenizer, "sequence_length", -4)
    tokenizer.sequence_length = 2
    assert tokenizer("the") == [1, 4]


def test_presets_come_back_and_those_of_keras_hub(words, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    again = GemmaTokenizer.from_preset(tmp_path / "saved", sequence_length=3)
    assert again("the cat sat") == tokenizer("the cat sat")[:3]
    assert again.stop_token_ids == tokenizer.stop_token_ids
    again.save_to_preset(tmp_path / "twice")
    assert Tokenizer.from_file(tmp_path / "twice")("the cat") == tokenizer("the cat")
    theirs = tmp_path / "hub" / "assets" / "tokenizer"
    theirs.mkdir(parents=True)
    (theirs / "vocabulary.spm").write_bytes(PROTO)
    (tmp_path / "hub" / "tokenizer.json").write_text('{"class_name": "GemmaTokenizer"}')
    assert GemmaTokenizer.from_preset(tmp_path / "hub")("the fox") == words("the fox")


@pytest.mark.needs("tensorflow")
def test_tokenizers_and_preprocessors_in_tf_data(words):
    import tensorflow as tf

    texts = ["the fox", "the quick fox"]
    data = tf.data.Dataset.from_tensor_slices(texts)
    rows = data.batch(2).map(words).map(words.detokenize)
    assert rows.get_single_element().numpy().tolist() == [text.encode() for text in texts]
    single = data.map(words).map(words.detokenize)
    assert [text.numpy().decode() for text in single] == texts
    fixed = data.batch(2).map(GemmaTokenizer(PROTO, 4, dtype="string"))
    assert fixed.element_spec.shape == (None, 4)
    expected = ["▁the".encode(), "▁fox".encode(), b"<pad>", b"<pad>"]
    assert fixed.get_single_element()[0].numpy().tolist() == expected
    preprocessor = GemmaCausalLMPreprocessor(words, sequence_length=6)
    prompts = data.batch(2).map(preprocessor.generate_preprocess).get_single_element()
    wanted = preprocessor.generate_preprocess(texts)
    np.testing.assert_array_equal(prompts["token_ids"], wanted["token_ids"])
    weighted = tf.data.Dataset.from_tensor_slices((texts, [1.0, 2.0])).batch(2)
    weighted = weighted.map(lambda x, w: preprocessor(x, sample_weight=w)).get_single_element()
    np.testing.assert_array_equal(weighted[2], preprocessor(texts, sample_weight=[1.0, 2.0])[2])
    # TensorFlow hands on the message in an error of its own.
    numbers = tf.data.Dataset.from_tensor_slices([[1, 2]])
    with pytest.raises(Exception, match=r"a tokenizer in tf.data got int32 with 1 axes; give"):
        numbers.map(words)
    message = r"the preprocessor got int32 with 1 axes in tf.data; give"
    refused(message, numbers.map, preprocessor)


# === What a preprocessor makes ===


@pytest.mark.needs("keras_hub", "tensorflow_text")
def test_ids_labels_and_weights_equal_keras_hubs():
    import keras_hub

    proto = hub_models.tokenizer(demo.texts()).to_sentencepiece()
    theirs = keras_hub.models.GemmaCausalLMPreprocessor(
        keras_hub.models.GemmaTokenizer(proto), sequence_length=40
    )
    ours = GemmaCausalLMPreprocessor(GemmaTokenizer(proto), sequence_length=40)
    texts = [f"Instruction:\n{r['instruction']}" for r in demo.instructions().rows[:20]]
    texts += demo.texts()[:5]
    prompts = ours.generate_preprocess(texts)
    expected = theirs.generate_preprocess(texts, sequence_length=40)
    pairs = [(ours(texts), theirs(texts)), (prompts, expected)]
    keras.tree.map_structure(np.testing.assert_array_equal, *zip(*pairs, strict=True))
    assert ours.generate_postprocess(prompts) == list(theirs.generate_postprocess(expected))
    assert 0 < ours.cut.examples < len(texts)
    dtypes = keras.tree.map_structure(lambda x: x.dtype.name, ours(texts))
    assert dtypes == ({"token_ids": "int32", "padding_mask": "int32"}, "int32", "float32")


def test_every_way_to_give_texts(preprocessor):
    expected = preprocessor(["a", "b"])
    for given in (("a", "b"), np.array(["a", "b"]), [b"a", b"b"], [{"text": "a"}, {"text": "b"}]):
        again = preprocessor(given)
        assert np.array_equal(again[0]["token_ids"], expected[0]["token_ids"])
    one = preprocessor("a")
    assert one[1].shape == (12,) and np.array_equal(one[1], expected[1][0])
    single = preprocessor({"prompts": "a", "responses": "b"})
    batch = preprocessor({"prompts": ["a"], "responses": np.array(["b"], object)})
    assert single[1].shape == (12,) and np.array_equal(batch[1][0], single[1])
    ready = {"token_ids": np.zeros((1, 3)), "padding_mask": np.ones((1, 3))}
    assert preprocessor(ready) is ready
    assert preprocessor(ready, 1, 2) == (ready, 1, 2)


@pytest.mark.parametrize("loss_on", ["all", "responses"])
def test_a_long_prompt_leaves_the_response_whole(preprocessor, tokenizer, loss_on):
    preprocessor.loss_on = loss_on
    prompt, response = "the cat " * 30, " is"
    x, labels, weights = preprocessor({"prompts": prompt, "responses": response})
    answer = [*tokenizer(response), END]
    assert labels[-len(answer) :].tolist() == answer and weights[-len(answer) :].all()
    ids, kept = tokenizer(prompt), 12 - len(answer)
    # Its middle went: instructions stand at the beginning, the call for a response at the end.
    head = kept - kept // 2
    assert x["token_ids"][1 : 1 + kept].tolist() == ids[:head] + ids[len(ids) - kept // 2 :]
    assert preprocessor.cut.prompt_tokens == len(ids) - kept
    assert str(preprocessor.cut) == (
        f"1 examples cut to fit: {len(ids) - kept} tokens of prompts and 0 of responses"
    )
    # The loss is on responses only where that is asked for.
    _, labels, weights = preprocessor({"prompts": "the cat", "responses": response})
    learnt = answer if loss_on == "responses" else [*tokenizer("the cat"), *answer]
    assert labels[weights > 0].tolist() == learnt
    assert preprocessor("the cat")[2].sum() == len(tokenizer("the cat")) + 1


def test_a_long_response_keeps_some_prompt_and_claims_no_end(preprocessor, tokenizer):
    x, labels, _ = preprocessor({"prompts": "the cat " * 9, "responses": "one two " * 20})
    assert x["token_ids"][1:4].tolist() != tokenizer("one two " * 9)[:3]
    assert labels[3:].tolist() == tokenizer("one two " * 20)[:9]
    assert END not in labels
    assert preprocessor.cut.response_tokens > 0


@pytest.mark.parametrize("length", [2, 3, 5])
def test_no_row_without_something_to_learn(tokenizer, length):
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, length, loss_on="responses")
    rows = demo.tasks().rows[:40]
    assert (preprocessor(rows)[2].sum(axis=-1) > 0).all()
    preprocessor.add_end_token = False
    refused("example 1 has no token to learn: it is empty", preprocessor, ["a", ""])


def test_prompts_and_back(preprocessor):
    prompts = preprocessor.generate_preprocess(["the cat", " a b"])
    assert prompts["token_ids"].shape == (2, 12)
    assert prompts["token_ids"][:, 0].tolist() == [START, START]
    assert END not in prompts["token_ids"]
    assert preprocessor.generate_postprocess(prompts) == ["the cat", " a b"]
    assert preprocessor.generate_preprocess([])["token_ids"].shape == (0, 12)
    one = preprocessor.generate_preprocess("the cat", sequence_length=5)
    assert one["token_ids"].shape == (5,)
    assert preprocessor.generate_postprocess(one) == "the cat"
    assert preprocessor(["the cat"], sequence_length=5)[1].shape == (1, 5)
    twice = preprocessor.generate_preprocess("<bos>the cat")
    assert twice["token_ids"].tolist() == prompts["token_ids"][0].tolist()
    asked = preprocessor.generate_preprocess({"instruction": "a"}, sequence_length=40)
    assert preprocessor.generate_postprocess(asked) == "Instruction:\na\n\nResponse:\n"


def test_settings_and_the_tokenizer_come_back_from_config_and_files(tmp_path):
    tokenizer = Gemma3Tokenizer(PROTO, has_vision_tokens=False)
    preprocessor = Gemma3CausalLMPreprocessor(
        tokenizer, sequence_length=5, name="mine", template="{instruction}={response}"
    )
    assert preprocessor.tokenizer is tokenizer and preprocessor.loss_on == "responses"
    kind, folder = Gemma3CausalLMPreprocessor, tmp_path / "saved"
    preprocessor.save_to_preset(folder)
    for again in (
        kind(**preprocessor.to_dict()),
        kind.from_config(preprocessor.get_config()),
        kind.from_preset(folder),
        copy.deepcopy(preprocessor),
    ):
        assert isinstance(again.tokenizer, Gemma3Tokenizer)
        assert again.sequence_length == 5 and again.loss_on == "responses"
        assert again.template == preprocessor.template
        data = {"prompts": "the", "responses": "fox"}
        np.testing.assert_array_equal(again(data)[1], preprocessor(data)[1])
    assert kind.from_preset(folder, sequence_length=20).sequence_length == 20
    for content, message in (
        ('{"class_name": "Other"}', "json holds a Other, not a GemmaCausalLMPreprocessor"),
        ("{", "preprocessor.json is not readable JSON"),
    ):
        (folder / "preprocessor.json").write_text(content)
        refused(message, GemmaCausalLMPreprocessor.from_preset, folder)


def test_wrong_settings_and_inputs(preprocessor, tokenizer):
    for length in (1, "a"):
        message = "give a whole number from 2 on"
        refused(message, setattr, preprocessor, "sequence_length", length)
    for length in (0, 1, -5, 2.5, "a"):
        message = f"sequence_length is {length!r}; give a whole number"
        for method in ("__call__", "encode", "pack", "generate_preprocess"):
            refused(message, getattr(preprocessor, method), ["the fox"], sequence_length=length)
    message = "loss_on is 'x'; choose one of all, responses"
    refused(message, GemmaCausalLMPreprocessor, tokenizer, loss_on="x")
    refused(message, setattr, preprocessor, "loss_on", "x")
    refused("tokenizer is a int; give a Gemma", setattr, preprocessor, "tokenizer", 3)
    message = "tokenizer is a int; give a GemmaTokenizer, or the path"
    refused(message, GemmaCausalLMPreprocessor, 3)
    fields = tokenizer.to_dict()
    fields["json"] = json.dumps(json.loads(fields["json"])).replace("<end_of_turn>", "<end>")
    message = "template 'gemma' needs the tokens <end_of_turn>, which"
    refused(message, GemmaCausalLMPreprocessor, fields, template="gemma")
    refused("labels are made from the texts; to learn", preprocessor, ["a"], ["b"])
    nested = json.loads('{"a": ' * 600 + "1" + "}" * 600)
    chat = [{"role": "user", "content": "a", "more": nested}]
    refused("got a record that is nested too deeply", preprocessor, [{"messages": chat}])
    message = "there are 1 sample weights for 2 texts; give one each"
    refused(message, preprocessor, ["the", "fox"], sample_weight=[1.0])
    for wrong, message in (
        (
            {"prompts": ["a", "b"], "responses": ["a"]},
            "the columns differ in length: prompts 2, responses 1",
        ),
        (np.zeros(3), "expected text, got ndarray of float64"),
        ([3], "expected text, got int"),
        ([b"\xff"], "a text is not UTF-8 at byte 1"),
        ({"prompts": "a"}, "field 'responses' is missing"),
    ):
        refused(message, preprocessor, wrong)


CHATS = [said(("user", "a"), ("assistant", one)) for one in ("b", "the fox")]
COLUMNS = {
    "chats": ({"messages": CHATS}, [{"messages": one} for one in CHATS]),
    "one chat": ({"messages": CHATS[0]}, {"messages": CHATS[0]}),
    "chats of pandas": (
        {"messages": np.array([*CHATS, None], object)[:2], "n": np.arange(2)},
        [{"messages": one, "n": n} for n, one in enumerate(CHATS)],
    ),
    "texts and numbers": (
        {"prompts": np.array([b"a", b"b"]), "n": [1, None]},
        [{"prompts": "a", "n": 1}, {"prompts": "b", "n": None}],
    ),
    "a text in an array": ({"prompts": np.array("abc"), "n": 3}, {"prompts": "abc", "n": 3}),
    "parts of a chat": (
        {"prompt": [one[:1] for one in CHATS], "completion": [one[1:] for one in CHATS]},
        [{"prompt": one[:1], "completion": one[1:]} for one in CHATS],
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_records(name):
    columns, records = COLUMNS[name]
    single = isinstance(records, dict)
    assert one_by_one(columns) == ([records] if single else records, not single)


# === Fits ===


FORMS = {
    "messages": lambda one: {"messages": one},
    "conversations": lambda one: {
        "conversations": [{"from": m["role"], "value": m["content"]} for m in one]
    },
    "TRL's parts": lambda one: {"prompt": one[:1], "completion": one[1:]},
    "texts": lambda one: {"prompts": one[0]["content"], "responses": one[1]["content"]},
}


@pytest.mark.needs("datasets")
@pytest.mark.parametrize("form", FORMS)
def test_data_sets_of_each_form_are_fitted(preset, form):
    import datasets

    model = GemmaCausalLM.from_preset(preset)
    model.preprocessor.sequence_length = 32
    model.compile(keras.optimizers.SGD(0.0))
    rows = [{**FORMS[form](one), "number": number} for number, one in enumerate(CHATS)]
    table = datasets.Dataset.from_list(rows)
    settings = {"batch_size": 2, "shuffle": False, "verbose": 0}
    losses = [
        model.fit(data, **settings).history["loss"]
        for data in (rows, table, table.to_iterable_dataset(), table.to_pandas())
    ]
    assert losses == [losses[0]] * 4
    refused("the data gives single samples; give", model.fit, lambda: iter(ROWS), verbose=0)
    ids = {name: np.ones((2, 8), "int32") for name in ("token_ids", "padding_mask")}
    refused("the loss needs labels, and there are none", model.fit, ids, verbose=0)


def values(model):
    return {v.path: to_numpy(v).astype("float32") for v in model.weights}


def test_the_script_that_keras_users_know(preset):
    """https://ai.google.dev/gemma/docs/core/lora_tuning with one changed import."""
    template = "Instruction:\n{instruction}\n\nResponse:\n{response}"
    data = [template.format(**row) for row in ROWS]

    gemma_lm = GemmaCausalLM.from_preset(preset)
    gemma_lm.backbone.enable_lora(rank=4)
    before = values(gemma_lm)
    gemma_lm.preprocessor.sequence_length = 32
    gemma_lm.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=5e-5),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    logs = gemma_lm.fit(data, epochs=1, batch_size=2, verbose=0).history
    assert set(logs) == {"loss", "perplexity", "sparse_categorical_accuracy"}
    # At this rate the first matrices hardly move: their gradient grows with the second ones.
    after = values(gemma_lm)
    moved = {path for path, value in after.items() if not np.array_equal(value, before[path])}
    seconds = {path for path in after if path.endswith("/lora_b")}
    assert moved >= seconds and len(seconds) == 2 * 2
    assert all("/lora_" in path for path in moved)

    prompt = template.format(instruction="Say a word.", response="")
    text = gemma_lm.generate(prompt, max_length=40)
    assert text.startswith(prompt)
    assert gemma_lm.generate([prompt, "a"], max_length=40)[0] == text
    assert gemma_lm.generate(prompt, max_length=40, strip_prompt=True) == text[len(prompt) :]


def test_what_is_saved_holds_the_preprocessor(preset):
    model = GemmaCausalLM.from_preset(preset)
    again = GemmaCausalLM.from_config(model.get_config())
    for made in (model, again):
        assert made.preprocessor.template == "auto"
        assert made.preprocessor.tokenizer.vocabulary_size() == 500
    # The vocabulary is a file of its own, which transformers and tokenizers read.
    assert (preset / "config.json").stat().st_size < 4000
    assert Tokenizer.from_file(preset).vocabulary_size() == 500


PAIRS = {"prompts": ["the cat", "a dog", "one", "two"], "responses": [" sat", " ran", " 1", " 2"]}
TEXTS = [prompt + response for prompt, response in zip(*PAIRS.values(), strict=True)]
RECORDS = [dict(zip(PAIRS, row, strict=True)) for row in zip(*PAIRS.values(), strict=True)]
HALVES = [{name: column[i : i + 2] for name, column in PAIRS.items()} for i in (0, 2)]
imported = pytest.importorskip
# How users hold texts, and prompts with responses; of what is in batches `fit` makes none.
KINDS = {
    "columns": (lambda: np.array(TEXTS), lambda: PAIRS),
    "records": (lambda: TEXTS, lambda: RECORDS),
    "generator": (lambda: iter((TEXTS[:2], TEXTS[2:])), lambda: iter(HALVES)),
    "pandas": (
        lambda: imported("pandas").Series(TEXTS),
        lambda: imported("pandas").DataFrame(PAIRS),
    ),
    "datasets": (
        lambda: imported("datasets").Dataset.from_dict({"text": TEXTS})["text"],
        lambda: imported("datasets").Dataset.from_dict(PAIRS),
    ),
    "torch": tuple(
        lambda data=data: imported("torch").utils.data.DataLoader(data, batch_size=2)
        for data in (TEXTS, RECORDS)
    ),
    "tensorflow": tuple(
        lambda data=data: imported("tensorflow").data.Dataset.from_tensor_slices(data).batch(2)
        for data in (TEXTS, PAIRS)
    ),
}
BATCHED = ("generator", "torch", "tensorflow")
PEERS = ("pandas", "datasets", "torch", "tensorflow")


@pytest.fixture(scope="module")
def model(tokenizer):
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=12)
    model = Gemma3CausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=preprocessor
    )
    model.compile()
    return model


@pytest.mark.parametrize("paired", [False, True], ids=["texts", "pairs"])
@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.needs(x)] * (x in PEERS)) for x in KINDS]
)
def test_texts_as_they_come_are_what_the_preprocessor_makes_of_them(model, kind, paired):
    x, y, weights = model.preprocessor(PAIRS if paired else TEXTS)
    wanted = model.evaluate(x, y, sample_weight=weights, batch_size=2, verbose=0)
    given = KINDS[kind][paired]()
    found = model.evaluate(given, batch_size=None if kind in BATCHED else 2, verbose=0)
    assert [float(x) for x in found] == pytest.approx([float(x) for x in wanted], rel=1e-5)
