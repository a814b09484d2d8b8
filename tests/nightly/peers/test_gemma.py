"""What keras-hub's tests of the backbones and causal LMs of Gemma 1 to 3 assert of text."""

import keras
import numpy as np
import pytest
from hub_case import assert_close, run_backbone_test, run_model_saving_test, run_task_test
from test_hub_lora import GEMMA3
from test_preprocessing import SPECIAL, TEXTS, WORDS

from arrays import to_numpy
from kmodels.models import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaTokenizer,
)
from sentencepiece_files import words_model
from tolerances import tolerance

pytestmark = pytest.mark.across

FOX, ROUND = TEXTS
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


def _inputs(length):
    ones = np.ones((2, length), "int32")
    return {"token_ids": ones, "padding_mask": ones}


# keras-hub's test of Gemma 3 gives fractions as token ids.
FRACTIONS = {**_inputs(64), "token_ids": np.random.default_rng(0).random((2, 64))}
KINDS = {
    "gemma": (GemmaBackbone, GEMMA, _inputs(5)),
    "gemma2": (GemmaBackbone, GEMMA_2, _inputs(10)),
    "gemma3": (Gemma3Backbone, GEMMA3, FRACTIONS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_backbone_basics(kind):
    """The backbone is restored by its config, called, used by predict, and quantized."""
    cls, sizes, inputs = KINDS[kind]
    more = {}
    if kind == "gemma3":
        more = {"variable_length_data": [inputs], "run_quantization_check": False}
    shape = (*inputs["token_ids"].shape, sizes["hidden_dim"])
    run_backbone_test(cls, sizes, inputs, shape, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_model(kind, tmp_path):
    """A saved backbone gives the same outputs when it is loaded."""
    run_model_saving_test(*KINDS[kind], tmp_path)


@pytest.mark.parametrize(("kind", "count", "layers"), [("gemma", 3216, 6), ("gemma3", 5752, 10)])
def test_architecture_characteristics(kind, count, layers):
    """So many parameters, and so many layers."""
    cls, sizes, _ = KINDS[kind]
    backbone = cls(**sizes)
    assert backbone.count_params() == count
    assert len(backbone.layers) == layers


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


def test_five_of_six_blocks_of_gemma3_have_windows():
    blocks = Gemma3Backbone(**GEMMA3).transformer_layers
    assert [block.use_sliding_window_attention for block in blocks] == [True] * 5 + [False]


# === Tasks ===


@pytest.fixture(scope="module")
def preprocessor():
    return GemmaCausalLMPreprocessor(GemmaTokenizer(words_model(WORDS)), sequence_length=8)


@pytest.fixture(scope="module")
def init_kwargs(preprocessor):
    sizes = {"hidden_dim": 8, "intermediate_dim": 16, "head_dim": 2, "sliding_window_size": 3}
    sizes["vocabulary_size"] = preprocessor.tokenizer.vocabulary_size()
    return {"preprocessor": preprocessor, "backbone": GemmaBackbone(**{**GEMMA_2, **sizes})}


@pytest.fixture(scope="module")
def init_kwargs3():
    tokenizer = Gemma3Tokenizer(words_model(WORDS, SPECIAL), has_vision_tokens=True)
    sizes = {**GEMMA3, "vocabulary_size": tokenizer.vocabulary_size()}
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=20)
    return {"preprocessor": preprocessor, "backbone": Gemma3Backbone(**sizes)}


@pytest.fixture
def causal_lm(init_kwargs):
    return GemmaCausalLM(**init_kwargs)


@pytest.fixture(params=["gemma2", "gemma3"])
def task(request, init_kwargs, init_kwargs3):
    """Class, arguments, training data and the shape of logits."""
    if request.param == "gemma2":
        return GemmaCausalLM, init_kwargs, [FOX, FOX], (2, 8, 11)
    data = {"prompts": [FOX] * 2, "responses": [ROUND] * 2}
    return Gemma3CausalLM, init_kwargs3, data, (2, 20, 16)


def test_causal_lm_basics(task):
    """The task predicts and trains as it was made, on its data and on data sets of them."""
    cls, arguments, data, shape = task
    run_task_test(cls, arguments, (data,), shape)


def test_saved_model_of_the_task(task, tmp_path):
    """A saved task gives the same outputs when it is loaded."""
    cls, arguments, data, _ = task
    run_model_saving_test(cls, arguments, arguments["preprocessor"](data)[0], tmp_path)


def test_stopping(task, monkeypatch):
    """If the end token is chosen at once the prompt comes back, whatever else may end it."""
    cls, arguments, _, _ = task
    model = cls(**arguments)
    call, end = model.call_with_cache, model.preprocessor.tokenizer.end_token_id

    def favouring(*args, **kwargs):
        logits, hidden, cache = call(*args, **kwargs)
        chosen = keras.ops.arange(logits.shape[-1]) == end
        return keras.ops.where(chosen, 1e9, logits), hidden, cache

    monkeypatch.setattr(model, "call_with_cache", favouring)
    prompts = [FOX, "the quick"]
    for stop in ("auto", (3,)):
        assert model.generate(prompts, stop_token_ids=stop) == prompts, stop


def test_generate_compilation(task):
    """The generate function stays from call to call, and compile makes a new one."""
    cls, arguments, _, _ = task
    model = cls(**arguments)
    model.generate(FOX)
    first = model.generate_function
    model.generate(FOX)
    assert model.generate_function == first is not None
    model.compile(sampler="greedy")
    assert model.generate_function is None


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


def test_score(causal_lm, preprocessor):
    """Scores are logits or the loss of each token; a function gets the output of each layer."""
    inputs, shapes = preprocessor.generate_preprocess([FOX, FOX]), {}
    assert tuple(causal_lm.score(**inputs, scoring_mode="logits").shape) == (2, 8, 11)
    targets = keras.ops.roll(inputs["token_ids"], shift=-1, axis=1)
    scores = causal_lm.score(**inputs, scoring_mode="loss", target_ids=targets)
    assert tuple(scores.shape) == (2, 8)

    def intercept(x, number):
        shapes[number] = tuple(x.shape)
        return x

    causal_lm.score(**inputs, scoring_mode="logits", layer_intercept_fn=intercept)
    assert shapes == dict.fromkeys((-1, 0, 1), (2, 8, 8)), "-1 is that of the embeddings"


def test_get_quantization_layer_structure(causal_lm):
    """The embeddings as a model and the blocks, for what quantizes block by block."""
    found = causal_lm.get_quantization_layer_structure("gptq")
    (embedding,) = found["pre_block_layers"]
    assert isinstance(embedding, keras.Model)
    assert tuple(embedding(np.ones((1, 3), "int32")).shape) == (1, 3, 8)
    assert found["sequential_blocks"] == causal_lm.backbone.transformer_layers
    assert causal_lm.get_quantization_layer_structure("int8") is None
