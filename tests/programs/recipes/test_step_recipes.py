"""recipes/distill.py and recipes/dpo.py as a user runs them: training steps of their own."""

import json

import numpy as np
import pytest

from recipe_modules import load

# 48 images in batches of 8, 6 steps to an epoch.
DISTILL = (
    *("--preset", "vit_debug", "--teacher-preset", "vit_debug", "--layers", "1"),
    *("--data", "synthetic:48", "--batch-size", "8", "--teacher-epochs", "1", "--epochs", "2"),
)
DPO = (
    *("--batch-size", "2", "--sequence-length", "48", "--rank", "2", "--steps", "6"),
    *("--lora-dropout", "0.1", "--first-steps", "2", "--learning-rate", "1e-2"),
)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_student_learns_what_its_teacher_says(tmp_path, capsys):
    recipe, out = load("distill"), tmp_path / "a"
    assert recipe.main([*DISTILL, "--out", str(out)]) == 0
    found = result(out)
    assert found["steps"] == len(found["step_losses"])
    assert np.mean(found["step_losses"][-3:]) < np.mean(found["step_losses"][:3])
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "test_accuracy"} <= set(
        found["metrics"]
    )
    from kmodels.models import ViTImageClassifier

    teacher = ViTImageClassifier.from_preset(out / "teacher")
    student = ViTImageClassifier.from_preset(out / "model")
    assert teacher.backbone.config.num_layers == 2
    assert student.backbone.config.num_layers == 1
    assert found["parameters"] == student.count_params() < teacher.count_params()
    # Evaluated again from the checkpoint, which holds the step; the teacher is not trained again.
    assert "teacher: validation accuracy" in " ".join(capsys.readouterr().out.split())
    assert recipe.main([*DISTILL, "--out", str(out), "--evaluate"]) == 0
    again = json.loads((out / "evaluation.json").read_text())["metrics"]
    for name in ("val_accuracy", "test_accuracy", "test_loss"):
        assert again[name] == pytest.approx(found["metrics"][name], abs=1e-6), name
    assert recipe.main([*DISTILL, "--share", "2", "--out", str(tmp_path / "b")]) == 2
    assert "--share is 2.0" in capsys.readouterr().err


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    words = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
    rows = [
        {"prompt": f"A colour like {a}? ", "chosen": f"{b} it is", "rejected": f"no, not {b}"}
        for a, b in zip(words, words[1:] + words[:1], strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_preferences_are_learnt_beside_a_frozen_base(tmp_path, pairs, capsys):
    recipe, out = load("dpo"), tmp_path / "a"
    assert recipe.main([*DPO, "--data", str(pairs), "--out", str(out)]) == 0
    found = result(out)
    # Adapters begin at zero: the model is its own reference.
    assert found["step_losses"][0] == pytest.approx(np.log(2), abs=1e-5)
    assert len(found["step_losses"]) == 6
    assert found["trainable_parameters"] < 0.2 * found["parameters"]
    assert {"val_loss", "val_accuracy", "val_margin"} <= set(found["metrics"])
    assert (out / "adapter/adapter_model.safetensors").is_file()
    assert (out / "model/config.json").is_file()
    pairs.write_text('{"prompt": "a", "chosen": "b"}\n')
    capsys.readouterr()
    assert recipe.main([*DPO, "--data", str(pairs), "--out", str(tmp_path / "wrong")]) == 2
    assert "record 1 of" in capsys.readouterr().err
