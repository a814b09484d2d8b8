"""Programs that people write with a Gemma 4 that sees, each as it stands in transformers."""

import json
from importlib import import_module

import keras
import numpy as np
import pytest

from arrays import to_numpy
from gemma4_vision_case import ProcessorCase
from kmodels.models import Gemma4ImageTextBackbone, Gemma4ImageTextLM, Gemma4ImageTextLMPreprocessor
from kmodels.models.gemma4_vision.presets import PRESETS
from kmodels.text import read_records
from tolerances import tolerance

KINDS = {"unified": "gemma4_unified_debug", "model": "gemma4_vision_debug"}


@pytest.fixture(scope="module")
def case(references):
    return ProcessorCase(references)


@pytest.fixture(scope="module")
def directories(case, tmp_path_factory):
    """Directories of Hugging Face with weights, tokenizer and processor: 12B's form, and E2B's."""
    made = {}
    for form, preset in KINDS.items():
        text = Gemma4ImageTextLMPreprocessor.from_preset(case.folder / form, sequence_length=160)
        keras.utils.set_random_seed(0)
        sizes = {"vocabulary_size": text.tokenizer.vocabulary_size(), "num_layers": 2}
        if form == "model":
            sizes |= {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        backbone = Gemma4ImageTextBackbone(
            **{**PRESETS[preset], **sizes, "image_token_id": text.image_token_id}
        )
        made[form] = tmp_path_factory.mktemp("made") / f"gemma-4-{form}"
        Gemma4ImageTextLM(backbone, text).export_to_transformers(made[form])
    return made


def test_describe_pictures_of_any_shape(directories, case):
    model = Gemma4ImageTextLM.from_preset(directories["unified"])
    model.preprocessor.sequence_length = 160
    wide, tall = str(case.picture("wide.jpg")), case.picture("tall.png")
    found = model.generate({"prompts": "What is <|image|>?", "images": wide}, max_length=100)
    assert isinstance(found, str)
    several = model.generate(
        {"prompts": ["a <|image|>", "no picture"], "images": [[tall], []]}, max_length=100
    )
    assert len(several) == 2


def test_chat_about_two_pictures(directories, case):
    model = Gemma4ImageTextLM.from_preset(directories["model"])
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "image", "path": str(case.picture("square.png"))},
                {"type": "image", "path": str(case.picture("thread.png"))},
                {"type": "text", "text": "What differs?"},
            ],
        }
    ]
    reply = model.chat(chat, max_new_tokens=4)
    assert isinstance(reply, str)
    assert model.chat([chat, chat], max_new_tokens=4) == [reply, reply]


def test_lora_on_a_folder_of_captions(directories, case, tmp_path):
    lines = []
    for name, text in (("square.png", "a square"), ("wide.jpg", "a wide one")):
        (tmp_path / name).write_bytes(case.picture(name).read_bytes())
        lines.append(json.dumps({"file_name": name, "text": text}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    model = Gemma4ImageTextLM.from_preset(directories["model"])
    model.preprocessor.sequence_length = 160
    model.enable_lora(rank=2, targets="all-linear")
    model.compile(keras.optimizers.Adam(2e-2))
    records = read_records(tmp_path).rows
    losses = model.fit(records, batch_size=2, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save_adapter(tmp_path / "adapter")
    again = Gemma4ImageTextLM.from_preset(directories["model"])
    inputs = again.preprocessor.generate_preprocess(records, sequence_length=160)
    plain = again.predict(inputs, verbose=0)
    again.load_adapter(tmp_path / "adapter")
    found = again.predict(inputs, verbose=0)
    np.testing.assert_array_equal(found, model.predict(inputs, verbose=0))
    assert np.abs(found - plain).max() > tolerance("logits")


def test_train_the_text_and_not_the_tower_and_go_on_from_a_preset(directories, case, tmp_path):
    model = Gemma4ImageTextLM.from_preset(directories["model"])
    model.preprocessor.sequence_length = 160
    model.backbone.vision_encoder.trainable = False
    record = {"prompts": "<|image|>", "responses": "x", "images": case.picture("square.png")}
    tower = [to_numpy(w).copy() for w in model.backbone.vision_encoder.weights]
    model.fit([record] * 2, batch_size=2, epochs=1, verbose=0)
    for weight, held in zip(model.backbone.vision_encoder.weights, tower, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), held)
    model.save_to_preset(tmp_path / "own")
    again = Gemma4ImageTextLM.from_preset(tmp_path / "own")
    inputs = again.preprocessor.generate_preprocess(record)
    batch = {name: array[None] for name, array in inputs.items()}
    found = again.predict(batch, verbose=0)
    np.testing.assert_array_equal(found, model.predict(batch, verbose=0))
    assert again.generate(record, max_length=80) == model.generate(record, max_length=80)


@pytest.mark.across("torch")
@pytest.mark.parametrize("form", KINDS)
def test_the_export_is_a_directory_of_transformers(directories, case, form):
    torch = import_module("torch")
    import_module("torchvision_cpu").define_torchvision_operators()
    transformers = import_module("transformers")
    masked = import_module("references.gemma4_vision").masked
    model = Gemma4ImageTextLM.from_preset(directories[form])
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        directories[form], attn_implementation="eager"
    )
    prompt = {"prompts": "What is <|image|>?", "images": case.picture("wide.jpg")}
    ours = model.preprocessor.generate_preprocess(prompt, sequence_length=160)
    there = ours["padding_mask"].astype(bool)
    ids = torch.as_tensor(ours["token_ids"][there])[None].long()
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.as_tensor(ours["vision_mask"][there])[None].long(),
        "pixel_values": torch.as_tensor(ours["pixel_values"]),
        "image_position_ids": torch.as_tensor(ours["pixel_position_ids"]).long(),
    }
    with torch.no_grad():
        logits = theirs(**masked(theirs, given)).logits.numpy()
    batch = {name: array[None] for name, array in ours.items()}
    found = to_numpy(model(batch))[:, : ids.shape[1]]
    np.testing.assert_allclose(found, logits, rtol=0, atol=tolerance("logits"))
    assert (directories[form] / "processor_config.json").is_file()
