"""What keras-hub's tests of Gemma's tokenizer and preprocessor assert, of the classes here."""

import numpy as np
import pytest
from hub_case import run_preprocessing_layer_test

from kmodels.models import GemmaCausalLMPreprocessor, GemmaTokenizer
from sentencepiece_files import NORMAL, UNKNOWN, sentencepiece_model, words_model

pytestmark = pytest.mark.across

WORDS = ("the", "brown", "earth", "fox", "is", "quick", "round")
TEXTS = ["the quick brown fox", "the earth is round"]
FOX = [4, 9, 5, 7]


@pytest.fixture(scope="module")
def tokenizer():
    return GemmaTokenizer(words_model(WORDS))


def test_tokenizer_basics(tmp_path):
    """Texts become ids and texts again, also in a data set; the config makes an equal one."""
    (tmp_path / "words.spm").write_bytes(words_model(WORDS))
    run_preprocessing_layer_test(
        GemmaTokenizer,
        {"proto": str(tmp_path / "words.spm")},
        TEXTS,
        expected_output=[FOX, [4, 6, 8, 10]],
    )


def test_errors_missing_special_tokens():
    """A vocabulary without <bos>, <eos> and <pad> is refused."""
    pieces = [("<unk>", 0.0, UNKNOWN), *((char, -1.0, NORMAL) for char in "abc")]
    with pytest.raises(ValueError, match="the tokenizer has no end token"):
        GemmaTokenizer(sentencepiece_model(pieces))
    with pytest.raises(ValueError, match="the vocabulary has no <bos> and no <pad>, which Gemma"):
        GemmaTokenizer(sentencepiece_model([("<eos>", 0.0, 3), *pieces]))


def test_preprocessor_basics(tokenizer):
    """Texts become ids with start and end, labels one further, and weights where labels count."""
    run_preprocessing_layer_test(
        GemmaCausalLMPreprocessor,
        {"tokenizer": tokenizer, "sequence_length": 8},
        TEXTS[:1],
        expected_output=(
            {
                "token_ids": [[1, *FOX, 2, 0, 0]],
                "padding_mask": [[1, 1, 1, 1, 1, 1, 0, 0]],
            },
            [[*FOX, 2, 0, 0, 0]],
            [[1, 1, 1, 1, 1, 0, 0, 0]],
        ),
    )


def test_no_start_end_token(tokenizer):
    """Start and end tokens can be left out."""
    preprocessor = GemmaCausalLMPreprocessor(
        tokenizer, sequence_length=8, add_start_token=False, add_end_token=False
    )
    x, y, weights = preprocessor(TEXTS[:1] * 4)
    np.testing.assert_array_equal(x["token_ids"], [[*FOX, 0, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(x["padding_mask"], [[1, 1, 1, 1, 0, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(y, [[*FOX[1:], 0, 0, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(weights, [[1, 1, 1, 0, 0, 0, 0, 0]] * 4)


def test_generate_preprocess(tokenizer):
    """A prompt has a start token and no end token."""
    x = GemmaCausalLMPreprocessor(tokenizer, sequence_length=8).generate_preprocess(TEXTS[0])
    np.testing.assert_array_equal(x["token_ids"], [1, *FOX, 0, 0, 0])
    np.testing.assert_array_equal(x["padding_mask"], [1, 1, 1, 1, 1, 0, 0, 0])


def test_generate_postprocess(tokenizer):
    """Ids become text without padding and special tokens."""
    ids = {"token_ids": [1, *FOX, 2, 0, 0], "padding_mask": [1, 1, 1, 1, 1, 1, 0, 0]}
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)
    assert preprocessor.generate_postprocess(ids) == TEXTS[0]
