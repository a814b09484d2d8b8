"""Programs of people who work with text: tokenizers, preprocessors, chats and data sets."""

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
from kmodels.text import demo
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


@pytest.fixture
def tokenizer():
    return train_tokenizer(demo.texts(), 500)


def gemma(preprocessor=None, task=GemmaCausalLM):
    return task.from_preset("gemma3_debug", vocabulary_size=500, preprocessor=preprocessor)


@pytest.mark.needs("transformers")
def test_a_tokenizer_and_that_of_transformers_on_the_same_directory(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    ours, theirs = GemmaTokenizer.from_preset(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, " two  blanks\n\n", "wörld \U0001f600"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ours(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == ours.detokenize(ids) == text


@pytest.mark.needs("transformers")
def test_a_chat_template_survives_training_saving_and_exporting(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.chat_template = TEMPLATE
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=16)
    model = gemma(preprocessor)
    model.save_to_preset(tmp_path / "trained")
    again = GemmaCausalLM.from_preset(tmp_path / "trained")
    again.export_to_transformers(tmp_path / "exported")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ours = again.preprocessor.tokenizer
    wanted = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == wanted
    ids = theirs.apply_chat_template(CHAT, return_dict=False)
    assert ours.apply_chat_template(CHAT) == ids


@pytest.mark.each_backend
def test_a_preprocessor_in_a_pipeline_of_each_framework(tokenizer):
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)
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


@pytest.mark.each_backend
def test_fit_learns_a_list_of_texts_and_validates_on_another(tokenizer):
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)
    model = gemma(preprocessor)
    model.compile(optimizer=keras.optimizers.Adam(5e-3))
    history = model.fit(TEXTS, batch_size=2, epochs=8, validation_data=TEXTS[:2], verbose=0).history
    assert float(history["val_loss"][-1]) < 0.5 * float(history["val_loss"][0])
    assert model.evaluate(TEXTS[:2], verbose=0)[0] == pytest.approx(
        float(history["val_loss"][-1]), rel=1e-5
    )
    assert model.generate("the cat", max_length=8).startswith("the cat")


def test_only_responses_count_and_some_count_more(tokenizer):
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=12)
    model = gemma(preprocessor, Gemma3CausalLM)
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


def test_a_shorter_sequence_for_one_call(tokenizer):
    preprocessor = GemmaCausalLMPreprocessor(tokenizer)
    assert preprocessor(TEXTS)[1].shape == (4, 1024)
    assert preprocessor(TEXTS, sequence_length=6)[1].shape == (4, 6)
    preprocessor.sequence_length = 16
    x, _, _ = preprocessor(TEXTS)
    assert x["token_ids"].shape == (4, 16)
    assert preprocessor.generate_postprocess(x) == TEXTS
