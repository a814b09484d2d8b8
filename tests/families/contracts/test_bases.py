"""`from_preset` of the bases, as of keras-hub's: the class of the preset's family is found."""

import pytest

from arrays import assert_equal
from forked_python import quick_python
from kmodels import models, presets
from kmodels.core.errors import InputError
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from public_models import CASES as CLASSES
from public_models import MAE_DECODER
from python_process import run_python

# The class of a model that is saved, its preset and settings, and the classes that bases find.
CASES = {
    "classifier": (
        ("ViTImageClassifier", "vit_debug", {"num_classes": 3}),
        {"Task": "ViTImageClassifier", "Backbone": "ViTBackbone", "CausalLM": None},
    ),
    "segmenter": (
        ("ViTImageSegmenter", "vit_debug", {"num_classes": 3}),
        {
            "ImageSegmenter": "ViTImageSegmenter",
            "ImageClassifier": "ViTImageClassifier",
            "ObjectDetector": "ViTObjectDetector",
        },
    ),
    "segmenter with queries": (
        ("EoMTImageSegmenter", "vit_debug", {"num_classes": 3, "num_queries": 4, "num_blocks": 1}),
        {"ImageSegmenter": "EoMTImageSegmenter"},
    ),
    "detector": (
        ("ViTObjectDetector", "vit_debug", {"num_classes": 3, "num_decoder_layers": 1}),
        {"Task": "ViTObjectDetector", "ImageObjectDetector": "ViTObjectDetector"},
    ),
    "decoder of pixels": (
        ("ViTMAEForPreTraining", "vit_debug", MAE_DECODER),
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


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_base_finds_the_class_that_was_saved(cls, tmp_path):
    model = CLASSES[cls][0]()
    model.save_to_preset(tmp_path / "it")
    is_task = hasattr(cls, "backbone_class")
    found = (models.Task if is_task else models.Backbone).from_preset(tmp_path / "it")
    assert type(found) is cls
    assert_equal(found.get_weights(), model.get_weights())
    if is_task:
        found = models.Backbone.from_preset(tmp_path / "it", load_weights=False)
        assert type(found) is type(model.backbone)
        assert presets.class_of(tmp_path / "it") is cls


@pytest.mark.parametrize(
    ("base", "preset", "found"),
    [
        ("CausalLM", "gemma3_debug", "GemmaCausalLM"),
        ("CausalLM", "llama3_debug", "Llama3CausalLM"),
        ("TextEmbedder", "gemma3_debug", "GemmaTextEmbedder"),
        ("ImageClassifier", "vit_debug", "ViTImageClassifier"),
        ("Preprocessor", "vit_debug", "ViTImageClassifierPreprocessor"),
        ("ImageClassifierPreprocessor", "vit_debug", "ViTImageClassifierPreprocessor"),
        ("ImageSegmenterPreprocessor", "vit_debug", "ViTImageSegmenterPreprocessor"),
        ("ImageObjectDetectorPreprocessor", "vit_debug", "ViTObjectDetectorPreprocessor"),
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


@pytest.mark.parametrize("base", ["Preprocessor", "ImageSegmenterPreprocessor", None])
def test_a_base_finds_the_preprocessor_that_was_saved_alone(base, tmp_path):
    models.ViTImageSegmenterPreprocessor((8, 12)).save_to_preset(tmp_path / "images")
    tokenizer = train_tokenizer(demo.texts(), 420)
    models.Qwen3CausalLMPreprocessor(tokenizer, 9).save_to_preset(tmp_path / "text")
    if base is not None:
        read = getattr(models, base).from_preset(tmp_path / "images")
        assert type(read) is models.ViTImageSegmenterPreprocessor and read.image_size == (8, 12)
    else:
        read = models.CausalLMPreprocessor.from_preset(tmp_path / "text")
        assert type(read) is models.Qwen3CausalLMPreprocessor and read.sequence_length == 9
    for base, folder in (("ImageClassifierPreprocessor", "text"), ("CausalLM", "images")):
        with pytest.raises(InputError, match=r"^[^\n]*$"):
            getattr(models, base).from_preset(tmp_path / folder)


def test_a_base_finds_the_class_in_a_process_that_has_loaded_no_model(tmp_path):
    CLASSES[models.NaFlexViTImageClassifier][0]().save_to_preset(tmp_path / "it")
    program = (
        "import sys, kmodels; from kmodels import presets; "
        "print(presets.class_of(sys.argv[1]).__name__)"
    )
    done = run_python("-c", program, tmp_path / "it", python=quick_python())
    assert done.stdout.split() == ["NaFlexViTImageClassifier"], done.stderr
