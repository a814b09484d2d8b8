"""Inputs, labels and weights of texts with images are keras-hub's."""

import keras
import numpy as np
import pytest

import hub_models
from arrays import to_numpy
from gemma3_processor_case import START
from kmodels.interop import keras_hub as interop
from kmodels.models import (
    Gemma3ImageConverter,
    Gemma3ImageTextLM,
    Gemma3ImageTextLMPreprocessor,
    Gemma3Tokenizer,
    GemmaTokenizer,
)
from kmodels.text import demo
from refusals import refused
from sentencepiece_files import CONTROL, NORMAL, UNKNOWN, sentencepiece_model
from tolerances import tolerance

UNIGRAM, USER_DEFINED = 1, 4
WORDS = ("the", "brown", "earth", "fox", "is", "quick", "round")
SPECIAL = (START, "<end_of_image>", "<start_of_turn>", "<end_of_turn>", "<img>")
SETTINGS = {"sequence_length": 40, "max_images_per_prompt": 2, "num_vision_tokens_per_image": 4}
CONVERTER = {"image_size": (8, 8), "scale": 1 / 127.5, "offset": -1.0}


@pytest.fixture(scope="module")
def both():
    """keras-hub's preprocessor and ours, of one vocabulary."""
    import keras_hub

    control = [(text, 0.0, CONTROL) for text in ("<pad>", "<bos>", "<eos>")]
    special = [(text, 0.0, USER_DEFINED) for text in SPECIAL]
    words = [(blank + word, -1.0, NORMAL) for word in WORDS for blank in ("\u2581", "")]
    single = [(text, -2.0, NORMAL) for text in ("\u2581", "\n")]
    pieces = [*control, ("<unk>", 0.0, UNKNOWN), *special, *words, *single]
    content = sentencepiece_model(pieces, UNIGRAM)
    theirs = keras_hub.models.Gemma3CausalLMPreprocessor(
        keras_hub.models.Gemma3Tokenizer(content),
        keras_hub.layers.Gemma3ImageConverter(**CONVERTER),
        **SETTINGS,
    )
    ours = Gemma3ImageTextLMPreprocessor(
        Gemma3Tokenizer(content), Gemma3ImageConverter(**CONVERTER), **SETTINGS
    )
    return theirs, ours


def check(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        expected = to_numpy(theirs[name])
        if name == "images":
            np.testing.assert_allclose(value, expected, atol=tolerance("pictures"), rtol=0)
        else:
            np.testing.assert_array_equal(value, expected, err_msg=name)


@pytest.mark.needs("keras_hub", "tensorflow_text")
@pytest.mark.parametrize("images", [2, 1])
def test_images(both, images):
    theirs, ours = both
    pixels = np.random.default_rng(0).integers(0, 256, (2, images, 8, 8, 3)).astype("float32")
    prompts = [f"the {START} brown {START} fox", f"{START} is {START}"]
    if images == 1:
        prompts = [f"the {START}", f"{START}\nthe earth"]
    given = {"prompts": prompts, "images": pixels if images == 2 else pixels[:, 0]}
    whole = {**given, "responses": ["round", "the earth"]}
    theirs.max_images_per_prompt = images  # to which keras-hub fills each row
    (x, labels, weights), (their_x, their_labels, their_weights) = ours(whole), theirs(whole)
    check(x, their_x)
    np.testing.assert_array_equal(labels, to_numpy(their_labels))
    np.testing.assert_array_equal(weights, to_numpy(their_weights))
    check(
        ours.generate_preprocess(given, sequence_length=30),
        theirs.generate_preprocess(given, sequence_length=30),
    )


@pytest.mark.needs("keras_hub", "tensorflow_text")
def test_texts_alone(both):
    theirs, ours = both
    given = {"prompts": ["the fox", "the earth is"], "responses": ["quick", "round"]}
    (x, *rest), (their_x, *their_rest) = ours(given), theirs(given)
    check(x, their_x)
    for one, other in zip(rest, map(to_numpy, their_rest), strict=True):
        np.testing.assert_array_equal(one, other)
    single = {name: column[0] for name, column in given.items()}
    shapes = keras.tree.map_structure(lambda part: tuple(part.shape), ours(single)[0])
    assert shapes == {name: tuple(part.shape[1:]) for name, part in x.items()}


@pytest.mark.needs("keras_hub", "tensorflow_text")
def test_preprocessors_go_with_the_model_both_ways(both):
    import keras_hub

    theirs, _ = both
    theirs.max_images_per_prompt = 2
    model = hub_models.gemma_3_vision(
        keras_hub.models,
        encoder={"image_size": 8, "patch_size": 2},
        image_size=8,
        vocabulary_size=theirs.tokenizer.vocabulary_size(),
    )
    model.preprocessor = theirs
    found = interop.from_hub(model)
    assert found.backbone.config.image_token_id == theirs.tokenizer.image_placeholder_id
    assert found.backbone.config.image_token_id == found.preprocessor.image_token_id
    pixels = np.random.default_rng(0).integers(0, 256, (1, 2, 8, 8, 3)).astype("float32")
    given = {"prompts": [f"{START} the {START}"], "images": pixels, "responses": ["fox"]}
    check(found.preprocessor(given)[0], theirs(given)[0])
    converter = found.preprocessor.image_converter
    assert (
        converter.to_dict().items()
        >= {
            "crop_to_aspect_ratio": theirs.image_converter.crop_to_aspect_ratio,
            "antialias": theirs.image_converter.antialias,
            "interpolation": theirs.image_converter.interpolation,
        }.items()
    )
    assert interop.to_hub(found, preprocessor=False).preprocessor is None


@pytest.mark.needs("keras_hub", "tensorflow_text")
def test_preprocessors_of_ours_go_to_keras_hub():
    words = hub_models.tokenizer(demo.texts())
    words.core.add_special_tokens([START, "<end_of_image>", "<img>"])
    tokenizer = GemmaTokenizer(words.core)
    ours = Gemma3ImageTextLM.from_preset(
        "gemma3_vision_debug",
        num_layers=1,
        vocabulary_size=tokenizer.vocabulary_size(),
        vision_encoder={**hub_models.SEEN, "hidden_dim": 8, "intermediate_dim": 12},
        preprocessor=Gemma3ImageTextLMPreprocessor(
            tokenizer, Gemma3ImageConverter(**{**CONVERTER, "image_size": (16, 16)}), **SETTINGS
        ),
    )
    theirs = interop.to_hub(ours).preprocessor
    pixels = np.random.default_rng(0).integers(0, 256, (1, 2, 16, 16, 3)).astype("float32")
    given = {"prompts": [f"{START} the {START}"], "images": pixels, "responses": ["cat"]}
    check(ours.preprocessor(given)[0], theirs(given)[0])
    ours.preprocessor.image_converter.do_pan_and_scan = True
    refused("Gemma3ImageConverter has no counterpart for do_pan_and", interop.to_hub, ours)
