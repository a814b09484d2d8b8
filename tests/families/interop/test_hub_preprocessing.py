"""Tokenizers and image converters of keras-hub give what ours give, there and back."""

from importlib import import_module

import keras
import numpy as np
import pytest

import hub_models
from kmodels.core.errors import InputError
from kmodels.interop import keras_hub as interop
from kmodels.models import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)
from kmodels.text import demo
from tolerances import tolerance

pytestmark = [pytest.mark.needs("keras_hub"), pytest.mark.across("torch")]
# What a backend computes; refusals and files are the same on each.
EVERYWHERE = pytest.mark.across("torch", "jax", "tensorflow")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEXTS = ["Hello  wörld,\n 12 \U0001f600", "<start_of_turn>user\nHi<end_of_turn>", "a"]


@pytest.fixture(scope="module")
def hub():
    return import_module("keras_hub")


def classifier(**settings):
    preprocessor = ViTImageClassifierPreprocessor((16, 24), MEAN, STD, **settings)
    sizes = {"patch_size": 8, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8, "num_layers": 1}
    backbone = ViTBackbone(image_shape=(16, 24, 3), **sizes)
    return ViTImageClassifier(backbone, 3, preprocessor=preprocessor)


@EVERYWHERE
@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize(
    "interpolation, antialias", [("bilinear", True), ("bilinear", False), ("bicubic", True)]
)
def test_pictures_come_out_alike(interpolation, antialias, crop):
    ours = classifier(interpolation=interpolation, antialias=antialias, crop_to_aspect_ratio=crop)
    theirs = interop.to_hub(ours)
    # Smooth, so that no cubic overshoots what an image can hold; each side treats that otherwise.
    rows, columns = np.meshgrid(np.arange(37), np.arange(61), indexing="ij")
    waves = [np.sin(rows / 5 + i) * np.cos(columns / (7 - i)) for i in range(3)]
    # Floats, since of uint8 it rounds what it resized to whole numbers again.
    pictures = (127 + 100 * np.stack(waves, -1)).astype("float32")[None]
    wanted = keras.ops.convert_to_numpy(theirs.preprocessor(pictures))
    assert np.abs(ours.preprocessor(pictures) - wanted).max() <= tolerance("pictures")
    assert interop.from_hub(theirs).preprocessor.to_dict() == ours.preprocessor.to_dict()


def test_converters_without_a_counterpart(hub):
    theirs = interop.to_hub(classifier())
    kind = hub.layers.ViTImageConverter
    for settings, named in (
        ({"crop_to_aspect_ratio": False, "pad_to_aspect_ratio": True}, "pad_to_aspect_ratio"),
        ({"interpolation": "lanczos5"}, "lanczos5"),
        ({"interpolation": "bicubic"}, "antialias=False with interpolation='bicubic'"),
    ):
        theirs.preprocessor.image_converter = kind(image_size=(16, 24), **settings)
        with pytest.raises(InputError, match=named):
            interop.from_hub(theirs)
    assert interop.from_hub(theirs, preprocessor=False).preprocessor is None
    # One that does nothing scales nothing.
    theirs.preprocessor.image_converter = kind()
    pictures = np.full((1, 16, 24, 3), 7, "uint8")
    assert np.abs(interop.from_hub(theirs).preprocessor(pictures) - 7.0).max() <= 1e-5


SIZES = {**hub_models.GEMMA, "vocabulary_size": 800, "num_layers": 1, "intermediate_dim": 16}


@pytest.fixture(scope="module")
def causal():
    preprocessor = GemmaCausalLMPreprocessor(
        hub_models.tokenizer(demo.texts()), sequence_length=24, add_end_token=False
    )
    return GemmaCausalLM(GemmaBackbone(**SIZES), preprocessor=preprocessor)


def test_tokens_come_out_alike(causal):
    theirs = interop.to_hub(causal)
    tokenizer = theirs.preprocessor.tokenizer
    for text in TEXTS:
        ids = causal.preprocessor.tokenizer(text)
        assert list(tokenizer(text)) == ids
    ours = causal.preprocessor(TEXTS)
    for part, wanted in zip(theirs.preprocessor(TEXTS), ours, strict=True):
        if not isinstance(part, dict):
            part, wanted = {"": part}, {"": wanted}
        for name, value in part.items():
            assert np.array_equal(keras.ops.convert_to_numpy(value), wanted[name]), name

    again = interop.from_hub(theirs).preprocessor
    assert again.sequence_length == 24 and not again.add_end_token
    assert again.tokenizer(TEXTS) == causal.preprocessor.tokenizer(TEXTS)
    assert again.tokenizer.stop_token_ids == causal.preprocessor.tokenizer.stop_token_ids


# It leaves the file open that it reads.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
def test_presets_carry_the_tokenizer(causal, tmp_path):
    interop.to_hub(causal).save_to_preset(str(tmp_path / "preset"))
    again = interop.from_hub(tmp_path / "preset")
    assert again.preprocessor.tokenizer(TEXTS) == causal.preprocessor.tokenizer(TEXTS)


def test_gemma_3_has_no_tokens_of_pictures(causal):
    preprocessor = Gemma3CausalLMPreprocessor(causal.preprocessor.tokenizer, sequence_length=16)
    sizes = {**SIZES, **hub_models.GEMMA_2, "sliding_window_pattern": 6}
    ours = Gemma3CausalLM(Gemma3Backbone(**sizes), preprocessor=preprocessor)
    theirs = interop.to_hub(ours)
    assert list(theirs.preprocessor.tokenizer("a b")) == preprocessor.tokenizer("a b")
    assert type(interop.from_hub(theirs)) is Gemma3CausalLM
