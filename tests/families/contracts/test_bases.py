"""`from_preset` of the bases, as of keras-hub's: the class of the preset's family is found."""

import pytest

from kmodels import models
from kmodels.core.errors import InputError
from kmodels.text import demo
from kmodels.text.training import train_tokenizer

# The class of a model that is saved, its preset and settings, and the classes that bases find.
CASES = {
    "classifier": (
        ("ViTImageClassifier", "vit_debug", {"num_classes": 3}),
        {"Task": "ViTImageClassifier", "Backbone": "ViTBackbone", "CausalLM": None},
    ),
    "segmenter": (
        ("ViTImageSegmenter", "vit_debug", {"num_classes": 3}),
        {"Task": "ViTImageSegmenter", "ImageClassifier": "ViTImageClassifier"},
    ),
    "decoder of pixels": (
        ("ViTMAEForPreTraining", "vit_debug", {}),
        {"Task": "ViTMAEForPreTraining", "TextEmbedder": None},
    ),
    "towers": (
        ("ImageTextSimilarity", "clip_debug", {}),
        {"Task": "ImageTextSimilarity", "Backbone": "CLIPBackbone", "ImageClassifier": None},
    ),
    "images and text": (
        ("Gemma3ImageTextLM", "gemma3_vision_debug", {}),
        {"CausalLM": "Gemma3ImageTextLM", "Backbone": "Gemma3ImageTextBackbone"},
    ),
    "embedder": (
        ("Qwen3TextEmbedder", "qwen3_debug", {}),
        {"TextEmbedder": "Qwen3TextEmbedder", "CausalLM": "Qwen3CausalLM"},
    ),
    "text tower": (
        ("SigLIPTextEncoder", "siglip_text_debug", {}),
        {"Backbone": "SigLIPTextEncoder", "Task": None},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_base_finds_the_class(case, tmp_path):
    (name, preset, settings), wanted = CASES[case]
    getattr(models, name).from_preset(preset, **settings).save_to_preset(tmp_path)
    for base, found in wanted.items():
        base = getattr(models, base)
        if found is None:
            with pytest.raises(InputError, match=f"is for no {base.__name__}; use "):
                base.from_preset(tmp_path)
        else:
            heads = settings if issubclass(base, models.Task) else {}
            model = base.from_preset(tmp_path, load_weights=False, **heads)
            assert type(model) is getattr(models, found)


@pytest.mark.parametrize(
    ("base", "preset", "found"),
    [
        ("CausalLM", "gemma3_debug", "GemmaCausalLM"),
        ("CausalLM", "llama3_debug", "Llama3CausalLM"),
        ("TextEmbedder", "gemma3_debug", "GemmaTextEmbedder"),
        ("ImageClassifier", "vit_debug", "ViTImageClassifier"),
        ("Preprocessor", "vit_debug", "ViTImageClassifierPreprocessor"),
        ("ImageClassifier", "gemma3_debug", None),
    ],
)
def test_a_base_finds_the_class_of_a_name(base, preset, found):
    base = getattr(models, base)
    assert (preset in base.presets) == (found is not None)
    if found is None:
        with pytest.raises(InputError, match=f"{preset} is for no {base.__name__}; use "):
            base.from_preset(preset)
    else:
        assert type(base.from_preset(preset)) is getattr(models, found)


@pytest.mark.parametrize("saved", ["CausalLM", "TextEmbedder"])
@pytest.mark.parametrize(
    ("base", "found"),
    [
        ("Preprocessor", None),
        ("CausalLMPreprocessor", "Qwen3CausalLMPreprocessor"),
        ("Qwen3CausalLMPreprocessor", "Qwen3CausalLMPreprocessor"),
        ("TextEmbedderPreprocessor", "Qwen3TextEmbedderPreprocessor"),
    ],
)
def test_a_base_finds_the_preprocessor(base, found, saved, tmp_path):
    task = getattr(models, f"Qwen3{saved}")
    tokenizer = train_tokenizer(demo.texts(), 420)
    preprocessor = task.preprocessor_class(tokenizer, sequence_length=9)
    model = task.from_preset("qwen3_debug", preprocessor=preprocessor, vocabulary_size=420)
    model.save_to_preset(tmp_path)
    read = getattr(models, base).from_preset(tmp_path)
    assert type(read).__name__ == found or (found is None and type(read) is type(preprocessor))
    assert read.sequence_length == 9
