"""recipes/dino.py as a user runs it: what it writes, how it resumes, what comes after it."""

import json

import keras
import numpy as np

from kmodels.models import ViTImageClassifier
from recipe_modules import load, run_killed

# 48 images in batches of 8: epochs of 6 steps.
SMALL = (
    *("--preset", "vit_debug", "--data", "synthetic:48", "--batch-size", "8", "--steps", "8"),
    *("--epochs", "2", "--checkpoint-every", "2", "--local-views", "1", "--units", "16"),
    *("--hidden-dim", "8", "--neighbours", "3", "--probe-images", "20", "--flip"),
)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_run_and_one_that_was_killed_end_with_the_same_teacher(tmp_path, capsys):
    recipe, whole, cut = load("dino"), tmp_path / "whole", tmp_path / "cut"
    assert recipe.main([*SMALL, "--out", str(whole)]) == 0
    expected = result(whole)
    assert expected["steps"] == len(expected["step_losses"]) == 8
    ways = {f"{way}_{part}_accuracy" for way in ("knn", "linear") for part in ("val", "test")}
    assert {"loss", "entropy", "marginal_entropy", "divergence", *ways} < set(expected["metrics"])
    assert 0 < expected["metrics"]["entropy"] < 1
    model = ViTImageClassifier.from_preset(whole / "model", num_classes=3)
    assert model.preprocessor.image_size == (16, 16)
    assert "pretrained weights" in capsys.readouterr().out

    run_killed(recipe, [*SMALL, "--out", str(cut)], 5)
    keras.utils.set_random_seed(5)
    assert recipe.main(["--resume", "--out", str(cut)]) == 0
    found = result(cut)
    # Losses see student, teacher, center and temperature; the digest is the teacher's.
    assert found["step_losses"] == expected["step_losses"]
    assert found["weights_digest"] == expected["weights_digest"]
    assert found["metrics"] == expected["metrics"]
    assert np.std(expected["step_losses"]) > 1e-3
    assert recipe.main(["--evaluate", "--out", str(whole)]) == 0
    again = json.loads((whole / "evaluation.json").read_text())["metrics"]
    assert {name: again[name] for name in ways} == {
        name: expected["metrics"][name] for name in ways
    }


def test_what_cannot_be_is_said_in_one_line(tmp_path, capsys):
    assert load("dino").main([*SMALL, "--momentum", "1", "--out", str(tmp_path / "wrong")]) == 2
    assert "--momentum is 1.0; give at least 0, below 1" in capsys.readouterr().err
    arguments = [*SMALL, "--global-crop", "0.5", "--out", str(tmp_path / "other")]
    assert load("dino").main(arguments) == 2
    assert "--global-crop is '0.5'; give 2 numbers" in capsys.readouterr().err
