"""Ids, patches and places of Gemma 4's preprocessor are those of transformers' processors."""

import io
import json
import re
import shutil

import keras
import numpy as np
import pytest
from PIL import Image

from gemma4_vision_case import END, SOFT, START, ProcessorCase
from kmodels.data.pipeline.kinds import as_dataset
from kmodels.models import (
    Gemma4ImageConverter,
    Gemma4ImageTextLM,
    Gemma4ImageTextLMPreprocessor,
    GemmaCausalLMPreprocessor,
)
from pillow_passes import horizontal_pass_first
from refusals import refused

NAMES = ("none", "one", "several", "modes", "without_text")
FORMS = ("model", "unified")
LENGTH = 160


@pytest.fixture(scope="module")
def case(references):
    with horizontal_pass_first():
        yield ProcessorCase(references)


@pytest.mark.parametrize(
    ("name", "form", "opened"),
    [
        *((name, form, "paths") for form in FORMS for name in NAMES),
        *(("several", "model", opened) for opened in ("bytes", "pillow", "arrays")),
    ],
)
def test_prompts(case, name, form, opened):
    length = case.expected[f"{name}_ids"].shape[1]
    text = case.preprocessor(form)
    found = text.generate_preprocess(case.given(name, opened), sequence_length=length)
    case.check(found, name, form)


def test_shapes_are_there():
    # The reference has images that become larger and smaller, one that stays as it is, and some
    # that are long: nothing would be left of a side.
    converter = Gemma4ImageConverter(2, 70, 2)
    sizes = {(20, 20): (32, 32), (28, 40): (28, 40), (37, 103): (20, 52), (171, 41): (68, 16)}
    sizes |= {(2, 190): (4, 280), (300, 3): (280, 4), (45, 24): (44, 24)}
    assert {size: converter.size_of(*size) for size in sizes} == sizes
    assert (converter.side, converter.max_patches) == (2, 280)
    merged = Gemma4ImageConverter(2, 70, 2, merge_patches=True)
    assert (merged.side, merged.max_patches) == (4, 70)


def test_chats(case):
    text = case.preprocessor("unified")
    chats = json.loads(json.dumps(case.said["chats"]))
    for part in (part for chat in chats for turn in chat for part in turn["content"]):
        if "image" in part:
            part["image"] = case.picture(part["image"])
    case.check(text.prompt_inputs(text.chat_examples(chats)), "chat", "unified")
    text.tokenizer.chat_template = None
    assert text.chat_format == "gemma4"
    case.check(text.prompt_inputs(text.chat_examples(chats)), "chat", "unified")


def test_torchvision_rounds_otherwise(case):
    # Pillow's backend is followed; the other one is at most one of 255 steps away, and the last
    # bit where nothing is resized.
    converter = case.converter("unified")
    for name, steps in (("exact.png", 1e-4), ("wide.jpg", 1.01)):
        found = converter(case.picture(name))
        key = f"torchvision_{name.partition('.')[0]}"
        np.testing.assert_array_equal(
            found["pixel_position_ids"], case.expected[f"{key}_places"][0]
        )
        difference = np.abs(found["pixel_values"] - case.expected[key][0]).max()
        assert 0 < difference < steps / 255


def test_converter_as_a_layer(case):
    converter = case.converter()
    pictures = [np.asarray(Image.open(case.picture(one))) for one in ("square.png", "exact.png")]
    found = converter(pictures)
    np.testing.assert_array_equal(found["pixel_values"], case.expected["one_pixels"])
    np.testing.assert_array_equal(found["pixel_position_ids"], case.expected["one_places"])
    alone = converter(keras.ops.convert_to_tensor(pictures[0]))
    np.testing.assert_array_equal(alone["pixel_values"], found["pixel_values"][0])
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(converter))
    labels = np.ones(2)
    x, y = again(pictures, labels)
    np.testing.assert_array_equal(x["pixel_values"], found["pixel_values"])
    assert y is labels
    # Floats are not rounded between; a kernel with negative parts stays in the range.
    wide = np.where(np.arange(90)[:, None, None] > 40, 255.0, 0.0) * np.ones((90, 90, 3))
    assert converter(wide)["pixel_values"].max() == 1.0
    spec = converter.compute_output_spec(keras.KerasTensor((4, None, None, 3)))
    assert spec["pixel_values"].shape == (4, 280, 12)
    assert spec["pixel_position_ids"].dtype == "int32"


def test_files_of_transformers(case, tmp_path):
    for form in FORMS:
        text = case.preprocessor(form)
        assert text.image_converter.merge_patches == (form == "unified")
        assert text.num_vision_tokens_per_image == 70
        out = tmp_path / form
        out.mkdir()
        text.tokenizer.save(out)
        for name, content in text.transformers_files().items():
            (out / name).write_text(json.dumps(content))
        again = Gemma4ImageTextLMPreprocessor.from_preset(out)
        assert again.image_converter.to_dict() == text.image_converter.to_dict()
        written = json.loads((out / "preprocessor_config.json").read_text())
        theirs = json.loads((case.folder / "model" / "processor_config.json").read_text())
        same = theirs["image_processor"] | {"image_processor_type": written["image_processor_type"]}
        assert same.items() <= written.items()
    file = tmp_path / "model" / "preprocessor_config.json"
    (tmp_path / "model" / "processor_config.json").unlink()
    settings = json.loads(file.read_text())
    for changes, message in (
        ({"do_resize": False}, "Gemma4ImageConverter does not support do_resize of preprocessor_"),
        ({"resample": 5}, "does not support resample 5 of"),
        ({"rescale_factor": 0.5}, "does not support rescale_factor 0.5 of"),
        ({"do_normalize": True, "image_mean": 0.5}, "does not support do_normalize of"),
    ):
        file.write_text(json.dumps({**settings, **changes}))
        refused(message, Gemma4ImageTextLMPreprocessor.from_preset, tmp_path / "model")
    text = case.preprocessor(image_converter=Gemma4ImageConverter(max_soft_tokens=71))
    refused("max_soft_tokens is 71; transformers' Gemma4ImageProc", text.transformers_files)


@pytest.mark.needs("keras_hub")
def test_keras_hubs_converter(case):
    import keras_hub

    theirs = keras_hub.layers.Gemma4ImageConverter(
        patch_size=2, max_soft_tokens=70, pooling_kernel_size=2
    )
    text = case.preprocessor(image_converter=theirs)
    assert text.image_converter.to_dict() == case.converter().to_dict()


@pytest.mark.needs("transformers", "torchvision")
def test_transformers_reads_the_files(case, tmp_path):
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    text = case.preprocessor()
    for name, content in text.transformers_files().items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs = Gemma4ImageProcessorPil.from_pretrained(tmp_path)
    out = theirs(Image.open(case.picture("wide.jpg")), return_tensors="np")
    found = text.image_converter(case.picture("wide.jpg"))
    np.testing.assert_array_equal(found["pixel_values"], out["pixel_values"][0])
    np.testing.assert_array_equal(found["pixel_position_ids"], out["image_position_ids"][0])


def test_inputs_labels_and_weights(case):
    text = case.preprocessor("unified", sequence_length=LENGTH, loss_on="all")
    wide, square = case.picture("wide.jpg"), case.picture("square.png")
    said = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "that"}]
    records = [
        {"prompts": f"a {SOFT} or {SOFT}", "responses": "both", "images": [wide, str(square)]},
        {"prompts": "no image", "responses": "none"},
        {"messages": said, "images": [square.read_bytes()]},
        {"text": "a caption", "image": Image.open(io.BytesIO(square.read_bytes()))},
    ]
    x, labels, weights = text(records)
    shapes = {name: (value.shape, value.dtype.name) for name, value in x.items()}
    assert shapes == {
        "token_ids": ((4, LENGTH), "int32"),
        "padding_mask": ((4, LENGTH), "int32"),
        "pixel_values": ((4, 2, 70, 48), "float32"),
        "pixel_position_ids": ((4, 2, 70, 2), "int32"),
        "vision_indices": ((4, 140), "int32"),
        "vision_mask": ((4, LENGTH), "int32"),
    }
    # 5 x 13 and 8 x 8 pieces.
    assert x["vision_mask"].sum(1).tolist() == [65 + 64, 0, 64, 64]
    assert [(places >= 0).all(-1).sum() for places in x["pixel_position_ids"]] == [129, 0, 64, 64]
    soft = labels == text.image_token_id
    assert soft.any() and not weights[soft].any()
    learnt = text.tokenizer.decode(labels[3][weights[3] == 1], skip_special_tokens=False)
    assert learnt.startswith(START) and learnt.endswith(f"{END}a caption<eos>")
    packed, _, _ = text.pack(records[1:], sequence_length=400)
    assert packed["pixel_values"].shape[:2] == (1, 2)
    batch, _, _ = as_dataset(records, batch_size=4, preprocess=text)[0]
    for name, value in x.items():
        np.testing.assert_array_equal(batch[name], value)
    found = text.generate_preprocess({"prompts": f"a {SOFT} b", "images": square})
    assert text.generate_postprocess(found) == "a  b"


def test_saving(case, tmp_path):
    text = case.preprocessor("unified", sequence_length=LENGTH, max_images_per_prompt=3)
    record = {"prompts": SOFT, "responses": "x", "images": case.picture("tall.png")}
    expected = keras.tree.flatten(text(record))
    text.save_to_preset(tmp_path)
    for again in (
        Gemma4ImageTextLMPreprocessor.from_preset(tmp_path),
        Gemma4ImageTextLMPreprocessor(**text.to_dict()),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(text)),
    ):
        assert again.max_images_per_prompt == 3
        for one, other in zip(keras.tree.flatten(again(record)), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    converter = Gemma4ImageConverter.from_preset(tmp_path, max_soft_tokens=280)
    assert converter.merge_patches and converter.max_soft_tokens == 280
    alone = tmp_path / "converter"
    converter.save_to_preset(alone)
    assert Gemma4ImageConverter.from_preset(alone).to_dict() == converter.to_dict()


def test_the_converter_cuts_as_the_model_takes(references, case, tmp_path):
    for name, merges in (("unified", True), ("tower", False)):
        path = tmp_path / name
        shutil.copytree(references / "gemma4_vision" / name / "model", path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(case.folder / "model" / file, path)
        # No file says how images are cut.
        settings = {"load_weights": False, "vocabulary_size": 420}
        converter = Gemma4ImageTextLM.from_preset(path, **settings).preprocessor.image_converter
        assert (converter.merge_patches, converter.patch_size) == (merges, 2)
        assert converter.pooling_kernel_size == 2


def test_what_is_refused(case):
    text = case.preprocessor(sequence_length=LENGTH)
    square, one = case.picture("square.png"), {"prompts": SOFT, "responses": "x"}
    plain = GemmaCausalLMPreprocessor(text.tokenizer)
    for call, message in (
        (
            lambda: text({**one, "images": [square, square]}),
            f"example 0 has 1 {SOFT} in its text and 2 images; write {SOFT} once for each image",
        ),
        (lambda: text(f"a {SOFT}"), f"example 0 has 1 {SOFT} in its text and 0 images"),
        (
            lambda: text({**one, "images": square}, sequence_length=40),
            "row 0 has 1 images of 64 tokens together, which do not fit in 40 tokens; give",
        ),
        (lambda: Gemma4ImageConverter(0), "patch_size is 0; give at least 1"),
        (lambda: Gemma4ImageConverter(max_soft_tokens=0), "max_soft_tokens is 0; give at least 1"),
        (
            lambda: Gemma4ImageTextLMPreprocessor(text.tokenizer, 3),
            "image_converter is a int; give a Gemma4ImageConverter",
        ),
        (lambda: plain({**one, "images": square}), "takes only text here; leave 'images' out"),
    ):
        refused(re.escape(message), call)
