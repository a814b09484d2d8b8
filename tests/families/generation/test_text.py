"""Texts in, texts out: streaming in pieces, and the tokenizer's own stop tokens."""

import keras
import pytest

from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.models.gemma.presets import PRESETS
from kmodels.text import demo
from kmodels.text.training import train_tokenizer

PROMPTS = ["Say a word.", "Name"]


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(2)
    tokenizer = train_tokenizer(demo.texts(), 420)
    fields = {**PRESETS["gemma3_debug"], "vocabulary_size": tokenizer.vocabulary_size()}
    model = GemmaCausalLM(GemmaBackbone(**fields), GemmaCausalLMPreprocessor(tokenizer))
    for weight in model.weights:  # away from constant continuations
        weight.assign(weight.value * 3.0)
    return model


def test_pieces_make_up_the_text(model):
    pieces = [[], []]
    settings = {"max_length": 32, "stop_token_ids": None, "strip_prompt": True}
    stream = {"stream": lambda row, piece: pieces[row].append(piece)}
    texts = model.generate(PROMPTS, **settings, **stream)
    for told, text in zip(pieces, texts, strict=True):
        assert len(told) > 3
        assert "".join(told) == text.rstrip("\ufffd")  # what is not a whole character is not told


def test_the_tokenizers_stop_tokens_end_a_row(model, monkeypatch):
    tokenizer = model.preprocessor.tokenizer
    inputs = model.preprocessor.generate_preprocess(PROMPTS, sequence_length=32)
    found = model.generate(inputs, max_length=32, stop_token_ids=None)
    start = int(inputs["padding_mask"][0].sum())
    new = found["token_ids"][0, start:].tolist()
    stop = new[4]
    monkeypatch.setattr(tokenizer, "stop_token_ids", [stop])
    text = model.generate(PROMPTS, max_length=32, strip_prompt=True)[0]
    assert text == tokenizer.detokenize(new[: new.index(stop) + 1])
