"""Programs that people write with a Gemma 4, each as it stands in transformers or keras-hub."""

import warnings
from importlib import import_module

import keras
import numpy as np
import pytest

import gemma4_tokenizer
from arrays import to_numpy
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.models.gemma.presets import PRESETS
from kmodels.tools.cli import main
from tolerances import tolerance

CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
TEACHING = {"messages": [*CHAT, {"role": "assistant", "content": "It is 4."}]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory of Hugging Face with a tokenizer and a chat template."""
    text = tmp_path_factory.mktemp("text")
    gemma4_tokenizer.write(text)
    text = GemmaCausalLMPreprocessor(text, sequence_length=48)
    size = text.tokenizer.vocabulary_size()
    keras.utils.set_random_seed(0)
    backbone = GemmaBackbone(**{**PRESETS["gemma4_debug"], "vocabulary_size": size})
    made = tmp_path_factory.mktemp("made") / "gemma-4"
    GemmaCausalLM(backbone, text).export_to_transformers(made)
    return made


def test_load_and_generate(directory):
    model = GemmaCausalLM.from_preset(directory)
    found = model.generate(["the cat", "What is"], max_length=16)
    assert [text[:7] for text in found] == ["the cat", "What is"]


def test_apply_chat_template_and_answer(directory):
    model = GemmaCausalLM.from_preset(directory)
    tokenizer = model.preprocessor.tokenizer
    given = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    ids = np.array([given["input_ids"]], "int32")
    answer = model.generate({"token_ids": ids, "padding_mask": np.ones_like(ids)}, max_new_tokens=5)
    reply = tokenizer.detokenize(
        answer["token_ids"][0, ids.shape[1] :][answer["padding_mask"][0, ids.shape[1] :] > 0]
    )
    assert model.chat(CHAT, max_new_tokens=5) == reply.strip()


def test_lora_on_chats_and_an_adapter_of_peft(directory, tmp_path):
    model = GemmaCausalLM.from_preset(directory)
    model.enable_lora(rank=2, targets=["query", "value", "gate", "up", "down", "input_gate"])
    model.preprocessor.loss_on = "responses"
    model.compile(keras.optimizers.Adam(3e-2))
    losses = model.fit([TEACHING] * 4, batch_size=4, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save_adapter(tmp_path)
    again = GemmaCausalLM.from_preset(directory)
    ids = np.arange(3, 19, dtype="int32")[None]
    before = to_numpy(again(ids))
    again.load_adapter(tmp_path)
    np.testing.assert_array_equal(to_numpy(again(ids)), to_numpy(model(ids)))
    assert np.abs(to_numpy(model(ids)) - before).max() > tolerance("logits")


@pytest.mark.across("torch")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_the_adapter(directory, tmp_path):
    model = GemmaCausalLM.from_preset(directory)
    model.enable_lora(rank=2, targets=["query", "value", "input_gate"])
    for i, weight in enumerate(model.trainable_weights):
        weight.assign(np.random.default_rng(i).normal(size=weight.shape) * 0.3)
    model.save_adapter(tmp_path)
    import torch

    import_module("torchvision_cpu").define_torchvision_operators()
    transformers, peft = import_module("transformers"), import_module("peft")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    ids = np.arange(3, 19)[None]
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)).logits.numpy()
    found = to_numpy(model(ids.astype("int32")))
    limit = tolerance("logits") * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)


@pytest.mark.needs("gguf")
def test_convert_to_gguf_and_chat_with_the_file(directory, tmp_path):
    model = GemmaCausalLM.from_preset(directory)
    model.export_to_gguf(tmp_path / "it.gguf", dtype="float32")
    again = GemmaCausalLM.from_preset(tmp_path / "it.gguf")
    assert again.chat(CHAT, max_new_tokens=5) == model.chat(CHAT, max_new_tokens=5)


@pytest.mark.needs("keras_hub")
@pytest.mark.across("torch", "jax", "tensorflow")
def test_a_preset_of_keras_hub(directory, tmp_path):
    interop = import_module("kmodels.interop.keras_hub")
    model = GemmaCausalLM.from_preset(directory)
    interop.to_hub(model, preprocessor=False).save_to_preset(str(tmp_path / "hub"))
    again = interop.from_hub(tmp_path / "hub")
    for left, right in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right))


def test_what_the_tools_say_of_it(directory, capsys):
    for command in (
        ["plan", "--preset", "gemma4_e2b", "--batch-size", "1", "--sequence-length", "64"],
        ["plan", "--preset", str(directory), "--batch-size", "1", "--sequence-length", "32"],
        ["gemma", "--preset", str(directory), "--help"],
    ):
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
            warnings.simplefilter("error")
            main(command)
        assert not stop.value.code, command
    shown = capsys.readouterr().out
    assert "per_layer" in shown or "GiB" in shown
