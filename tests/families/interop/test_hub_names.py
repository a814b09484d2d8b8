"""What keras-hub's users write: names of classes, arguments in its order, and its settings."""

import inspect
import re
from importlib import import_module

import keras
import numpy as np
import pytest

from forked_python import quick_python
from kmodels import models
from kmodels.core.errors import InputError
from kmodels.text.byte_level import END as STOP
from kmodels.text.byte_level import START
from python_process import run_python
from refusals import refused
from sentencepiece_files import words_model

FAMILIES = re.compile(
    r"(ViT(?!Det)|DeiT|DINO|Gemma(?!3n)|Llama3(?!VLM|_|Vision)|Qwen3(?!Moe|_|5|\.)|CLIP|SigLIP)"
)
# Of audio and video, and a drafter that reads the caches of another model.
ABSENT = {
    *("Gemma4AssistantCausalLM", "Gemma4AudioConverter", "Gemma4AudioEncoder"),
    "Gemma4VideoConverter",
}
# Arguments that mean nothing here, by class: what they are about is not there.
ELSEWHERE = {"Gemma4Backbone": {"use_vision_bidirectional_attention"}}
GEMMA = (2, 1, 8, 16, 4)  # heads, groups, width, MLP, head
HEADS = ("num_query_heads", "num_key_value_heads", "hidden_dim", "intermediate_dim", "head_dim")
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3)).astype("uint8")


def accepted(cls):
    """Names of all arguments, those that a base class takes included."""
    found = set(getattr(getattr(cls, "config_class", None), "__dataclass_fields__", ()))
    for one in cls.__mro__:
        if "__init__" in vars(one):
            found |= set(inspect.signature(one.__init__).parameters)
    return found


@pytest.mark.needs("keras_hub")
@pytest.mark.across("torch")
def test_each_class_and_argument_of_keras_hub_is_here():
    hub = import_module("keras_hub")
    public = {
        name: getattr(room, name)
        for room in (hub.models, hub.layers, hub.tokenizers)
        for name in dir(room)
        if FAMILIES.match(name)
    }
    assert {name for name in public if not hasattr(models, name)} == ABSENT
    known = {*inspect.signature(keras.layers.Layer.__init__).parameters, "audio_encoder"}
    known |= {"is_embedding_model", "pooling_intermediate_dim", "embedding_dim"}
    known |= {"num_audio_tokens_per_clip", "audio_converter", "video_converter"}
    gemma = import_module("kmodels.models.gemma.text")
    known |= {*gemma.SOUND, *gemma.IMAGES}
    for name in public.keys() - ABSENT:
        wanted = set(inspect.signature(public[name].__init__).parameters)
        more = ELSEWHERE.get(name, set()) | {"final_logit_cap"}
        lacks = wanted - accepted(getattr(models, name)) - known - more
        assert not lacks, (name, lacks)


def encoder(kind, **more):
    sizes = {"image_size": 16, "patch_size": 4, "num_heads": 2, "hidden_dim": 8, "num_layers": 1}
    return getattr(models, kind)(**sizes, intermediate_dim=8, output_dim=8, pool_size=2, **more)


# A class, arguments without names as keras-hub takes them, and attributes that show their places.
ORDER = [
    (
        *("ViTBackbone", ((16, 16, 3), 8, 1, 2, 8, 12, 0.1, 0.2, 1e-3, False)),
        {"mlp_dim": 12, "attention_dropout": 0.2, "layer_norm_epsilon": 1e-3, "hidden_dim": 8},
    ),
    (
        *("DeiTBackbone", ((16, 16, 3), 8, 1, 2, 8, 12, 0.1, 0.2, 1e-3)),
        {"intermediate_dim": 12, "dropout_rate": 0.1, "layer_norm_epsilon": 1e-3},
    ),
    (
        *("DINOV3Backbone", (7, 1, 8, 2, 12, 0.5, 1, True, "gelu", False, True, False)),
        {"hidden_dim": 8, "intermediate_dim": 12, "layer_scale_init_value": 0.5},
    ),
    (
        *("CLIPVisionEncoder", (8, 8, 1, 2, 12, "gelu", None, (16, 16, 3), None, "bfloat16")),
        {"intermediate_dim": 12, "image_shape": (16, 16, 3), "compute_dtype": "bfloat16"},
    ),
    (
        *("SigLIPVisionEncoder", (8, 8, 1, 2, 12, "gelu", 1e-3, (16, 16, 3), None, "bfloat16")),
        {"intermediate_dim": 12, "layer_norm_epsilon": 1e-3, "compute_dtype": "bfloat16"},
    ),
    (
        *("Qwen3Backbone", (20, 1, 2, 1, 4, 8, 16, 1e4, 2.0, 1e-3, 0.1, False, 7)),
        {"num_key_value_heads": 1, "head_dim": 4, "hidden_dim": 8, "rope_scaling_factor": 2.0}
        | {"tie_word_embeddings": False, "sliding_window_size": 7},
    ),
    (
        *("Llama3Backbone", (20, 1, 2, 8, 16, 1, 1e4, 1.0, 8.0, 1.0, 4.0, 64, 1e-3, 0.1)),
        {"head_dim": 4, "rope_high_freq_factor": 4.0, "layer_norm_epsilon": 1e-3, "dropout": 0.1},
    ),
    (
        *("GemmaBackbone", (20, 1, *GEMMA, False, True, True, 50.0, 30.0, True, 5, 1e-3, 0.1)),
        {"final_logit_soft_cap": 30.0, "sliding_window_size": 5, "dropout": 0.1},
    ),
    (
        *("Gemma3Backbone", (20, 16, 1, *GEMMA, True, True, True, False, None, 30.0, True, 5)),
        {"num_layers": 1, "use_post_attention_norm": False, "sliding_window_size": 5},
    ),
    (
        *("Gemma4Backbone", (20, 16, 2, *GEMMA, True, None, 30.0, True, 5, 2, None, 6)),
        {"num_layers": 2, "sliding_window_pattern": 2, "global_head_dim": 6, "norm_offset": 0.0},
    ),
    (
        *("Gemma3VisionEncoder", (16, 4, 2, 8, 1, 12, 8, 2, 1e-3, "bfloat16")),
        {"intermediate_dim": 12, "num_vision_tokens_per_image": 4, "compute_dtype": "bfloat16"},
    ),
    (
        *("Gemma4VisionEncoder", (16, 4, 2, 8, 1, 12, 4, 8, 1, 2)),
        {"patch_size": 4, "head_dim": 4, "output_dim": 8, "num_vision_tokens_per_image": 4},
    ),
    (
        *("CLIPImageConverter", ((8, 6), 0.5, -1.0, False, False, "bicubic", False, "yxyx")),
        {"image_size": (8, 6), "interpolation": "bicubic"},
    ),
]


@pytest.mark.parametrize(("name", "given", "wanted"), ORDER, ids=[row[0] for row in ORDER])
def test_arguments_without_names_are_in_keras_hubs_order(name, given, wanted):
    model = getattr(models, name)(*given)
    assert {key: getattr(model, key) for key in wanted} == wanted


def words():
    special = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    special += ["<|image>", "<|image|>", "<image|>"]
    return words_model(["quick", "brown", "fox"], special)


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.each_backend
@pytest.mark.parametrize("generation", [3, 4])
def test_one_name_for_text_alone_and_with_images(generation, tmp_path):
    backbone, task, preprocessor, tokenizer = (
        getattr(models, f"Gemma{generation}{name}")
        for name in ("Backbone", "CausalLM", "CausalLMPreprocessor", "Tokenizer")
    )
    kinds = {
        name: getattr(models, f"Gemma{generation}ImageText{name}") for name in ("Backbone", "LM")
    }
    sizes, more = {3: (((16, 16),), {}), 4: ((4, 4, 2), {"head_dim": 4})}[generation]
    converter = getattr(models, f"Gemma{generation}ImageConverter")(*sizes)
    vision = encoder(f"Gemma{generation}VisionEncoder", **more)
    text = tokenizer(words())
    count = text.vocabulary_size()
    for seen, made in ((None, backbone), (vision, kinds["Backbone"])):
        images = None if seen is None else converter
        prepared = preprocessor(text, images, sequence_length=24, num_vision_tokens_per_image=4)
        model = task(prepared, backbone(count, 16, 2, *GEMMA, vision_encoder=seen))
        assert type(model.backbone) is made
        assert (model.backbone.vision_encoder is None) == (seen is None)
        assert type(model) is (task if seen is None else kinds["LM"]) and isinstance(model, task)
        assert type(task(model.backbone, prepared)) is type(model)
        x = {"prompts": ["quick fox"], "responses": ["brown"]}
        wanted = keras.ops.convert_to_numpy(model(prepared(x)[0]))
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert type(again) is type(model)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(again(prepared(x)[0])), wanted)


FRESH = """
import sys
from kmodels.models import Gemma{n}Backbone, Gemma{n}CausalLMPreprocessor, Gemma{n}Tokenizer
from kmodels.models import Gemma{n}VisionEncoder
encoder = Gemma{n}VisionEncoder(
    image_size=16, patch_size=4, num_heads=2, hidden_dim=8, num_layers=1, intermediate_dim=8,
    output_dim=8, pool_size=2{more}
)
assert "kmodels.models.gemma_vision.gemma{n}" not in sys.modules
backbone = Gemma{n}Backbone(20, 16, 1, 2, 1, 8, 16, 4, vision_encoder=encoder)
preprocessor = Gemma{n}CausalLMPreprocessor(Gemma{n}Tokenizer({words}), image_converter={{}})
print(type(backbone).__name__, type(preprocessor).__name__)
"""


@pytest.mark.parametrize("generation", [3, 4])
def test_classes_with_images_are_loaded_when_they_are_asked_for(generation):
    more = ", head_dim=4" if generation == 4 else ""
    program = FRESH.format(n=generation, more=more, words=words())
    done = run_python("-c", program, python=quick_python())
    kind = f"Gemma{generation}ImageText"
    assert done.stdout.split() == [f"{kind}Backbone", f"{kind}LMPreprocessor"], done.stderr


def embedder(kind, **settings):
    sizes = {"vocabulary_size": 20, "num_layers": 1, **dict(zip(HEADS, GEMMA, strict=True))}
    backbone = getattr(models, f"{kind}Backbone")(**sizes)
    return getattr(models, f"{kind}TextEmbedder")(backbone, None, **settings)


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.each_backend
@pytest.mark.parametrize("kind", ["Gemma3", "Qwen3"])
def test_embedders_pool_as_they_are_told(kind, tmp_path):
    ids, mask = np.array([[3, 4, 5, 0]]), np.array([[1, 1, 1, 0]])
    given = {"token_ids": ids, "padding_mask": mask}
    for settings, place in (
        ({}, "last"),
        ({"pooling_mode": "last"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ):
        model = embedder(kind, **settings, normalize=False)
        hidden = keras.ops.convert_to_numpy(model.backbone(given))
        wanted = hidden[0, 2] if place == "last" else hidden[0, :3].mean(0)
        found = keras.ops.convert_to_numpy(model(given))
        np.testing.assert_allclose(found[0], wanted, rtol=0, atol=1e-6)
        assert model.pooling_mode == place and not model.normalize
        model.save_to_preset(tmp_path / "saved")
        again = type(model).from_preset(tmp_path / "saved")
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(again(given)), found)
    refused("pooling_mode is 'cls'; choose one of last, mean", embedder, kind, pooling_mode="cls")
    both = {"pooling": "mean", "pooling_mode": "last"}
    refused("pooling is 'mean' and pooling_mode 'last'", embedder, kind, **both)


def clip():
    vocabulary = {text: i for i, text in enumerate(["a</w>", "b</w>", "a", "b", STOP, START])}
    return models.CLIPPreprocessor(models.CLIPTokenizer(vocabulary, []), converter("CLIP"), 6)


def siglip():
    return models.SigLIPPreprocessor(models.SigLIPTokenizer(words()), converter("SigLIP"), 6)


def converter(kind):
    made = getattr(models, f"{kind}ImageConverter")
    return made((4, 4), [2 / 255] * 3, [-1.0] * 3, interpolation="bicubic")


@pytest.mark.parametrize("make", [clip, siglip])
def test_prompts_with_images(make, tmp_path):
    preprocessor = make()
    x = {"prompts": ["a b", "b"], "images": PIXELS}
    found = preprocessor(x)
    assert set(found) == {"token_ids", "padding_mask", "images"}
    np.testing.assert_array_equal(found["images"], preprocessor.image_converter(PIXELS))
    np.testing.assert_array_equal(found["token_ids"], preprocessor(x["prompts"])["token_ids"])
    assert preprocessor({**x, "images": None})["images"] is None
    preprocessor.save_to_preset(tmp_path)
    again = type(preprocessor).from_preset(tmp_path)(x)
    for name, value in found.items():
        np.testing.assert_array_equal(again[name], value)
    plain = type(preprocessor)(preprocessor.tokenizer)
    refused("got images and has no image_converter; give one", plain, x)


@pytest.mark.needs("tensorflow")
@pytest.mark.across("torch", "jax", "tensorflow")
@pytest.mark.parametrize("make", [clip, siglip])
def test_prompts_with_images_as_tensors(make):
    import tensorflow as tf

    preprocessor = make()
    x = {"prompts": ["a b", "b"], "images": PIXELS}
    columns = {name: tf.constant(column) for name, column in x.items()}
    data = tf.data.Dataset.from_tensor_slices(columns).batch(2).map(preprocessor)
    for found in (preprocessor(columns), next(iter(data.as_numpy_iterator()))):
        for name, value in preprocessor(x).items():
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("ViTBackbone", (8,) * 16, "ViTBackbone got 16 arguments without a name; it takes 15"),
        ("Gemma3Backbone", (20, {"vocabulary_size": 20}), "got vocabulary_size by position and by"),
        ("Gemma4Backbone", ({"audio_encoder": 1},), "Gemma4Backbone reads no audio; leave audio_e"),
        ("CLIPVisionEncoder", ({"intermediate_output_index": 1},), "take the output of a block"),
        ("ViTImageConverter", ({"bounding_box_format": "xywh"},), "images have no bounding boxes"),
        ("Gemma4ImageConverter", ({"scale": 0.5},), "pixels go from 0 to 1: leave both out"),
        (
            "Gemma4CausalLMPreprocessor",
            (None, {"video_converter": 1}),
            "reads neither audio nor video; leave video_converter out",
        ),
    ],
)
def test_refusals(name, given, message):
    named = given[-1] if isinstance(given[-1], dict) else {}
    with pytest.raises(InputError, match=re.escape(message)):
        getattr(models, name)(*(one for one in given if not isinstance(one, dict)), **named)


def test_a_name_that_is_not_here_has_a_hint():
    for name, hint in (
        ("EoMTSegmenter", "did you mean EoMTImageSegmenter"),
        ("GemaCausalLM", "did you mean GemmaCausalLM, "),
        ("xyz", "'xyz'$"),
    ):
        with pytest.raises(AttributeError, match=hint):
            getattr(models, name)
