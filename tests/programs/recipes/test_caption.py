"""recipes/caption.py as a user runs it."""

import keras
import pytest
from launch import Process, jax_ranks, launch, torch_ranks

from kmodels.models import Gemma3ImageTextLM
from kmodels.weights import read_safetensors
from recipe_modules import check_killed_run, load, result

SMALL = ("--images", "1", "--batch-size", "4", "--answers", "2", "--held-out", "0.02")


@pytest.fixture(scope="module")
def recipe():
    return load("caption")


@pytest.mark.nightly
@pytest.mark.each_backend("nightly")
def test_a_resumed_run_ends_at_the_same_weights(recipe, tmp_path):
    whole = tmp_path / "whole"
    settings = [*SMALL, "--steps", "6", "--checkpoint-every", "3"]
    assert recipe.main([*settings, "--out", str(whole)]) == 0
    found = result(whole)
    assert {"loss", "val_loss", "exact_match"} <= set(found["metrics"])
    assert found["learnt_tokens_per_s"] > 0
    assert len(found["captions"]) == 2 and len(found["step_losses"]) == 6
    assert (whole / "predictions.png").is_file() and (whole / "model/config.json").is_file()
    check_killed_run(recipe, settings, whole, tmp_path / "parts", 5)


def test_lora_on_one_half(recipe, tmp_path):
    out = tmp_path / "lora"
    settings = (*SMALL, "--steps", "2", "--rank", "2", "--train", "vision")
    assert recipe.main([*settings, "--out", str(out)]) == 0
    names = read_safetensors(out / "adapter" / "adapter_model.safetensors")
    assert names and all("vision_tower" in name for name in names)
    assert result(out)["trainable_parameters"] < 0.2 * result(out)["parameters"]


def test_weights_and_data_go_together(recipe, tmp_path, capsys):
    assert recipe.main(["--data", str(tmp_path), "--out", str(tmp_path / "a")]) == 2
    assert "--weights and --data belong together" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.each_backend
@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="its processes do not train together"
)
def test_processes_that_hold_parts_leave_an_adapter(backend, tmp_path):
    """What needs all weights is left out in a line, and the adapter fits the base beside it."""
    out = tmp_path / "run"
    flags = [*SMALL, "--steps", "2", "--rank", "2", "--mesh", "fsdp=2", "--out", str(out)]
    ranks = torch_ranks(2) if backend == "torch" else jax_ranks(2, devices=1)
    said = launch([Process("kmodels", ["caption", *flags], ranks=ranks)], 300)[0].stdout
    found = result(out)
    assert len(found["step_losses"]) == 2
    assert "not merged: each process holds a part of the weights" in said
    assert not (out / "model").exists()
    # XLA gathers weights wherever a layer is called; FSDP2 within steps alone.
    answers = 0 if backend == "torch" else 2
    assert ("no answers: generate needs all weights" in said) == (backend == "torch")
    assert len(found["captions"]) == answers
    assert (
        ("exact_match" in found["metrics"]) == (out / "predictions.png").exists() == (answers > 0)
    )
    model = Gemma3ImageTextLM.from_preset(out / "base")
    model.load_adapter(out / "adapter")
    model.merge_lora()
