"""What keras-hub asserts of the tokenizers and preprocessors of Gemma and Gemma 3, for text."""

import numpy as np
import pytest
from hub_case import run_preprocessing_layer_test

from kmodels.models import (
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
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
FOX, FOX3, ROUND3 = [4, 9, 5, 7], [9, 14, 10, 12], 15


@pytest.fixture(scope="module")
def gemma():
    return GemmaTokenizer(words_model(WORDS))


@pytest.fixture(scope="module")
def gemma3():
    return Gemma3Tokenizer(words_model(WORDS, SPECIAL), has_vision_tokens=True)


@pytest.mark.parametrize(
    ("cls", "special", "expected"),
    [
        (GemmaTokenizer, (), [FOX, [4, 6, 8, 10]]),
        (Gemma3Tokenizer, SPECIAL, [FOX3, [9, 11, 13, ROUND3]]),
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
    with pytest.raises(ValueError, match="the tokenizer has no end token"):
        GemmaTokenizer(sentencepiece_model(pieces))
    with pytest.raises(ValueError, match="the vocabulary has no <bos> and no <pad>, which Gemma"):
        GemmaTokenizer(sentencepiece_model([("<eos>", 0.0, 3), *pieces]))
    with pytest.raises(ValueError, match="has no <img>, <start_of_image>, <end_of_image>; give"):
        Gemma3Tokenizer(words_model(WORDS), has_vision_tokens=True)
    tokenizer = Gemma3Tokenizer(words_model(WORDS), has_vision_tokens=False)
    assert tokenizer.start_of_image_token_id == tokenizer.end_of_image_token_id == -1


def test_preprocessor_basics(gemma):
    """Texts become ids with start and end, labels one further, and weights where labels count."""
    run_preprocessing_layer_test(
        GemmaCausalLMPreprocessor,
        {"tokenizer": gemma, "sequence_length": 8},
        TEXTS[:1],
        expected_output=(
            {"token_ids": [[1, *FOX, 2, 0, 0]], "padding_mask": [[1, 1, 1, 1, 1, 1, 0, 0]]},
            [[*FOX, 2, 0, 0, 0]],
            [[1, 1, 1, 1, 1, 0, 0, 0]],
        ),
    )


def test_text_preprocessor_basics(gemma3):
    """A prompt and its response are one row; the response alone has weights."""
    ids = [[1, *FOX3, ROUND3, 2, 0]]
    run_preprocessing_layer_test(
        Gemma3CausalLMPreprocessor,
        {"tokenizer": gemma3, **SETTINGS},
        {"prompts": TEXTS[:1], "responses": ["round"]},
        expected_output=(
            {"token_ids": ids, "padding_mask": [[1, 1, 1, 1, 1, 1, 1, 0]]},
            [[*FOX3, ROUND3, 2, 0, 0]],
            [[0, 0, 0, 0, 1, 1, 0, 0]],
        ),
    )


def _without_ends(preprocessor, data, ids, weights):
    x, y, found = preprocessor(data)
    empty = 8 - len(ids)
    np.testing.assert_array_equal(x["token_ids"], [[*ids, *[0] * empty]] * 4)
    np.testing.assert_array_equal(x["padding_mask"], [[1] * len(ids) + [0] * empty] * 4)
    np.testing.assert_array_equal(y, [[*ids[1:], *[0] * (empty + 1)]] * 4)
    np.testing.assert_array_equal(found, [weights] * 4)


def test_no_start_end_token(gemma, gemma3):
    """Start and end tokens can be left out."""
    none = {"add_start_token": False, "add_end_token": False}
    preprocessor = GemmaCausalLMPreprocessor(gemma, sequence_length=8, **none)
    _without_ends(preprocessor, TEXTS[:1] * 4, FOX, [1, 1, 1, 0, 0, 0, 0, 0])
    preprocessor = Gemma3CausalLMPreprocessor(gemma3, **SETTINGS, **none)
    data = {"prompts": TEXTS[:1] * 4, "responses": ["round"] * 4}
    _without_ends(preprocessor, data, [*FOX3, ROUND3], [0, 0, 0, 1, 0, 0, 0, 0])


def test_generate_preprocess(gemma, gemma3):
    """A prompt has a start token and no end token."""
    for preprocessor, ids in (
        (GemmaCausalLMPreprocessor(gemma, sequence_length=8), FOX),
        (Gemma3CausalLMPreprocessor(gemma3, **SETTINGS), FOX3),
    ):
        x = preprocessor.generate_preprocess(TEXTS[0])
        np.testing.assert_array_equal(x["token_ids"], [1, *ids, 0, 0, 0])
        np.testing.assert_array_equal(x["padding_mask"], [1, 1, 1, 1, 1, 0, 0, 0])


def test_generate_postprocess(gemma, gemma3):
    """Ids become text without padding and special tokens."""
    ids = {"token_ids": [1, *FOX, 2, 0, 0], "padding_mask": [1, 1, 1, 1, 1, 1, 0, 0]}
    preprocessor = GemmaCausalLMPreprocessor(gemma, sequence_length=8)
    assert preprocessor.generate_postprocess(ids) == TEXTS[0]
    ids = {"token_ids": [1, *FOX3, 0, 0, 0], "padding_mask": [1, 1, 1, 1, 1, 0, 0, 0]}
    preprocessor = Gemma3CausalLMPreprocessor(gemma3, **SETTINGS)
    assert preprocessor.generate_postprocess(ids) == TEXTS[0]


def test_invalid_shape(gemma3):
    """Prompts and responses of other numbers are refused."""
    preprocessor = Gemma3CausalLMPreprocessor(gemma3, **SETTINGS)
    for responses in ([""], ["the", "", ""]):
        with pytest.raises(ValueError, match="the columns differ in length: prompts 2, responses"):
            preprocessor({"prompts": ["the fox", "the earth"], "responses": responses})


def test_with_python_only_tokenizer(gemma3):
    """Prompts of unequal lengths are filled to one; an image converter changes nothing."""
    preprocessor = Gemma3CausalLMPreprocessor(gemma3, object(), sequence_length=20)
    prompts = [TEXTS[0], "the quick"]
    x = preprocessor.generate_preprocess(prompts, sequence_length=20)
    assert x["token_ids"].shape == x["padding_mask"].shape == (2, 20)
    x, _, _ = preprocessor({"prompts": prompts, "responses": ["round"] * 2})
    assert x["token_ids"].shape == (2, 20)


def test_images_of_gemma3(gemma3):
    """Images, of which keras-hub's test is, are refused in a line: the model is of text alone."""
    preprocessor = Gemma3CausalLMPreprocessor(gemma3, image_converter=object())
    with pytest.raises(ValueError, match="Gemma 3 takes only text here; leave 'images' out"):
        preprocessor({"prompts": "the", "responses": "fox", "images": np.ones((8, 8, 3))})
