"""What keras-hub's tests of Gemma's backbone and causal LM assert, of the classes here."""

import keras
import numpy as np
import pytest
from hub_case import assert_close, run_backbone_test, run_model_saving_test, run_task_test

from arrays import to_numpy
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaCausalLMPreprocessor, GemmaTokenizer
from sentencepiece_files import words_model
from tolerances import tolerance

pytestmark = pytest.mark.across

WORDS = ("the", "brown", "earth", "fox", "is", "quick", "round")
FOX = "the quick brown fox"
GEMMA = {
    "vocabulary_size": 20,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 1,
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "head_dim": 4,
    "layer_norm_epsilon": 1e-6,
}
GEMMA_2 = {
    **GEMMA,
    "num_key_value_heads": 2,
    "sliding_window_size": 5,
    "attention_logit_soft_cap": 50,
    "final_logit_soft_cap": 30,
    "query_head_dim_normalize": False,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_sliding_window_attention": True,
}
KINDS = {"gemma": (GEMMA, 5), "gemma2": (GEMMA_2, 10)}


def _inputs(length):
    ones = np.ones((2, length), "int32")
    return {"token_ids": ones, "padding_mask": ones}


@pytest.mark.parametrize("kind", KINDS)
def test_backbone_basics(kind):
    """The backbone is restored by its config, called, used by predict, and quantized."""
    init_kwargs, length = KINDS[kind]
    run_backbone_test(GemmaBackbone, init_kwargs, _inputs(length), (2, length, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_model(kind, tmp_path):
    """A saved backbone gives the same outputs when it is loaded."""
    init_kwargs, length = KINDS[kind]
    run_model_saving_test(GemmaBackbone, init_kwargs, _inputs(length), tmp_path)


def test_architecture_characteristics():
    """So many parameters, and so many layers."""
    backbone = GemmaBackbone(**GEMMA)
    assert backbone.count_params() == 3216
    assert len(backbone.layers) == 6


def test_sliding_window():
    """A token of a local layer sees the window's tokens and no other before it."""
    block = GemmaBackbone(**GEMMA_2).transformer_layers[0]
    x = np.random.default_rng(0).normal(size=(1, 10, 16)).astype("float32")
    before = to_numpy(block(x))
    for place in range(10):
        changed = x.copy()
        changed[:, place] += 1.0
        moved = np.abs(to_numpy(block(changed)) - before).max(-1)[0] > 0
        assert moved.tolist() == [place <= at < place + 5 for at in range(10)]


@pytest.fixture(scope="module")
def preprocessor():
    return GemmaCausalLMPreprocessor(GemmaTokenizer(words_model(WORDS)), sequence_length=8)


@pytest.fixture(scope="module")
def init_kwargs(preprocessor):
    sizes = {"hidden_dim": 8, "intermediate_dim": 16, "head_dim": 2, "sliding_window_size": 3}
    sizes["vocabulary_size"] = preprocessor.tokenizer.vocabulary_size()
    return {"preprocessor": preprocessor, "backbone": GemmaBackbone(**{**GEMMA_2, **sizes})}


@pytest.fixture
def causal_lm(init_kwargs):
    return GemmaCausalLM(**init_kwargs)


def test_causal_lm_basics(init_kwargs):
    """The task predicts and trains as it was made, on texts and on data sets of them."""
    run_task_test(GemmaCausalLM, init_kwargs, ([FOX, FOX],), (2, 8, 11))


def test_cache_correctness(causal_lm, preprocessor):
    """Token by token with a cache gives the logits of all at once."""
    prepared = preprocessor([FOX, FOX])[0]
    token_ids = prepared["token_ids"]
    # An array beside a tensor, as what is computed of an array is one.
    padding_mask = keras.ops.ones_like(prepared["padding_mask"])
    whole = to_numpy(causal_lm({"token_ids": token_ids, "padding_mask": padding_mask}))
    cache = keras.ops.zeros_like(causal_lm._build_cache(token_ids)[1])
    for place in range(8):
        new = token_ids[:, place : place + 1]
        logits, hidden, cache = causal_lm.call_with_cache(new, cache, place)
        assert tuple(hidden.shape) == (2, 1, 8)
        np.testing.assert_allclose(
            to_numpy(logits)[:, 0], whole[:, place], atol=tolerance("logits"), rtol=0
        )


def _generates(causal_lm, preprocessor):
    assert FOX in causal_lm.generate(FOX)
    inputs = preprocessor.generate_preprocess([FOX])
    causal_lm.preprocessor = None
    found = causal_lm.generate(inputs, stop_token_ids=None)
    for name in ("token_ids", "padding_mask"):
        assert_close(found[name][:, :5], np.asarray(inputs[name])[:, :5])


def test_generate(causal_lm, preprocessor):
    """Texts and token ids are continued, and keep their beginning."""
    _generates(causal_lm, preprocessor)


def test_generate_with_bfloat16(init_kwargs, preprocessor):
    """The same in half precision."""
    backbone = GemmaBackbone.from_config(
        {**init_kwargs["backbone"].get_config(), "dtype": "bfloat16"}
    )
    _generates(GemmaCausalLM(backbone, preprocessor), preprocessor)


def choose_always(monkeypatch, causal_lm, token):
    """Has the model's `call_with_cache` favour one token, as keras-hub's tests replace it."""
    given = causal_lm.call_with_cache

    def favouring(*args, **kwargs):
        logits, hidden, cache = given(*args, **kwargs)
        chosen = keras.ops.arange(logits.shape[-1]) == token
        return keras.ops.where(chosen, 1e9, logits), hidden, cache

    monkeypatch.setattr(causal_lm, "call_with_cache", favouring)


@pytest.mark.parametrize("stop", ["auto", (3,)], ids=["early", "multitoken"])
def test_stopping(causal_lm, preprocessor, monkeypatch, stop):
    """Where the end token is chosen at once the prompt comes back, whatever else may end it."""
    choose_always(monkeypatch, causal_lm, preprocessor.tokenizer.end_token_id)
    prompts = [FOX, "the quick"]
    assert causal_lm.generate(prompts, stop_token_ids=stop) == prompts


def test_generate_compilation(causal_lm):
    """The generate function stays from call to call, and compile makes a new one."""
    causal_lm.generate(FOX)
    first = causal_lm.generate_function
    causal_lm.generate(FOX)
    assert causal_lm.generate_function == first is not None
    causal_lm.compile(sampler="greedy")
    assert causal_lm.generate_function is None


def test_saved_model_causal_lm(init_kwargs, preprocessor, tmp_path):
    """A saved task gives the same outputs when it is loaded."""
    inputs = preprocessor([FOX, FOX])[0]
    run_model_saving_test(GemmaCausalLM, init_kwargs, inputs, tmp_path)


def test_score_logits(causal_lm, preprocessor):
    """Scores are logits of each token."""
    inputs = preprocessor.generate_preprocess([FOX, FOX])
    assert tuple(causal_lm.score(**inputs, scoring_mode="logits").shape) == (2, 8, 11)


def test_score_loss(causal_lm, preprocessor):
    """Scores are the loss of each token."""
    inputs = preprocessor.generate_preprocess([FOX, FOX])
    targets = keras.ops.roll(inputs["token_ids"], shift=-1, axis=1)
    scores = causal_lm.score(**inputs, scoring_mode="loss", target_ids=targets)
    assert tuple(scores.shape) == (2, 8)


def test_score_layer_intercept_fn_exfiltration(causal_lm, preprocessor):
    """A function sees the embeddings as layer -1 and the output of each block."""
    inputs, seen = preprocessor.generate_preprocess([FOX, FOX]), {}

    def intercept(x, number):
        seen[number] = tuple(x.shape)
        return x

    causal_lm.score(**inputs, scoring_mode="logits", layer_intercept_fn=intercept)
    assert seen == dict.fromkeys((-1, 0, 1), (2, 8, 8))


def test_get_quantization_layer_structure(causal_lm):
    """The embeddings as a model and the blocks, for what quantizes block by block."""
    found = causal_lm.get_quantization_layer_structure("gptq")
    (embedding,) = found["pre_block_layers"]
    assert isinstance(embedding, keras.Model)
    assert tuple(embedding(np.ones((1, 3), "int32")).shape) == (1, 3, 8)
    assert found["sequential_blocks"] == causal_lm.backbone.transformer_layers
    assert causal_lm.get_quantization_layer_structure("int8") is None
