"""What keras-hub's tests of Gemma 3's tokenizer and preprocessor assert of text."""

import numpy as np
import pytest
from hub_case import run_preprocessing_layer_test

from kmodels.models import Gemma3CausalLMPreprocessor, Gemma3Tokenizer
from sentencepiece_files import words_model

pytestmark = pytest.mark.across

WORDS = ("the", "brown", "earth", "fox", "is", "quick", "round")
SPECIAL = ("<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>", "<img>")
TEXTS = ["the quick brown fox", "the earth is round"]
FOX, ROUND = [9, 14, 10, 12], 15
SETTINGS = {
    "image_converter": None,
    "sequence_length": 8,
    "max_images_per_prompt": 0,
    "num_vision_tokens_per_image": 0,
}


@pytest.fixture(scope="module")
def tokenizer():
    return Gemma3Tokenizer(words_model(WORDS, SPECIAL), has_vision_tokens=True)


def test_tokenizer_basics(tmp_path):
    """Texts become ids and texts again, also in a data set; the config makes an equal one."""
    (tmp_path / "words.spm").write_bytes(words_model(WORDS, SPECIAL))
    run_preprocessing_layer_test(
        Gemma3Tokenizer,
        {"proto": str(tmp_path / "words.spm")},
        TEXTS,
        expected_output=[FOX, [9, 11, 13, ROUND]],
    )


def test_errors_missing_special_tokens():
    """A vocabulary without the tokens of images is refused where they are asked for."""
    with pytest.raises(ValueError, match="has no <img>, <start_of_image>, <end_of_image>; give"):
        Gemma3Tokenizer(words_model(WORDS), has_vision_tokens=True)
    tokenizer = Gemma3Tokenizer(words_model(WORDS), has_vision_tokens=False)
    assert tokenizer.start_of_image_token_id == tokenizer.end_of_image_token_id == -1


def test_text_preprocessor_basics(tokenizer):
    """A prompt and its response are one row; the response alone has weights."""
    run_preprocessing_layer_test(
        Gemma3CausalLMPreprocessor,
        {"tokenizer": tokenizer, **SETTINGS},
        {"prompts": TEXTS[:1], "responses": ["round"]},
        expected_output=(
            {
                "token_ids": [[1, *FOX, ROUND, 2, 0]],
                "padding_mask": [[1, 1, 1, 1, 1, 1, 1, 0]],
            },
            [[*FOX, ROUND, 2, 0, 0]],
            [[0, 0, 0, 0, 1, 1, 0, 0]],
        ),
    )


def test_text_no_start_end_token(tokenizer):
    """Start and end tokens can be left out."""
    preprocessor = Gemma3CausalLMPreprocessor(
        tokenizer, **SETTINGS, add_start_token=False, add_end_token=False
    )
    x, y, weights = preprocessor({"prompts": TEXTS[:1] * 4, "responses": ["round"] * 4})
    np.testing.assert_array_equal(x["token_ids"], [[*FOX, ROUND, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(x["padding_mask"], [[1, 1, 1, 1, 1, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(y, [[*FOX[1:], ROUND, 0, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(weights, [[0, 0, 0, 1, 0, 0, 0, 0]] * 4)


def test_text_generate_preprocess(tokenizer):
    """A prompt has a start token and no end token."""
    x = Gemma3CausalLMPreprocessor(tokenizer, **SETTINGS).generate_preprocess(TEXTS[0])
    np.testing.assert_array_equal(x["token_ids"], [1, *FOX, 0, 0, 0])
    np.testing.assert_array_equal(x["padding_mask"], [1, 1, 1, 1, 1, 0, 0, 0])


def test_text_generate_postprocess(tokenizer):
    """Ids become text without padding and special tokens."""
    ids = {"token_ids": [1, *FOX, 0, 0, 0], "padding_mask": [1, 1, 1, 1, 1, 0, 0, 0]}
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, **SETTINGS)
    assert preprocessor.generate_postprocess(ids) == TEXTS[0]


def test_invalid_shape(tokenizer):
    """Prompts and responses of other numbers are refused."""
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, **SETTINGS)
    for responses in ([""], ["the", "", ""]):
        with pytest.raises(ValueError, match="the columns differ in length: prompts 2, responses"):
            preprocessor({"prompts": ["the fox", "the earth"], "responses": responses})


def test_generate_preprocess_with_python_only_tokenizer(tokenizer):
    """Prompts of unequal lengths are filled to one; an image converter changes nothing."""
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, object(), sequence_length=20)
    x = preprocessor.generate_preprocess([TEXTS[0], "the quick"], sequence_length=20)
    assert x["token_ids"].shape == x["padding_mask"].shape == (2, 20)


def test_call_with_python_only_tokenizer(tokenizer):
    """Prompts of unequal lengths with responses are filled to one."""
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, object(), sequence_length=20)
    x, _, _ = preprocessor({"prompts": [TEXTS[0], "the quick"], "responses": ["round"] * 2})
    assert x["token_ids"].shape == (2, 20)


def test_preprocessor_basics(tokenizer):
    """Images, of which keras-hub's test is, are refused in a line: the model is of text alone."""
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, image_converter=object())
    with pytest.raises(ValueError, match="Gemma 3 takes only text here; leave 'images' out"):
        preprocessor({"prompts": "the", "responses": "fox", "images": np.ones((8, 8, 3))})
