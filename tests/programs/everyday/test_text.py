"""Programs of people who work with text: tokenizers, preprocessors, chats and data sets."""

import json

import keras
import numpy as np
import pytest

from kmodels.models import (
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaTokenizer,
)
from kmodels.text import Tokenizer, demo
from kmodels.text.training import train_tokenizer

TEXTS = ["the cat sat", "a dog ran", "one and two", "no more rain"]
CHAT = [
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And again."},
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.mark.needs("transformers")
def test_a_tokenizer_and_that_of_transformers_on_the_same_directory(tmp_path):
    from transformers import AutoTokenizer

    train_tokenizer(demo.texts(), 500).save(tmp_path)
    ours, theirs = GemmaTokenizer.from_preset(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, " two  blanks\n\n", "wörld \U0001f600"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ours(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == ours.detokenize(ids) == text


@pytest.mark.needs("transformers")
def test_a_chat_template_survives_training_saving_and_exporting(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(demo.texts(), 500)
    tokenizer.chat_template = TEMPLATE
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=16)
    model = GemmaCausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=preprocessor
    )
    model.save_to_preset(tmp_path / "trained")
    again = GemmaCausalLM.from_preset(tmp_path / "trained")
    again.export_to_transformers(tmp_path / "exported")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ours = again.preprocessor.tokenizer
    wanted = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == wanted
    ids = theirs.apply_chat_template(CHAT, return_dict=False)
    assert ours.apply_chat_template(CHAT) == ids


def test_a_preprocessor_in_a_pipeline_of_each_framework():
    preprocessor = GemmaCausalLMPreprocessor(train_tokenizer(demo.texts(), 500), sequence_length=8)
    x, y, weights = preprocessor(TEXTS)
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        batch = next(iter(tf.data.Dataset.from_tensor_slices(TEXTS).map(preprocessor).batch(4)))
    elif keras.config.backend() == "torch":
        import torch

        loader = torch.utils.data.DataLoader(TEXTS, batch_size=4, collate_fn=preprocessor)
        batch = next(iter(loader))
    else:
        batch = preprocessor(np.array(TEXTS))
    np.testing.assert_array_equal(batch[0]["token_ids"], x["token_ids"])
    np.testing.assert_array_equal(batch[1], y)
    np.testing.assert_array_equal(batch[2], weights)


def test_fit_learns_a_list_of_texts_and_validates_on_another():
    tokenizer = train_tokenizer(demo.texts(), 500)
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)
    keras.utils.set_random_seed(0)
    model = GemmaCausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=preprocessor
    )
    model.compile(optimizer=keras.optimizers.Adam(5e-3))
    history = model.fit(TEXTS, batch_size=2, epochs=8, validation_data=TEXTS[:2], verbose=0).history
    assert float(history["val_loss"][-1]) < 0.5 * float(history["val_loss"][0])
    assert model.evaluate(TEXTS[:2], verbose=0)[0] == pytest.approx(
        float(history["val_loss"][-1]), rel=1e-5
    )
    assert model.generate("the cat", max_length=8).startswith("the cat")


def test_only_responses_count_and_some_count_more():
    tokenizer = train_tokenizer(demo.texts(), 500)
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=12)
    keras.utils.set_random_seed(0)
    model = Gemma3CausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=preprocessor
    )
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    data = {"prompts": ["the cat", "a dog"], "responses": [" sat", " ran"]}
    importance = np.array([1.0, 3.0])
    loss = model.evaluate(data, sample_weight=importance, verbose=0)[0]

    x, y, weights = preprocessor(data)
    logits = np.asarray(model.predict(x, verbose=0), "float64")
    chosen = np.take_along_axis(logits, y[..., None], -1)[..., 0]
    each = np.log(np.exp(logits).sum(-1)) - chosen
    wanted = (each * weights * importance[:, None]).mean()
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_packed_rows_have_the_loss_of_padded_ones():
    tokenizer = train_tokenizer(demo.texts(), 500)
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=32)
    model = GemmaCausalLM.from_preset("gemma3_debug", vocabulary_size=500)
    model.compile()
    packed, padded = preprocessor.pack(TEXTS), preprocessor(TEXTS)
    assert len(packed[1]) < len(padded[1])
    losses = [
        model.evaluate(x, y, sample_weight=weights, verbose=0)[0] * y.size
        for x, y, weights in (packed, padded)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_stop_token_of_the_checkpoint_ends_the_answer(tmp_path):
    preprocessor = GemmaCausalLMPreprocessor(train_tokenizer(demo.texts(), 500), 16)
    model = GemmaCausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=preprocessor
    )
    folder = model.export_to_transformers(tmp_path / "checkpoint")
    prompt = preprocessor.generate_preprocess("the cat")
    going_on = model.generate(prompt, stop_token_ids=None)["token_ids"]
    start = int(prompt["padding_mask"].sum())
    stop = int(going_on[start + 2])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, stop]}))

    model = GemmaCausalLM.from_preset(folder)
    model.preprocessor.sequence_length = 16
    answer = model.generate("the cat", strip_prompt=True)
    until = going_on[start:].tolist().index(stop) + 1
    assert answer == preprocessor.tokenizer.detokenize(going_on[start : start + until])


def test_a_shorter_sequence_for_one_call():
    preprocessor = GemmaCausalLMPreprocessor(train_tokenizer(demo.texts(), 500))
    assert preprocessor(TEXTS)[1].shape == (4, 1024)
    assert preprocessor(TEXTS, sequence_length=6)[1].shape == (4, 6)
    preprocessor.sequence_length = 16
    x, _, _ = preprocessor(TEXTS)
    assert x["token_ids"].shape == (4, 16)
    assert preprocessor.generate_postprocess(x) == TEXTS


@pytest.mark.needs("keras_hub", "sentencepiece", "tensorflow_text")
def test_preprocessing_as_in_keras_hub_with_one_changed_import(tmp_path):
    import keras_hub

    proto = Tokenizer.to_sentencepiece(train_tokenizer(demo.texts(), 500))
    found = []
    for models in (keras_hub.models, __import__("kmodels.models").models):
        tokenizer = models.GemmaTokenizer(proto=proto)
        preprocessor = models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)
        x, y, weights = preprocessor(TEXTS)
        prompts = preprocessor.generate_preprocess(TEXTS, sequence_length=12)
        texts = preprocessor.generate_postprocess(prompts)
        found.append([x["token_ids"], x["padding_mask"], y, weights, prompts["token_ids"], texts])
        assert tokenizer.id_to_token(tokenizer.token_to_id("<eos>")) == "<eos>"
        assert tokenizer.vocabulary_size() == len(tokenizer.get_vocabulary()) == 500
    for theirs, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(theirs), np.asarray(ours))
