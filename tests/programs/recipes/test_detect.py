"""recipes/detect.py as a user runs it: made scenes, a run that is killed, a folder of COCO."""

import numpy as np
import pytest

from kmodels.models import ViTObjectDetector
from recipe_modules import check_killed_run, load, result
from saved_models import write_coco

SMALL = (
    *("--data", "scenes:40", "--image-size", "16", "--batch-size", "8", "--epochs", "2"),
    *("--queries", "6", "--decoder-layers", "1", "--decoder-dim", "16", "--crop", "0.5"),
    *("--head-dropout", "0.1"),
)


@pytest.fixture(scope="module")
def recipe():
    return load("detect")


@pytest.mark.each_backend("nightly")
def test_scenes_are_learned_and_a_killed_run_goes_on(recipe, tmp_path, capsys):
    whole = tmp_path / "whole"
    assert recipe.main([*SMALL, "--out", str(whole)]) == 0
    written = result(whole)
    losses = written["step_losses"]
    assert len(losses) == 8 and np.mean(losses[-3:]) < np.mean(losses[:3])
    assert {"loss", "val_loss", "test_loss"} <= set(written["metrics"])
    assert (whole / "predictions.png").stat().st_size > 5000
    model = ViTObjectDetector.from_preset(whole / "model")
    assert model.class_names == ["disk", "square", "triangle", "ring"]
    assert len(model.detect([np.zeros((9, 21, 3), "uint8")], threshold=0.0)[0]["boxes"]) == 6
    arguments = [*SMALL, "--checkpoint-every", "3"]
    check_killed_run(recipe, arguments, whole, tmp_path / "cut", 5, checkpoint_is_written=False)
    assert recipe.main([*SMALL, "--out", str(whole), "--evaluate"]) == 0
    again = result(whole, "evaluation.json")["metrics"]
    assert again["test_loss"] == pytest.approx(written["metrics"]["test_loss"], rel=1e-5)


def test_a_folder_of_coco(recipe, tmp_path, capsys):
    from kmodels.data import made_objects

    images, objects = made_objects(20, (20, 24), seed=3)
    root = tmp_path / "data"
    write_coco(root, images, objects)
    arguments = [*SMALL[2:], "--data", f"coco:{root}", "--epochs", "1", "--tune", "lora"]
    assert recipe.main([*arguments, "--rank", "2", "--out", str(tmp_path / "run")]) == 0
    written = result(tmp_path / "run")
    assert written["trainable_parameters"] < 0.2 * written["parameters"]
    (root / "3.png").unlink()
    capsys.readouterr()
    assert recipe.main([*arguments, "--out", str(tmp_path / "wrong")]) == 2
    assert "describes 3.png, and there is no such image" in capsys.readouterr().err
