"""What keras-hub's tests of Gemma 3's backbone and causal LM assert of text."""

import numpy as np
import pytest
from hub_case import run_backbone_test, run_model_saving_test, run_task_test
from test_gemma import choose_always
from test_gemma3_text import SPECIAL, WORDS
from test_hub_lora import GEMMA3

from kmodels.models import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
)
from sentencepiece_files import words_model

pytestmark = pytest.mark.across

INPUTS = {
    "token_ids": np.random.default_rng(0).random((2, 64)),
    "padding_mask": np.ones((2, 64), "int32"),
}
FOX, ROUND = ["the quick brown fox"] * 2, ["the earth is round"] * 2


def test_backbone_basics():
    """The backbone is restored by its config, called, and used by predict."""
    run_backbone_test(
        Gemma3Backbone,
        GEMMA3,
        INPUTS,
        (2, 64, 8),
        variable_length_data=[INPUTS],
        run_quantization_check=False,
    )


def test_architecture_characteristics():
    """So many parameters and layers, and the windows of five blocks of six."""
    backbone = Gemma3Backbone(**GEMMA3)
    assert backbone.count_params() == 5752
    assert len(backbone.layers) == 10
    windows = [block.use_sliding_window_attention for block in backbone.transformer_layers]
    assert windows == [True] * 5 + [False]


def test_saved_model(tmp_path):
    """A saved backbone gives the same outputs when it is loaded."""
    run_model_saving_test(Gemma3Backbone, GEMMA3, INPUTS, tmp_path)


@pytest.fixture(scope="module")
def init_kwargs():
    tokenizer = Gemma3Tokenizer(words_model(WORDS, SPECIAL), has_vision_tokens=True)
    sizes = {**GEMMA3, "vocabulary_size": tokenizer.vocabulary_size()}
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=20)
    return {"preprocessor": preprocessor, "backbone": Gemma3Backbone(**sizes)}


@pytest.fixture
def causal_lm(init_kwargs):
    return Gemma3CausalLM(**init_kwargs)


def test_causal_lm_basics(init_kwargs):
    """The task predicts and trains as it was made, on prompts and responses and sets of them."""
    data = ({"prompts": FOX, "responses": ROUND},)
    run_task_test(Gemma3CausalLM, init_kwargs, data, (2, 20, 16))


@pytest.mark.parametrize("stop", ["auto", (3,)], ids=["early", "multitoken"])
def test_text_stopping(causal_lm, monkeypatch, stop):
    """Where the end token is chosen at once the prompt comes back, whatever else may end it."""
    choose_always(monkeypatch, causal_lm, causal_lm.preprocessor.tokenizer.end_token_id)
    prompts = [FOX[0], "the quick"]
    assert causal_lm.generate(prompts, stop_token_ids=stop) == prompts


def test_text_generate_compilation(causal_lm):
    """The generate function stays from call to call, and compile makes a new one."""
    causal_lm.generate(FOX[0])
    first = causal_lm.generate_function
    causal_lm.generate(FOX[0])
    assert causal_lm.generate_function == first is not None
    causal_lm.compile(sampler="greedy")
    assert causal_lm.generate_function is None


def test_saved_model_of_the_task(init_kwargs, tmp_path):
    """A saved task gives the same outputs when it is loaded."""
    data = {"prompts": FOX, "responses": ROUND}
    inputs = init_kwargs["preprocessor"](data)[0]
    run_model_saving_test(Gemma3CausalLM, init_kwargs, inputs, tmp_path)
