"""Ids and pixels of Gemma 3's preprocessor are those of transformers' processor."""

import json

import keras
import numpy as np
import pytest
from PIL import Image

from arrays import to_numpy
from gemma3_processor_case import ProcessorCase
from kmodels.models import Gemma3ImageConverter, Gemma3ImageTextLMPreprocessor
from pillow_passes import horizontal_pass_first
from refusals import refused

NAMES = ("none", "one", "several", "modes", "without_text")


@pytest.fixture(scope="module")
def case(references):
    with horizontal_pass_first():
        yield ProcessorCase(references)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("crops", [False, True])
def test_prompts(case, name, crops):
    text = case.preprocessor("old" if crops else "model", crops)
    prefix = "crops_" if crops else ""
    length = case.expected[f"{prefix}{name}_ids"].shape[1]
    found = text.generate_preprocess(case.given(name, "paths"), sequence_length=length)
    case.check(found, prefix + name)


def test_crops_are_there():
    # The reference has images of each number of crops, and of none for each reason.
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 12}
    converter = Gemma3ImageConverter((20, 20), **crops)
    sizes = {(20, 20): 0, (33, 39): 0, (31, 47): 2, (37, 103): 3, (171, 41): 4, (9, 40): 0}
    for size, count in {**sizes, (30, 75): 3, (45, 24): 2}.items():
        assert len(converter.crops(np.zeros((*size, 3), "uint8"))) == count, size


@pytest.mark.parametrize("form", ["strings", "bytes", "pillow", "arrays", "datasets"])
def test_forms_of_images(case, form):
    text = case.preprocessor()
    length = case.expected["several_ids"].shape[1]
    case.check(text.generate_preprocess(case.given("several", form), length), "several")


@pytest.mark.parametrize("crops", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_chats(case, crops, own):
    text = case.preprocessor("old", crops)
    if not own:
        text.tokenizer.chat_template = None
        assert text.chat_format == "gemma"
    # In the parts of a message, and in a list beside the messages.
    chats = [
        [
            {
                **turn,
                "content": [
                    {**part, "image": case.picture(part["image"])} if "image" in part else part
                    for part in turn["content"]
                ],
            }
            for turn in chat
        ]
        for chat in case.said["chats"]
    ]
    name = "crops_chat" if crops else "chat"
    case.check(text.prompt_inputs(text.chat_examples(chats)), name)
    length = case.expected[f"{name}_ids"].shape[1] + 1
    found = text.generate_preprocess(chats, sequence_length=length)
    assert text.chat_token_ids(chats) == [
        row[mask.astype(bool)].tolist()
        for row, mask in zip(found["token_ids"], found["padding_mask"], strict=True)
    ]
    single = text.generate_preprocess(chats[0], sequence_length=length)
    np.testing.assert_array_equal(single["token_ids"], found["token_ids"][0])
    np.testing.assert_array_equal(single["images"], found["images"][0])


def test_torchvision_rounds_otherwise(case):
    # Pillow's backend is followed; the other one is at most one of 255 steps away.
    picture = np.asarray(Image.open(case.picture("wide3.jpg")))
    found = case.preprocessor().image_converter(picture)
    difference = np.abs(found - case.expected["torchvision_pixels"][0])
    assert 0 < difference.max() < 1.01 * 2 / 255


def test_converter_as_a_layer(case):
    converter = case.preprocessor().image_converter
    pictures = [np.asarray(Image.open(case.picture(one))) for one in ("wide2.png", "square.png")]
    found = converter(pictures)
    np.testing.assert_array_equal(found, case.expected["one_pixels"][::-1])
    np.testing.assert_array_equal(converter(pictures[0]), found[0])
    np.testing.assert_array_equal(converter(pictures[1][None]), found[1:])
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(converter))
    np.testing.assert_array_equal(again(pictures), found)
    tensor = keras.ops.convert_to_tensor(pictures[0])
    np.testing.assert_array_equal(converter(tensor), found[0])
    labels = np.ones(2)
    x, y = converter(pictures, labels)
    np.testing.assert_array_equal(to_numpy(x), found)
    assert y is labels
    # Floats are not rounded between; a kernel with negative parts stays in the range.
    sharp = Gemma3ImageConverter((40, 40), interpolation="bicubic")
    wide = np.where(np.arange(20)[:, None, None] > 9, 255.0, 0.0) * np.ones((20, 20, 3))
    assert np.abs(sharp(wide)).max() == 1.0


@pytest.mark.needs("keras_hub")
def test_keras_hubs_converter(case):
    import keras_hub

    settings = {"crop_to_aspect_ratio": False, "antialias": True, "interpolation": "bilinear"}
    theirs = keras_hub.layers.Gemma3ImageConverter(
        image_size=(20, 20), scale=1 / 127.5, offset=-1.0, **settings
    )
    text = case.preprocessor(image_converter=theirs)
    given = {"prompts": "<start_of_image>", "images": case.picture("nearly.png")}
    pixels = text.generate_preprocess(given)["images"]
    np.testing.assert_array_equal(pixels, case.preprocessor().generate_preprocess(given)["images"])


def test_old_and_new_spelling(case, tmp_path):
    new, old = case.preprocessor("model"), case.preprocessor("old")
    assert new.image_converter.to_dict() == old.image_converter.to_dict()
    assert new.num_vision_tokens_per_image == old.num_vision_tokens_per_image == 4
    assert new.image_tokens == old.image_tokens
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((case.folder / "old" / name).read_bytes())
    settings = json.loads((case.folder / "old" / "preprocessor_config.json").read_text())
    file = tmp_path / "preprocessor_config.json"

    def read(**changes):
        file.write_text(json.dumps({**settings, **changes}))
        return Gemma3ImageTextLMPreprocessor.from_preset(tmp_path).image_converter

    changed = read(**case.said["crops"], image_mean=[0.1, 0.2, 0.3], image_std=[0.2, 0.4, 0.5])
    assert changed.do_pan_and_scan and changed.pan_and_scan_min_crop_size == 12
    np.testing.assert_allclose(changed.mean, [0.1, 0.2, 0.3])
    np.testing.assert_allclose(changed.std, [0.2, 0.4, 0.5])
    plain = read(do_normalize=False, resample=3)
    assert plain.mean == [0.0] * 3 and plain.std == [1.0] * 3
    assert plain.interpolation == "bicubic"
    (tmp_path / "config.json").write_text('{"preprocessor": {}}')  # of kmodels, which counts
    assert Gemma3ImageConverter.read_files(tmp_path) == {}
    (tmp_path / "config.json").unlink()
    for changes, message in (
        ({"do_resize": False}, "Gemma3ImageConverter does not support do_resize of preprocessor_"),
        ({"size": {"shortest_edge": 9}}, "a size of shortest_edge in place of height and width"),
        ({"resample": 5}, "does not support resample 5 of"),
        ({"rescale_factor": 0.5}, "does not support rescale_factor 0.5 of"),
    ):
        refused(message, read, **changes)


@pytest.mark.needs("transformers", "torchvision")
@pytest.mark.parametrize("spelling", ["both", "old"])
def test_export(case, tmp_path, spelling):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    text = case.preprocessor()
    text.tokenizer.save(tmp_path)
    for name, content in text.transformers_files().items():
        if spelling == "both" or name == "preprocessor_config.json":
            (tmp_path / name).write_text(json.dumps(content))
    theirs = Gemma3Processor.from_pretrained(tmp_path)
    theirs.image_processor = Gemma3ImageProcessorPil.from_pretrained(tmp_path)
    if spelling == "both":
        texts, names = case.said["cases"]["several"]
        pictures = [[Image.open(case.picture(one)) for one in row] for row in names]
        out = theirs(text=texts, images=pictures, padding=True, return_tensors="np")
        np.testing.assert_array_equal(out["input_ids"], case.expected["several_ids"])
        pixels = np.moveaxis(np.asarray(out["pixel_values"]), 1, -1)
        np.testing.assert_array_equal(pixels, case.expected["several_pixels"])
    again = Gemma3ImageTextLMPreprocessor.from_preset(tmp_path)
    assert {**again.to_dict(), "tokenizer": None} == {**text.to_dict(), "tokenizer": None}


def test_what_transformers_cannot_express(case):
    converter = Gemma3ImageConverter((20, 20), crop_to_aspect_ratio=True)
    text = case.preprocessor(image_converter=converter)
    refused("Gemma3ImageProcessor has no counterpart for an image", text.transformers_files)
