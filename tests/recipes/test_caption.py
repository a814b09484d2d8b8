"""recipes/caption.py as a user runs it."""

import json

import pytest

from kmodels.weights import read_safetensors
from recipe_modules import load

SMALL = ("--images", "1", "--batch-size", "16", "--answers", "8", "--held-out", "0.2")


@pytest.fixture(scope="module")
def recipe():
    return load("caption")


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_resumed_run_ends_at_the_same_weights(recipe, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = (*SMALL, "--steps", "6", "--checkpoint-every", "3")
    assert recipe.main([*settings, "--out", str(whole)]) == 0
    found = result(whole)
    assert {"loss", "val_loss", "exact_match"} <= set(found["metrics"])
    assert len(found["captions"]) == 8 and len(found["step_losses"]) == 6
    assert (whole / "predictions.png").is_file() and (whole / "model/config.json").is_file()
    assert (
        recipe.main([*SMALL, "--steps", "6", "--checkpoint-every", "3", "--out", str(parts)]) == 0
    )
    for name in ("result.json", "history.csv"):
        (parts / name).unlink()
    newest = sorted((parts / "checkpoints").iterdir())[-1]
    for file in sorted(newest.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    newest.rmdir()
    assert recipe.main([*settings, "--out", str(parts), "--resume"]) == 0
    assert result(parts)["weights_digest"] == found["weights_digest"]


@pytest.mark.once
def test_lora_on_one_half(recipe, tmp_path):
    out = tmp_path / "lora"
    settings = (*SMALL, "--steps", "2", "--rank", "2", "--train", "vision")
    assert recipe.main([*settings, "--out", str(out)]) == 0
    names = read_safetensors(out / "adapter" / "adapter_model.safetensors")
    assert names and all("vision_tower" in name for name in names)
    assert result(out)["trainable_parameters"] < 0.2 * result(out)["parameters"]


@pytest.mark.once
def test_weights_and_data_go_together(recipe, tmp_path, capsys):
    assert recipe.main(["--data", str(tmp_path), "--out", str(tmp_path / "a")]) == 2
    assert "--weights and --data go together" in capsys.readouterr().err
