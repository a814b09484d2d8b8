"""What a directory of Gemma holds besides text weights: kept, refused, or named."""

import json
import logging
import shutil

import keras
import numpy as np
import pytest

from kmodels.generation import Sampler
from kmodels.interop.keras_hub import to_hub
from kmodels.models import Gemma3CausalLM, GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.text import Tokenizer, demo
from kmodels.text.training import train_tokenizer
from kmodels.tools.cli import main
from kmodels.tools.convert import convert
from kmodels.weights import read_safetensors, write_safetensors
from refusals import refused

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
)
SETTINGS = {
    "add_bos_token": True,
    "bos_token": {"content": "<bos>", "lstrip": False, "special": True},
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "padding_side": "left",
    "model_max_length": 77,
    "sp_model_kwargs": None,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
GENERATION = {"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 9]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory as transformers writes it, with everything that may lie in one."""
    tokenizer = train_tokenizer(demo.texts(), 500)
    model = GemmaCausalLM.from_preset(
        "gemma3_debug",
        vocabulary_size=500,
        preprocessor=GemmaCausalLMPreprocessor(tokenizer, sequence_length=12),
    )
    folder = model.export_to_transformers(tmp_path_factory.mktemp("written") / "theirs")
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 8}))
    return folder


@pytest.fixture
def directory(written, tmp_path):
    """A copy of it, for a test to change."""
    return shutil.copytree(written, tmp_path / "theirs")


@pytest.fixture
def with_pictures(directory):
    """The same with a vision tower, as Gemma3ForConditionalGeneration has it."""
    text = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "language_model.model.", 1): tensor
        for name, tensor in read_safetensors(directory).items()
    }
    first = next(iter(tensors.values()))
    for name in ("vision_tower.patch", "multi_modal_projector", "language_model.lm_head"):
        tensors[f"{name}.weight"] = first
    write_safetensors(directory / "new", tensors)
    (directory / "new").replace(directory / "model.safetensors")
    return directory


def test_settings_and_stop_tokens_survive_loading_saving_and_exporting(directory, tmp_path):
    model = GemmaCausalLM.from_preset(directory)
    model.save_to_preset(tmp_path / "ours")
    again = GemmaCausalLM.from_preset(tmp_path / "ours")
    exported = again.export_to_transformers(tmp_path / "exported")
    found = json.loads((exported / "tokenizer_config.json").read_text())
    assert found.items() >= {**SETTINGS, "chat_template": TEMPLATE}.items()
    assert json.loads((exported / "generation_config.json").read_text()) == GENERATION
    again.save(tmp_path / "task.keras")
    held = keras.models.load_model(tmp_path / "task.keras")
    assert held.generation_config == again.generation_config == GENERATION
    tokenizers = [one.preprocessor.tokenizer for one in (model, again, held)]
    assert tokenizers[1].settings == tokenizers[2].settings
    tokenizers.append(Tokenizer.from_dict(tokenizers[0].to_dict()))
    for folder in ("ours", "exported"):
        tokenizers.append(GemmaCausalLMPreprocessor.from_preset(tmp_path / folder).tokenizer)
    # <eos>, <end_of_turn>, config.json, generation_config.json
    assert all(set(tokenizer.stop_token_ids) == {1, 5, 8, 9} for tokenizer in tokenizers)


def test_a_stop_token_of_the_generation_config_ends_a_text(directory):
    model = GemmaCausalLM.from_preset(directory)
    told = model.generate("the cat", max_length=12, stop_token_ids=None, strip_prompt=True)
    prompt = model.preprocessor.tokenizer.encode("the cat")
    ids = {"token_ids": [prompt], "padding_mask": [[1] * len(prompt)]}
    whole = model.generate(ids, max_length=12, stop_token_ids=None)["token_ids"][0]
    first = int(whole[len(prompt)])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    model = GemmaCausalLM.from_preset(directory)
    ended = model.generate("the cat", max_length=12, strip_prompt=True)
    assert ended == model.preprocessor.tokenizer.detokenize([first]) != told


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", json.dumps({**SETTINGS, "chat_template": TEMPLATE})),
        ("chat_template.jinja", TEMPLATE),
        ("chat_template.json", json.dumps({"chat_template": TEMPLATE})),
    ],
)
def test_a_chat_template_from_each_of_its_places(directory, tmp_path, name, content):
    (directory / "chat_template.jinja").unlink()
    (directory / name).write_text(content)
    tokenizer = Tokenizer.from_file(directory)
    chat = [{"role": "user", "content": "Hi"}]
    tokenizer.save(tmp_path / "saved")
    for one in (tokenizer, Tokenizer.from_file(tmp_path / "saved")):
        assert one.apply_chat_template(chat, tokenize=False) == "<bos>[user] Hi\n"
        assert one.apply_chat_template([chat, chat]) == [one.encode("[user] Hi\n")] * 2


def test_several_chat_templates_by_name(directory, tmp_path):
    more = directory / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools | tojson }}")
    tokenizer = Tokenizer.from_file(directory)
    tokenizer.save(tmp_path / "saved")
    for one in (tokenizer, Tokenizer.from_file(tmp_path / "saved")):
        assert one.chat_template == {"default": TEMPLATE, "tool_use": "{{ tools | tojson }}"}
        text = one.apply_chat_template([{"role": "user"}], tokenize=False, tools=[{"a": "é"}])
        assert text == '[{"a": "é"}]'
    chat = [{"role": "user"}]
    for template, message in (
        ({"tool_use": "a"}, "there are chat templates tool_use: choose with"),
        (None, "the tokenizer has no chat template; give one"),
    ):
        tokenizer.chat_template = template
        refused(message, tokenizer.apply_chat_template, chat)
    for damaged in ("{% if %}", "{{ raise_exception('two users') }}"):
        message = "the chat template cannot write this chat"
        refused(message, tokenizer.apply_chat_template, chat, chat_template=damaged)


def test_a_vision_tower_is_named_and_not_exported_as_if_whole(written, with_pictures, tmp_path):
    match = "vision_tower, multi_modal_projector of the checkpoint are left out; the model takes"
    with pytest.warns(UserWarning, match=match):
        model = Gemma3CausalLM.from_preset(with_pictures)
    model.save_to_preset(tmp_path / "ours")
    model.save(tmp_path / "task.keras")
    held = keras.models.load_model(tmp_path / "task.keras")
    again = Gemma3CausalLM.from_preset(tmp_path / "ours")  # which was said before
    message = "multi_modal_projector were left out when it was read, so .* give text_only=True"
    for one in (model, again, held, model.backbone):
        refused(message, one.export_to_transformers, tmp_path / "exported")
    refused(message, again.export_to_gguf, tmp_path / "model.gguf")
    refused(message, convert, again, tmp_path / "exported", "hf")
    refused(message, to_hub, again)
    assert not (tmp_path / "exported").exists()
    again.export_to_transformers(tmp_path / "exported", text_only=True)
    text = Gemma3CausalLM.from_preset(tmp_path / "exported")
    whole = GemmaCausalLM.from_preset(written)
    ids = {"token_ids": np.array([[2, 40, 41]]), "padding_mask": np.ones((1, 3))}
    for one in (text, whole):
        np.testing.assert_array_equal(one.predict(ids, verbose=0), model.predict(ids, verbose=0))


def test_what_the_generation_config_asks_for_is_said_and_can_be_had(directory, caplog):
    with caplog.at_level(logging.WARNING, "kmodels"):
        model = GemmaCausalLM.from_preset(directory)
    assert "generation_config.json asks for do_sample=True, top_k=64, top_p=0.95" in caplog.text
    assert model.generator.sampler.greedy
    model.compile(sampler="generation_config")
    assert model.generator.sampler == Sampler(1.0, top_k=64, top_p=0.95)
    model.generation_config = {"num_beams": 4}
    message = "json asks for num_beams=4, which no Sampler does; give"
    refused(message, model.compile, sampler="generation_config")
    # Settings that do nothing are not spoken of.
    caplog.clear()
    (directory / "generation_config.json").write_text('{"num_beams": 1, "top_p": 0.9}')
    with caplog.at_level(logging.WARNING, "kmodels"):
        model = GemmaCausalLM.from_preset(directory)
    assert not caplog.text
    model.compile(sampler="generation_config")
    assert model.generator.sampler.greedy


def test_a_directory_without_a_tokenizer_takes_ids_alone(directory):
    (directory / "tokenizer.json").unlink()
    model = GemmaCausalLM.from_preset(directory)
    assert model.preprocessor is None
    refused("the model has no preprocessor; give", model.generate, "the cat")
    message = r"holds no tokenizer: neither tokenizer.json nor"
    refused(message, GemmaCausalLMPreprocessor.from_preset, directory)


def test_a_tokenizer_of_another_vocabulary_is_refused(directory):
    train_tokenizer(demo.texts(), 600).save(directory)
    message = "the tokenizer has 600 tokens and the embedding table 500 rows; give the tokenizer of"
    refused(message, GemmaCausalLM.from_preset, directory)
    tokenizer = train_tokenizer(demo.texts(), 500)
    tokenizer.core.add_tokens(["<image_soft_token>"])  # as in Gemma 3, behind the last row
    tokenizer.save(directory)
    assert GemmaCausalLM.from_preset(directory).generate("the", max_length=4)


def test_a_damaged_tokenizer_file_is_one_line(written, tmp_path):
    folder = tmp_path / "copy"
    GemmaCausalLM.from_preset(written).save_to_preset(folder)
    file = folder / "tokenizer.json"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (None, bytes(flipped), whole[:-100]):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        for cls in (GemmaCausalLM, GemmaCausalLMPreprocessor):
            refused(r"copy is damaged: .*tokenizer.json", cls.from_preset, folder)
        assert GemmaCausalLM.from_preset(folder, preprocessor=None).preprocessor is None


def test_the_command_line_writes_the_text_part_when_told(with_pictures, tmp_path, capsys):
    command = ["convert", str(with_pictures), str(tmp_path / "text"), "--to", "hf"]
    for more, code in (([], 2), (["--text-only"], 0)):
        with pytest.warns(UserWarning, match="left out"), pytest.raises(SystemExit) as ended:
            main([*command, *more])
        assert ended.value.code in (code, code or None)
        assert (tmp_path / "text").exists() == bool(more)
    assert "give text_only=True if that is what you want" in capsys.readouterr().err
