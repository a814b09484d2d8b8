"""Programs that people write with a Gemma that sees, each as it stands in transformers."""

import json
from importlib import import_module
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import gemma3_processor_case
import gemma4_vision_case
from arrays import to_numpy
from kmodels import models
from kmodels.models.gemma4_vision.presets import PRESETS as PRESETS4
from kmodels.models.gemma_vision.presets import PRESETS as PRESETS3
from kmodels.text import read_records
from tolerances import tolerance

DEBUG = PRESETS3["gemma3_vision_debug"]
OWN_LAYERS = {"num_layers": 2, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
# Gemma 3, and Gemma 4 in the form of 12B and in that of E2B: the prefix of its classes, the folder
# of its processor, its sizes, the mark of an image, tokens in a row, two pictures.
KINDS = {
    "gemma3": (
        *("Gemma3", "model"),
        {**DEBUG, "vision_encoder": {**DEBUG["vision_encoder"], "image_size": 20, "patch_size": 5}},
        *("<start_of_image>", 48, ("square.png", "wide2.png")),
    ),
    "gemma4_unified": (
        *("Gemma4", "unified", {**PRESETS4["gemma4_unified_debug"], "num_layers": 2}),
        *("<|image|>", 160, ("wide.jpg", "tall.png")),
    ),
    "gemma4": (
        *("Gemma4", "model", {**PRESETS4["gemma4_vision_debug"], **OWN_LAYERS}),
        *("<|image|>", 160, ("square.png", "thread.png")),
    ),
}
ONE_OF_EACH = [pytest.param("gemma3", marks=pytest.mark.each_backend), "gemma4"]


@pytest.fixture(scope="module")
def kind(request, references, tmp_path_factory):
    """A directory of Hugging Face with weights, tokenizer and processor, and how it is used."""
    name, form, sizes, mark, length, pictures = KINDS[request.param]
    cases = gemma3_processor_case if name == "Gemma3" else gemma4_vision_case
    case = cases.ProcessorCase(references)
    task = getattr(models, f"{name}ImageTextLM")
    processor = getattr(models, f"{name}ImageTextLMPreprocessor")
    text = processor.from_preset(case.folder / form, sequence_length=length)
    keras.utils.set_random_seed(0)
    given = {
        **sizes,
        "vocabulary_size": text.tokenizer.vocabulary_size(),
        "image_token_id": text.image_token_id,
    }
    backbone = getattr(models, f"{name}ImageTextBackbone")(**given)
    directory = tmp_path_factory.mktemp("made") / request.param
    task(backbone, text).export_to_transformers(directory)

    def read():
        model = task.from_preset(directory)
        model.preprocessor.sequence_length = length
        return model

    return SimpleNamespace(
        name=name,
        mark=mark,
        length=length,
        directory=directory,
        read=read,
        pictures=[case.picture(picture) for picture in pictures],
        from_preset=task.from_preset,
    )


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_describe_pictures_and_chat_about_them(kind):
    model, (first, second) = kind.read(), kind.pictures
    prompt = {"prompts": f"What is {kind.mark}?", "images": str(first)}
    assert isinstance(model.generate(prompt, max_length=100), str)
    several = {"prompts": [f"a {kind.mark}", "no picture"], "images": [[second], []]}
    assert len(model.generate(several, max_length=100)) == 2

    content = [{"type": "image", "path": str(picture)} for picture in kind.pictures]
    content += [{"type": "text", "text": "What differs?"}]
    chat = [{"role": "user", "content": content}]
    reply = model.chat(chat, max_new_tokens=4)
    assert isinstance(reply, str)
    assert model.chat([chat, chat], max_new_tokens=4) == [reply, reply]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"], indirect=True)
def test_lora_on_a_folder_of_captions(kind, tmp_path):
    lines = []
    for picture, text in zip(kind.pictures, ("a square", "another one"), strict=True):
        (tmp_path / picture.name).write_bytes(picture.read_bytes())
        lines.append(json.dumps({"file_name": picture.name, "text": text}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    model = kind.read()
    model.enable_lora(rank=2, targets="all-linear")
    model.compile(keras.optimizers.Adam(2e-2))
    records = read_records(tmp_path).rows
    losses = model.fit(records, batch_size=2, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save_adapter(tmp_path / "adapter")
    again = kind.read()
    inputs = again.preprocessor.generate_preprocess(records)
    plain = again.predict(inputs, verbose=0)
    again.load_adapter(tmp_path / "adapter")
    found = again.predict(inputs, verbose=0)
    np.testing.assert_array_equal(found, model.predict(inputs, verbose=0))
    assert np.abs(found - plain).max() > tolerance("logits")


@pytest.mark.parametrize("kind", ONE_OF_EACH, indirect=True)
def test_train_the_text_and_not_the_tower_and_go_on_from_a_preset(kind, tmp_path):
    model = kind.read()
    model.backbone.vision_encoder.trainable = False
    record = {"prompts": kind.mark, "responses": "x", "images": kind.pictures[0]}
    tower = [to_numpy(w).copy() for w in model.backbone.vision_encoder.weights]
    model.fit([record] * 2, batch_size=2, epochs=1, verbose=0)
    for weight, held in zip(model.backbone.vision_encoder.weights, tower, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), held)
    model.save_to_preset(tmp_path / "own")
    again = kind.from_preset(tmp_path / "own")
    inputs = again.preprocessor.generate_preprocess(record)
    batch = {name: array[None] for name, array in inputs.items()}
    found = again.predict(batch, verbose=0)
    np.testing.assert_array_equal(found, model.predict(batch, verbose=0))
    assert again.generate(record, max_length=80) == model.generate(record, max_length=80)


@pytest.mark.across("torch")
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_the_export_is_a_directory_of_transformers(kind):
    torch = import_module("torch")
    import_module("torchvision_cpu").define_torchvision_operators()
    transformers = import_module("transformers")
    model = kind.read()
    eager = {"attn_implementation": "eager"} if kind.name == "Gemma4" else {}
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(kind.directory, **eager)
    prompt = {"prompts": f"What is {kind.mark}?", "images": kind.pictures[0]}
    ours = model.preprocessor.generate_preprocess(prompt)
    there = ours["padding_mask"].astype(bool)
    ids = torch.as_tensor(ours["token_ids"][there])[None].long()
    images_at = torch.as_tensor(ours["vision_mask"][there])[None].long()
    if kind.name == "Gemma3":
        given = {
            "input_ids": ids,
            "token_type_ids": images_at,
            "pixel_values": torch.as_tensor(ours["images"]).permute(0, 3, 1, 2),
        }
    else:
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": images_at,
            "pixel_values": torch.as_tensor(ours["pixel_values"]),
            "image_position_ids": torch.as_tensor(ours["pixel_position_ids"]).long(),
        }
        given = import_module("references.gemma4_vision").masked(theirs, given)
    with torch.no_grad():
        logits = theirs(**given).logits.numpy()
    found = to_numpy(model({name: array[None] for name, array in ours.items()}))
    np.testing.assert_allclose(found[:, : ids.shape[1]], logits, rtol=0, atol=tolerance("logits"))
    assert (kind.directory / "processor_config.json").is_file()
