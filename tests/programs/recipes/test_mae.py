"""recipes/mae.py as a user runs it: what it writes, how it resumes, what comes after it."""

import json

import keras
import numpy as np
import pytest

from kmodels.models import ViTImageClassifier, ViTMAEForPreTraining
from recipe_modules import load, run_killed

# 96 images in batches of 16, 6 steps to an epoch: the masks of resumed steps count.
SMALL = (
    *("--preset", "vit_debug", "--patch-size", "4", "--data", "synthetic:96"),
    *("--batch-size", "16", "--steps", "9", "--epochs", "2", "--checkpoint-every", "2"),
    *("--decoder-dim", "8", "--decoder-layers", "1", "--decoder-heads", "2"),
    *("--neighbours", "3", "--probe-images", "40", "--crop", "0.5", "--flip"),
)


@pytest.fixture(scope="module")
def recipe():
    return load("mae")


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    assert recipe.main([*SMALL, "--out", str(out)]) == 0
    return out


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_run_leaves_a_picture_a_probe_and_an_encoder(recipe, whole, capsys):
    found = result(whole)
    assert found["steps"] == len(found["step_losses"]) == 9
    ways = {f"{way}_{part}_accuracy" for way in ("knn", "linear") for part in ("val", "test")}
    assert {"loss", "val_loss", *ways, *(f"new_{name}" for name in ways)} == set(found["metrics"])
    for name in ("reconstruction.png", "curves.png", "report.html"):
        assert (whole / name).stat().st_size > 1000, name
    model = ViTMAEForPreTraining.from_preset(whole / "model")
    assert found["parameters"] == model.count_params() > found["trainable_parameters"]
    assert model.norm_pix_loss and model.decoder.config.hidden_dim == 8
    # It continues as a classifier, in Python and in the recipe for that.
    classifier = ViTImageClassifier.from_preset(whole / "model", num_classes=3)
    assert classifier.preprocessor.image_size == (16, 16)
    arguments = ["--weights", str(whole / "model"), "--data", "synthetic:48", "--batch-size", "8"]
    out = whole.parent / "fine"
    assert load("vit").main([*arguments, "--epochs", "1", "--out", str(out)]) == 0
    assert result(out)["parameters"] < found["parameters"]
    capsys.readouterr()
    assert recipe.main(["--evaluate", "--out", str(whole)]) == 0
    again = json.loads((whole / "evaluation.json").read_text())["metrics"]
    for name in ways:
        assert again[name] == found["metrics"][name], name
    assert "pretrained weights" in capsys.readouterr().out


def test_a_killed_run_ends_with_the_same_bits(recipe, whole, tmp_path):
    run_killed(recipe, [*SMALL, "--out", str(tmp_path)], 5)
    keras.utils.set_random_seed(5)
    assert recipe.main(["--resume", "--out", str(tmp_path)]) == 0
    expected, found = result(whole), result(tmp_path)
    assert found["step_losses"] == expected["step_losses"]
    assert found["weights_digest"] == expected["weights_digest"]
    assert found["metrics"] == expected["metrics"]
    # Other masks would give other losses.
    assert np.std(expected["step_losses"]) > 1e-3


def test_what_cannot_be_is_said_in_one_line(recipe, tmp_path, capsys):
    for arguments, message in (
        (("--mask-ratio", "1"), "--mask-ratio is 1.0; give at least 0, below 1"),
        (("--neighbours", "41"), "neighbours is 41; there are 40 images"),
    ):
        assert recipe.main([*SMALL, *arguments, "--out", str(tmp_path / "wrong")]) == 2
        assert message in capsys.readouterr().err
