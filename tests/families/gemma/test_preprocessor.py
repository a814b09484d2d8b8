"""What goes into a Gemma: ids, labels and weights, as keras-hub makes them, and what is cut."""

import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import GemmaCausalLMPreprocessor
from kmodels.text import demo
from kmodels.text.training import train_tokenizer

PAD, END, START = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(demo.texts(), 500)


@pytest.fixture
def preprocessor(tokenizer):
    return GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)


def test_texts_as_keras_hub_packs_them(preprocessor, tokenizer):
    short, long = "the cat", "the cat " * 20
    x, labels, weights = preprocessor([short, long])
    ids = tokenizer(short)
    row = [START, *ids, END]
    assert x["token_ids"][0].tolist() == row + [PAD] * (12 - len(row))
    assert x["padding_mask"][0].tolist() == [1] * len(row) + [0] * (12 - len(row))
    assert labels[0].tolist() == [*ids, END] + [PAD] * (13 - len(row))
    assert weights[0].tolist() == [1.0] * (len(row) - 1) + [0.0] * (13 - len(row))
    # Cut at the end, the end token kept.
    assert labels[1].tolist() == [*tokenizer(long)[:11], END] and weights[1].all()
    assert preprocessor.cut.examples == 1
    assert x["token_ids"].dtype == labels.dtype == np.int32 and weights.dtype == np.float32


@pytest.mark.needs("keras_hub", "sentencepiece", "tensorflow_text")
def test_ids_labels_and_weights_equal_keras_hubs(tmp_path):
    import keras_hub
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(demo.texts()),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "bos_piece": "<bos>", "eos_piece": "<eos>"},
        minloglevel=2,
    )
    model = tmp_path / "tokenizer.model"
    theirs = keras_hub.models.GemmaCausalLMPreprocessor(
        keras_hub.models.GemmaTokenizer(model.read_bytes()), sequence_length=40
    )
    ours = GemmaCausalLMPreprocessor(model, sequence_length=40)
    texts = [f"Instruction:\n{r['instruction']}" for r in demo.instructions().rows[:20]]
    texts += demo.texts()[:5]
    their_x, their_labels, their_weights = theirs(texts)
    x, labels, weights = ours(texts)
    for name, value in x.items():
        assert np.array_equal(value, np.asarray(their_x[name]))
    assert np.array_equal(labels, np.asarray(their_labels))
    assert np.array_equal(weights, np.asarray(their_weights))
    prompts = ours.generate_preprocess(texts)
    expected = theirs.generate_preprocess(texts, sequence_length=40)
    for name, value in prompts.items():
        assert np.array_equal(value, np.asarray(expected[name]))
    assert ours.generate_postprocess(prompts) == list(theirs.generate_postprocess(expected))


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


def test_loss_on_responses_only(preprocessor, tokenizer):
    preprocessor.loss_on = "responses"
    _, labels, weights = preprocessor({"prompts": "the cat", "responses": " is"})
    assert labels[weights > 0].tolist() == [*tokenizer(" is"), END]
    assert preprocessor("the cat")[2].sum() == len(tokenizer("the cat")) + 1


@pytest.mark.parametrize("loss_on", ["all", "responses"])
def test_a_long_prompt_leaves_the_response_whole(tokenizer, loss_on):
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=12, loss_on=loss_on)
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
    with pytest.raises(InputError, match="example 1 has no token to learn: it is empty"):
        preprocessor(["a", ""])


def test_chat(preprocessor, tokenizer):
    preprocessor.template, preprocessor.loss_on = "gemma", "responses"
    preprocessor.sequence_length = 40
    turns = [("user", "a"), ("assistant", "b"), ("user", "a"), ("assistant", "c")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    x, labels, weights = preprocessor([record])
    replies = [*tokenizer("b<end_of_turn>"), *tokenizer("c<end_of_turn>")]
    assert labels[weights > 0].tolist() == replies
    assert END not in x["token_ids"][x["padding_mask"] > 0]
    prompt = preprocessor.generate_preprocess(record)
    text = tokenizer.core.decode(
        prompt["token_ids"][prompt["padding_mask"] > 0].tolist(), skip_special_tokens=False
    )
    assert text.startswith("<bos><start_of_turn>user\na<end_of_turn>\n")
    assert text.endswith("<start_of_turn>model\n") and "c" not in text


def test_prompts_and_back(preprocessor):
    prompts = preprocessor.generate_preprocess(["the cat", " a b"])
    assert prompts["token_ids"].shape == (2, 12)
    assert prompts["token_ids"][:, 0].tolist() == [START, START]
    assert END not in prompts["token_ids"]
    assert preprocessor.generate_postprocess(prompts) == ["the cat", " a b"]
    one = preprocessor.generate_preprocess("the cat", sequence_length=5)
    assert one["token_ids"].shape == (5,)
    assert preprocessor.generate_postprocess(one) == "the cat"
    twice = preprocessor.generate_preprocess("<bos>the cat")
    assert twice["token_ids"].tolist() == prompts["token_ids"][0].tolist()
    asked = preprocessor.generate_preprocess({"instruction": "a"}, sequence_length=40)
    assert preprocessor.generate_postprocess(asked) == "Instruction:\na\n\nResponse:\n"


def test_packed_rows_hold_all_targets(preprocessor):
    preprocessor.sequence_length = 250
    rows = demo.instructions().rows[:60]
    packed, labels, weights = preprocessor.pack(rows)
    x, padded_labels, padded_weights = preprocessor(rows)
    assert len(labels) < len(padded_labels)
    assert weights.sum() == padded_weights.sum()
    assert packed["padding_mask"].mean() > x["padding_mask"].mean()
    assert sorted(labels[weights > 0]) == sorted(padded_labels[padded_weights > 0])


def test_settings_and_files_come_back(preprocessor, tmp_path):
    preprocessor.template = "{instruction}={response}"
    preprocessor.save(tmp_path)
    for again in (
        GemmaCausalLMPreprocessor.from_preset(tmp_path),
        GemmaCausalLMPreprocessor(**preprocessor.to_dict()),
    ):
        assert again.to_dict() == preprocessor.to_dict() or again.template == preprocessor.template
        assert np.array_equal(again("the cat")[1], preprocessor("the cat")[1])
    longer = GemmaCausalLMPreprocessor.from_preset(tmp_path, sequence_length=20)
    assert longer.sequence_length == 20
    (tmp_path / "preprocessor.json").write_text("{")
    with pytest.raises(InputError, match=r"preprocessor.json is not readable JSON"):
        GemmaCausalLMPreprocessor.from_preset(tmp_path)


def test_wrong_settings_and_inputs(preprocessor, tokenizer):
    for length in (1, "a"):
        with pytest.raises(InputError, match="give a whole number from 2 on"):
            preprocessor.sequence_length = length
    with pytest.raises(InputError, match="loss_on is 'x'; choose one of all, responses"):
        GemmaCausalLMPreprocessor(tokenizer, loss_on="x")
    with pytest.raises(InputError, match="labels are made from the texts; to learn"):
        preprocessor(["a"], ["b"])
    with pytest.raises(InputError, match="the columns differ in length: prompts 2, responses 1"):
        preprocessor({"prompts": ["a", "b"], "responses": ["a"]})
    for wrong, message in (
        (np.zeros(3), "ndarray of float64 where text belongs"),
        ([3], "int where text belongs"),
        ([b"\xff"], "a text is not UTF-8 at byte 1"),
        ({"prompts": "a"}, "field 'responses' is missing"),
    ):
        with pytest.raises(InputError, match=message):
            preprocessor(wrong)


def test_a_chat_template_needs_its_tokens(tokenizer):
    import json

    fields = tokenizer.to_dict()
    fields["json"] = json.dumps(json.loads(fields["json"])).replace("<end_of_turn>", "<end>")
    with pytest.raises(InputError, match="template 'gemma' needs the tokens <end_of_turn>, which"):
        GemmaCausalLMPreprocessor(fields, template="gemma")
