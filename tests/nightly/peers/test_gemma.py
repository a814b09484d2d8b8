"""What keras-hub's tests of Gemma 1 to 3 assert of text: backbones, causal LMs, preprocessing."""

import keras
import numpy as np
import pytest
from hub_case import run_backbone_test, run_preprocessing_layer_test, run_task_test
from test_hub_lora import GEMMA3

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
from sentencepiece_files import NORMAL, UNKNOWN, sentencepiece_model, words_model

pytestmark = pytest.mark.across

WORDS = ("the", "brown", "earth", "fox", "is", "quick", "round")
SPECIAL = ("<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>", "<img>")
TEXTS = ["the quick brown fox", "the earth is round"]
SETTINGS = {
    "image_converter": None,
    "sequence_length": 8,
    "max_images_per_prompt": 0,
    "num_vision_tokens_per_image": 0,
}
# Ids of the first text and of "round".
IDS, IDS3, ROUND3 = [4, 9, 5, 7], [9, 14, 10, 12], 15
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


# keras-hub's test gives fractions as token ids, which are refused here; whole floats are not.
FLOATS = {**_inputs(64), "token_ids": np.random.default_rng(0).integers(0, 10, (2, 64)) * 1.0}
KINDS = {
    "gemma": (GemmaBackbone, GEMMA, _inputs(5)),
    "gemma2": (GemmaBackbone, GEMMA_2, _inputs(10)),
    "gemma3": (Gemma3Backbone, GEMMA3, FLOATS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_backbone_basics(kind):
    """The backbone is restored by its config, called, and used by predict."""
    cls, sizes, inputs = KINDS[kind]
    more = {}
    if kind == "gemma3":
        more = {"variable_length_data": [inputs]}
    shape = (*inputs["token_ids"].shape, sizes["hidden_dim"])
    run_backbone_test(cls, sizes, inputs, shape, **more)


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


def test_get_quantization_layer_structure(causal_lm):
    """The embeddings as a model and the blocks, for what quantizes block by block."""
    found = causal_lm.get_quantization_layer_structure("gptq")
    (embedding,) = found["pre_block_layers"]
    assert isinstance(embedding, keras.Model)
    assert tuple(embedding(np.ones((1, 3), "int32")).shape) == (1, 3, 8)
    assert found["sequential_blocks"] == causal_lm.backbone.transformer_layers
    assert causal_lm.get_quantization_layer_structure("int8") is None


# === Tokenizers and preprocessors ===


@pytest.fixture(scope="module")
def words():
    return GemmaTokenizer(words_model(WORDS))


@pytest.fixture(scope="module")
def words3():
    return Gemma3Tokenizer(words_model(WORDS, SPECIAL), has_vision_tokens=True)


@pytest.mark.parametrize(
    ("cls", "special", "expected"),
    [
        (GemmaTokenizer, (), [IDS, [4, 6, 8, 10]]),
        (Gemma3Tokenizer, SPECIAL, [IDS3, [9, 11, 13, ROUND3]]),
    ],
)
def test_tokenizer_basics(cls, special, expected, tmp_path):
    """Texts become ids and texts again, also in a data set; the config makes an equal one."""
    (tmp_path / "words.spm").write_bytes(words_model(WORDS, special))
    proto = {"proto": str(tmp_path / "words.spm")}
    run_preprocessing_layer_test(cls, proto, TEXTS, expected_output=expected)


def test_errors_missing_special_tokens():
    """A vocabulary without <bos>, <eos> and <pad>, or tokens of images asked for, is refused."""
    pieces = [("<unk>", 0.0, UNKNOWN), *((char, -1.0, NORMAL) for char in "abc")]
    with pytest.raises(ValueError, match="no file says which token ends a text"):
        GemmaTokenizer(sentencepiece_model(pieces))
    with pytest.raises(ValueError, match="the vocabulary has no <bos> and no <pad>, which Gemma"):
        GemmaTokenizer(sentencepiece_model([("<eos>", 0.0, 3), *pieces]))
    with pytest.raises(ValueError, match="has no <img>, <start_of_image>, <end_of_image>; give"):
        Gemma3Tokenizer(words_model(WORDS), has_vision_tokens=True)
    tokenizer = Gemma3Tokenizer(words_model(WORDS), has_vision_tokens=False)
    assert tokenizer.start_of_image_token_id == tokenizer.end_of_image_token_id == -1


def _without_ends(preprocessor, data, ids, weights):
    x, y, found = preprocessor(data)
    empty = 8 - len(ids)
    np.testing.assert_array_equal(x["token_ids"], [[*ids, *[0] * empty]] * 4)
    np.testing.assert_array_equal(x["padding_mask"], [[1] * len(ids) + [0] * empty] * 4)
    np.testing.assert_array_equal(y, [[*ids[1:], *[0] * (empty + 1)]] * 4)
    np.testing.assert_array_equal(found, [weights] * 4)


def test_no_start_end_token(words, words3):
    """Start and end tokens can be left out."""
    none = {"add_start_token": False, "add_end_token": False}
    preprocessor = GemmaCausalLMPreprocessor(words, sequence_length=8, **none)
    _without_ends(preprocessor, TEXTS[:1] * 4, IDS, [1, 1, 1, 0, 0, 0, 0, 0])
    preprocessor = Gemma3CausalLMPreprocessor(words3, **SETTINGS, **none)
    data = {"prompts": TEXTS[:1] * 4, "responses": ["round"] * 4}
    _without_ends(preprocessor, data, [*IDS3, ROUND3], [0, 0, 0, 1, 0, 0, 0, 0])
