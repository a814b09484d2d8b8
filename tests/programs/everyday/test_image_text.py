"""Programs that people write with a Gemma 3 that sees, each as it stands in transformers."""

import json
from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import to_numpy
from gemma3_processor_case import ProcessorCase
from kmodels.models import Gemma3ImageTextBackbone, Gemma3ImageTextLM, Gemma3ImageTextLMPreprocessor
from kmodels.models.gemma_vision.presets import PRESETS
from kmodels.text import read_records
from tolerances import tolerance


@pytest.fixture(scope="module")
def case(references):
    return ProcessorCase(references)


@pytest.fixture(scope="module")
def directory(case, tmp_path_factory):
    """A directory of Hugging Face with weights, tokenizer and processor."""
    text = Gemma3ImageTextLMPreprocessor.from_preset(case.folder / "model", sequence_length=48)
    keras.utils.set_random_seed(0)
    backbone = Gemma3ImageTextBackbone(
        **{
            **PRESETS["gemma3_vision_debug"],
            "vocabulary_size": text.tokenizer.vocabulary_size(),
            "image_token_id": text.image_token_id,
            "vision_encoder": {
                **PRESETS["gemma3_vision_debug"]["vision_encoder"],
                "image_size": 20,
                "patch_size": 5,
            },
        }
    )
    made = tmp_path_factory.mktemp("made") / "gemma-3"
    Gemma3ImageTextLM(backbone, text).export_to_transformers(made)
    return made


def test_describe_a_picture(directory, case):
    model = Gemma3ImageTextLM.from_preset(directory)
    picture = case.picture("square.png")
    prompt = {"prompts": "What is <start_of_image>?", "images": str(picture)}
    found = model.generate(prompt, max_length=32)
    assert isinstance(found, str)
    several = model.generate(
        {"prompts": ["a <start_of_image>", "no picture"], "images": [[picture], []]}, max_length=32
    )
    assert len(several) == 2


def test_chat_about_two_pictures(directory, case):
    model = Gemma3ImageTextLM.from_preset(directory)
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "image", "path": str(case.picture("square.png"))},
                {"type": "image", "path": str(case.picture("wide2.png"))},
                {"type": "text", "text": "What differs?"},
            ],
        }
    ]
    reply = model.chat(chat, max_new_tokens=4)
    assert isinstance(reply, str)
    assert model.chat([chat, chat], max_new_tokens=4) == [reply, reply]


def test_lora_on_a_folder_of_captions(directory, case, tmp_path):
    lines = []
    for name, text in (("square.png", "a square"), ("wide2.png", "a wide one")):
        (tmp_path / name).write_bytes(case.picture(name).read_bytes())
        lines.append(json.dumps({"file_name": name, "text": text}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    model = Gemma3ImageTextLM.from_preset(directory)
    model.enable_lora(rank=2, targets="all-linear")
    model.compile(keras.optimizers.Adam(2e-2))
    records = read_records(tmp_path).rows
    losses = model.fit(records, batch_size=2, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save_adapter(tmp_path / "adapter")
    again = Gemma3ImageTextLM.from_preset(directory)
    inputs = again.preprocessor.generate_preprocess(records)
    plain = again.predict(inputs, verbose=0)
    again.load_adapter(tmp_path / "adapter")
    found = again.predict(inputs, verbose=0)
    np.testing.assert_array_equal(found, model.predict(inputs, verbose=0))
    assert np.abs(found - plain).max() > tolerance("logits")


def test_train_the_text_and_not_the_tower_and_go_on_from_a_preset(directory, case, tmp_path):
    model = Gemma3ImageTextLM.from_preset(directory)
    model.backbone.vision_encoder.trainable = False
    record = {"prompts": "<start_of_image>", "responses": "x", "images": case.picture("square.png")}
    tower = [to_numpy(w).copy() for w in model.backbone.vision_encoder.weights]
    model.fit([record] * 2, batch_size=2, epochs=1, verbose=0)
    for weight, held in zip(model.backbone.vision_encoder.weights, tower, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), held)
    model.save_to_preset(tmp_path / "own")
    again = Gemma3ImageTextLM.from_preset(tmp_path / "own")
    inputs = again.preprocessor.generate_preprocess(record)
    batch = {name: array[None] for name, array in inputs.items()}
    found = again.predict(batch, verbose=0)
    np.testing.assert_array_equal(found, model.predict(batch, verbose=0))
    assert again.generate(record, max_length=24) == model.generate(record, max_length=24)


@pytest.mark.across("torch")
def test_the_export_is_a_directory_of_transformers(directory, case):
    torch = import_module("torch")
    import_module("torchvision_cpu").define_torchvision_operators()
    transformers = import_module("transformers")
    model = Gemma3ImageTextLM.from_preset(directory)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    prompt = {"prompts": "What is <start_of_image>?", "images": case.picture("square.png")}
    ours = model.preprocessor.generate_preprocess(prompt)
    there = ours["padding_mask"].astype(bool)
    pixels = torch.as_tensor(ours["images"]).permute(0, 3, 1, 2)
    ids = torch.as_tensor(ours["token_ids"][there])[None].long()
    mask = torch.as_tensor(ours["vision_mask"][there])[None].long()
    with torch.no_grad():
        logits = theirs(input_ids=ids, pixel_values=pixels, token_type_ids=mask).logits.numpy()
    batch = {name: array[None] for name, array in ours.items()}
    found = to_numpy(model(batch))[:, : ids.shape[1]]
    np.testing.assert_allclose(found, logits, rtol=0, atol=tolerance("logits"))
    assert (directory / "processor_config.json").is_file()
