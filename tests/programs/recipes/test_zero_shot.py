"""recipes/zero_shot.py as a user runs it: both towers on captions, classes by their names."""

import json

import numpy as np
import pytest

from kmodels.models import ImageTextSimilarity
from recipe_modules import load

SMALL = ("--data", "digits", "--batch-size", "16")


@pytest.fixture(scope="module")
def recipe():
    return load("zero_shot")


@pytest.mark.parametrize(
    "preset",
    ["clip_micro_patch7_28", pytest.param("siglip_micro_patch7_28", marks=pytest.mark.once)],
)
def test_it_learns_digits_by_their_names(recipe, tmp_path, preset):
    out = tmp_path / "run"
    arguments = [*SMALL, "--preset", preset, "--epochs", "2"]
    assert recipe.main([*arguments, "--out", str(out)]) == 0
    found = json.loads((out / "result.json").read_text())
    losses = found["step_losses"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    metrics = found["metrics"]
    # The sigmoid loss begins far from where it tells classes apart, and these are few steps.
    least = 0.5 if preset.startswith("clip") else 0.0
    assert metrics["test_accuracy"] > least <= metrics["test_accuracy_of_one_template"]
    model = ImageTextSimilarity.from_preset(out / "model")
    logits = model.classify(np.zeros((2, 8, 8, 1), "uint8"), ["1", "2"], recipe.TEMPLATES)
    assert logits.shape == (2, 2) and found["parameters"] == model.count_params()
    assert recipe.main([*arguments, "--out", str(out), "--evaluate"]) == 0
    again = json.loads((out / "evaluation.json").read_text())["metrics"]
    assert again["test_accuracy"] == pytest.approx(metrics["test_accuracy"], abs=1e-6)


def test_another_preset_is_refused(recipe, tmp_path, capsys):
    arguments = ["--preset", "vit_debug", "--out", str(tmp_path / "run")]
    assert recipe.main(arguments) == 2
    assert "--preset is vit_debug; give the name of two towers" in capsys.readouterr().err
