"""Programs that people write with a Gemma 4, each as it stands in transformers or keras-hub."""

import warnings

import keras
import numpy as np
import pytest

import gemma4_tokenizer
from arrays import to_numpy
from command_line import run
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.models.gemma.presets import PRESETS
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


def test_load_generate_and_answer_by_the_chat_template(directory):
    model = GemmaCausalLM.from_preset(directory)
    found = model.generate(["the cat", "What is"], max_length=16)
    assert [text[:7] for text in found] == ["the cat", "What is"]
    tokenizer = model.preprocessor.tokenizer
    given = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    ids = np.array([given["input_ids"]], "int32")
    answer = model.generate({"token_ids": ids, "padding_mask": np.ones_like(ids)}, max_new_tokens=5)
    said = answer["token_ids"][0, ids.shape[1] :][answer["padding_mask"][0, ids.shape[1] :] > 0]
    assert model.chat(CHAT, max_new_tokens=5) == tokenizer.detokenize(said).strip()


@pytest.mark.each_backend("nightly")
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


def test_what_the_tools_say_of_it(directory, capsys):
    for command in (
        ["plan", "--preset", "gemma4_e2b", "--batch-size", "1", "--sequence-length", "64"],
        ["plan", "--preset", str(directory), "--batch-size", "1", "--sequence-length", "32"],
        ["gemma", "--preset", str(directory), "--help"],
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not run(*command), command
    shown = capsys.readouterr().out
    assert "per_layer" in shown or "GiB" in shown
