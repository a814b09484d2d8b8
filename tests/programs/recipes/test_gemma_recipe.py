"""recipes/gemma_lora.py as a user runs it: what it writes, how it resumes, what it says."""

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import run as run_command
from kmodels.lora import LoraSettings
from kmodels.models import (
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    Qwen3CausalLM,
    Qwen3CausalLMPreprocessor,
    ViTBackbone,
)
from kmodels.text import demo, read_records
from kmodels.tools.plan import Plan, Setup, recommend
from kmodels.tools.plan.estimate import FROZEN
from recipe_modules import check_same_run, load, result, stop_at, without_figures
from saved_models import language

EXTRA = "before after examples rows filled tokens_to_learn skipped cut"
# 18 records to learn, in 5 batches of 4, the last one filled up.
ARGUMENTS = ("--batch-size", "4", "--sequence-length", "96", "--loss-on", "responses", "--no-pack")
ADAPTERS = ("--rank", "2", "--targets", "query,value", "--alpha", "2")
ONCE = ("--epochs", "1", "--lora-dropout", "0.1", *ADAPTERS, "--log-every", "2")


@pytest.fixture(scope="module")
def recipe():
    return load("gemma_lora")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with a small Gemma and its tokenizer."""
    out = tmp_path_factory.mktemp("base") / "gemma"
    language(out)
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in demo.instructions().rows[:20]))
    return path


@pytest.fixture(scope="module")
def whole(recipe, base, data, tmp_path_factory):
    """An epoch that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    arguments = ["--weights", str(base), "--data", str(data), *ARGUMENTS, *ONCE]
    arguments += ["--samples", "1", "--sample-tokens", "3", "--export", "--out", str(out)]
    assert recipe.main(arguments) == 0
    return out


def test_a_run_leaves_its_files(whole):
    found = result(whole)
    assert set(found) >= {"recipe", "step_losses", "overrides", "weights_digest", *EXTRA.split()}
    assert (found["steps"], found["epochs"], len(found["step_losses"])) == (5, 1, 5)
    names = ("loss", "accuracy", "perplexity")
    assert set(found["metrics"]) == {*names, *(f"val_{name}" for name in names)}
    assert found["learnt_tokens_per_s"] > 0
    assert found["metrics"]["val_loss"] == pytest.approx(found["after"]["loss"], abs=1e-5)
    assert (found["examples"], found["rows"], found["skipped"]) == (18, 18, 0)
    # Two layers, query 32 -> 32 and value 32 -> 16.
    assert found["trainable_parameters"] == 2 * 2 * (32 + 32 + 32 + 16)
    assert found["after"]["loss"] != found["before"]["loss"]
    assert len(found["before"]["answers"]) == len(found["after"]["answers"]) == 1
    assert found["samples"][0]["after"] == found["after"]["answers"][0]
    for name in ("config.json", "history.csv", "curves.png", "report.html"):
        assert (whole / name).stat().st_size > 100, name
    names = {path.name for path in (whole / "transformers").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_adapter_and_merged_model_are_the_same(whole, base):
    inputs = {"token_ids": np.arange(3, 19)[None], "padding_mask": np.ones((1, 16), "int32")}
    merged = GemmaCausalLM.from_preset(whole / "model")
    adapted = GemmaCausalLM.from_preset(base)
    first = np.asarray(adapted.predict(inputs, verbose=0))
    adapted.load_adapter(whole / "adapter")
    second = np.asarray(adapted.predict(inputs, verbose=0))
    assert np.abs(second - first).max() > 1e-4
    assert np.allclose(merged.predict(inputs, verbose=0), second, atol=1e-4)
    assert merged.preprocessor.loss_on == "responses"
    assert merged.preprocessor("a b")[1].shape == (96,)


@pytest.mark.each_backend("nightly")
def test_a_cut_run_goes_on_bit_by_bit(recipe, whole, base, data, tmp_path, monkeypatch, capsys):
    stop_at(monkeypatch, 3)
    arguments = ["--weights", str(base), "--data", str(data), *ARGUMENTS, *ONCE, "--samples", "0"]
    assert recipe.main([*arguments, "--out", str(tmp_path)]) == 143
    assert "stopped at step 3 by signal 15; continue with --resume" in capsys.readouterr().err
    assert recipe.main(["--resume", "--out", str(tmp_path)]) == 0
    check_same_run(tmp_path, whole)


def test_a_qwen_3_is_trained_too(recipe, references, data, tmp_path):
    text = Qwen3CausalLMPreprocessor.from_preset(references / "qwen3" / "tokenizer")
    qwen = Qwen3CausalLM.from_preset("qwen3_debug", preprocessor=text)
    base = qwen.save_to_preset(tmp_path / "qwen")
    run = ["--weights", str(base), "--data", str(data), "--steps", "2", "--samples", "1"]
    assert recipe.main([*run, *ARGUMENTS, "--out", str(tmp_path / "run")]) == 0
    assert "Qwen3" in (tmp_path / "run/model/config.json").read_text()
    losses = result(tmp_path / "run")["step_losses"]
    assert len(losses) == 2 and losses[1] != losses[0]


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
# Each flag at least once, in as few runs as tell them apart: quantised bases are not merged, DoRA
# and rsLoRA scale in their own ways, and rows are packed with either template.
COMBINATIONS = {
    "int8": "--quantize int8 --remat block --rslora --template gemma --pack",
    "nf4": "--quantize nf4 --alpha 8 --precision bfloat16 --remat attention --no-pack",
    "dora": "--dora --loss-on responses --pack --accumulate 2 --export",
}


def test_settings_follow_data_and_model(recipe, base, data, tmp_path, capsys):
    run = ["--weights", str(base), "--data", str(data), "--steps", "1", "--samples", "0"]
    assert recipe.main([*run, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    config = json.loads((tmp_path / "run/config.json").read_text())
    wanted = {"loss_on": "responses", "pack": True, "precision": "float32", "learning_rate": 0.013}
    assert config.items() >= wanted.items()
    text = GemmaCausalLMPreprocessor.from_preset(base)
    trained = recipe.split(read_records(data).rows, 0.1, 0)[0]
    lengths = [len(example.ids) - 1 for example in text.encode(trained, 10_000)]
    row = config["sequence_length"]
    assert row % 16 == 0 and row - 16 < np.percentile(lengths, 99) <= row
    assert "--pack" in said and "by the width 32" in said

    plan = ["plan", "--recommend", "--weights", str(base), "--data", str(data), "--json"]
    assert run_command(*plan, "--rank", "2", "--batch-size", "4") == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["settings"]}
    assert {name: rows[name]["value"] for name in wanted} == wanted and rows["rank"]["value"] == 2
    assert all(row["reason"] for row in rows.values()) and rows["targets"]["bytes"] > 0
    assert found["batch_size"] == 4 and found["peak_bytes"] > 0
    assert run_command(*plan[:-1]) == 0
    assert "--sequence-length" in capsys.readouterr().out
    for wrong in (["--mesh", "data=2"], ["--generate", "9"]):
        assert run_command(*plan, *wrong) == 2
        assert f"{wrong[0]} has no effect with --recommend" in capsys.readouterr().err
    assert run_command("plan", "--weights", base, "--data", data) == 2
    assert "--recommend and --data FILE belong together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "loss_on", "reason"),
    [
        ([{"text": "a b c"}, {"instruction": "a", "response": "b"}], "all", "without a response"),
        ([{"messages": CHAT}, {"prompts": "a", "responses": "b"}], "responses", "not learnt"),
    ],
)
def test_the_loss_follows_the_records(recipe, base, records, loss_on, reason):
    text = GemmaCausalLMPreprocessor.from_preset(base)
    choices = {c.name: c for c in recommend.chosen(recipe.Settings(), records, text)}
    assert choices["loss_on"].value == loss_on and reason in choices["loss_on"].reason


def test_all_tokens_are_learnt_if_replies_cannot_be_told_apart(recipe, base):
    text = GemmaCausalLMPreprocessor.from_preset(base)
    turn = "{% filter upper %}{% generation %}{{ m.content }}{% endgeneration %}{% endfilter %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    text.tokenizer.settings = {**text.tokenizer.settings, "chat_template": template}
    choices = recommend.chosen(recipe.Settings(), [{"messages": CHAT}], text)
    assert choices[1][:2] == ("loss_on", "all") and "take it out of filters" in choices[1].reason


@pytest.mark.parametrize("name", COMBINATIONS)
def test_flags_together(recipe, base, data, tmp_path, name):
    flags = COMBINATIONS[name].split()
    out = tmp_path / "out"
    common = ["--data", str(data), "--batch-size", "2", "--sequence-length", "192", "--rank", "2"]
    common += ["--learning-rate", "2e-2", "--schedule", "constant", "--samples", "0"]
    run = ["--weights", str(base), *common, *flags, "--out", str(out)]
    with without_figures():
        assert recipe.main([*run, "--steps", "4"]) == 0
    found = result(out)
    assert all(np.isfinite(found["step_losses"])) and len(found["step_losses"]) == 4
    assert found["after"]["loss"] < found["before"]["loss"]
    assert (found["rows"] < found["examples"]) == ("--pack" in flags)
    assert found["precision"] == ("bfloat16" if "bfloat16" in flags else "float32")
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert (out / "model").exists() == ("--quantize" not in flags)
    assert (out / "transformers").exists() == ("--export" in flags)


@pytest.mark.needs("gguf")
def test_kernels_of_a_gguf_file_stay_quantized(recipe, base, data, tmp_path, capsys):
    file = GemmaCausalLM.from_preset(base).export_to_gguf(tmp_path / "it.gguf", "q8_0")
    run = ["--weights", str(file), "--data", str(data), "--quantized", "--steps", "2"]
    run += ["--batch-size", "2", "--rank", "2", "--learning-rate", "2e-2", "--samples", "0"]
    assert recipe.main([*run, "--out", str(tmp_path / "out")]) == 0
    found = result(tmp_path / "out")
    assert all(np.isfinite(found["step_losses"])) and not (tmp_path / "out/model").exists()
    said = " ".join(capsys.readouterr().out.split())
    assert "not merged: the base is quantized; load it with the adapter and call" in said
    whole = GemmaCausalLM.from_preset(file, quantized=True)
    whole.load_adapter(tmp_path / "out/adapter")
    whole.merge_lora(onto="dequantized")
    planned = Plan(str(file), Setup(2, 16, lora=LoraSettings(2)), overrides={"quantized": True})
    floats = Plan(str(file), Setup(2, 16, lora=LoraSettings(2)))
    assert 0 < planned.estimate.part(FROZEN) < floats.estimate.part(FROZEN)


def test_memory_that_is_not_there_is_told_before_anything_is_built(
    recipe, base, data, tmp_path, capsys, monkeypatch
):
    from kmodels.core import runtime

    monkeypatch.setattr(runtime, "available_bytes", lambda: 2**20)
    run = ["--weights", str(base), "--data", str(data), "--out", str(tmp_path / "out")]
    assert recipe.main([*run, "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in (
        "a step needs about",
        "1.0 MiB are available",
        "--batch-size 4 saves",
        "--ignore-memory-check",
    ):
        assert part in error, error
    assert recipe.main([*run, "--steps", "1", "--samples", "0", "--ignore-memory-check"]) == 0


def test_the_demonstration_says_what_it_is(recipe, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KMODELS_SMALL", "1")
    monkeypatch.setattr(recipe, "DEMO", {"hidden_dim": 32})
    bad = tmp_path / "data.jsonl"
    bad.write_text(data.read_text() + "not JSON\n")
    arguments = ["--data", str(bad), "--skip-bad", "--pack", "--first-steps", "1", "--steps", "1"]
    arguments += ["--sequence-length", "128", "--samples", "0"]
    assert recipe.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "demonstration: trains a small Gemma here, without Google's weights"
    assert "skipped 1 bad lines, the first: " in " ".join(" ".join(lines).split())
    found = result(tmp_path / "out")
    assert found["skipped"] == 1 and found["rows"] < found["examples"] == 18


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--held-out", "1"], "--held-out is 1.0; give at least 0, below 1"),
        (["--loss-on", "prompts"], "Invalid value for '--loss-on': 'prompts' is not one of"),
        (
            ["--data", "one.jsonl"],
            "the data has 1 record; give at least 2, one of them to hold out",
        ),
        (["--sequence-length", "1"], "sequence_length is 1; give a whole number from 2 on"),
        (["--rank", "0"], "LoRA rank is 0; give a whole number from 1"),
        (["--targets", "query,keys"], "LoRA target 'keys' is not a linear layer of this model"),
        (["--weights", "no/such"], "there is no file or directory no/such"),
        (
            ["--weights", "vit"],
            "vit holds a ViTBackbone, which writes no text; give a Gemma, a Llama 3 or",
        ),
        (["--samples", "-1"], "--samples is -1; give at least 0"),
        (["--data", "text.jsonl"], "text.jsonl line 2: not JSON at column 1"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    recipe, base, data, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    good = json.dumps({"instruction": "a", "response": "b"}) + "\n"
    Path("one.jsonl").write_text(good)
    if "vit" in arguments:
        ViTBackbone.from_preset("vit_debug").save_to_preset("vit")
    Path("text.jsonl").write_text(good + "no object\n")
    given = {"--weights": str(base), "--data": str(data), "--samples": "0", "--out": "out"}
    given |= {arguments[0]: arguments[1]}
    assert recipe.main([part for pair in given.items() for part in pair]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert message in error
