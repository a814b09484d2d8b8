"""recipes/vit.py as a user runs it: what it writes, how it resumes, what it says."""

import csv
import json
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.data import ImageLoader
from kmodels.models import ViTImageClassifier, ViTImageClassifierPreprocessor
from pool import pool
from python_process import run_python
from recipe_modules import check_same_run, load, result, stop_at
from refusals import refused

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "vit.py"
KEYS = """
    recipe backend versions device precision preset parameters trainable_parameters steps
    epochs metrics samples_per_s step_ms_median compile_s peak_memory_mb wait_for_data_share
    overrides weights_digest step_losses"""
# 48 images in batches of 8: epochs of 6 steps.
SMALL = ("--preset", "vit_debug", "--data", "synthetic:48", "--batch-size", "8", "--dropout", "0.1")


@pytest.fixture(scope="module")
def recipe():
    return load("vit")


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run of 10 steps that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    arguments = [*SMALL, "--epochs", "2", "--steps", "10", "--ema", "0.5", "--mixup", "0.2"]
    arguments += ["--log-every", "4", "--license", "mit"]
    assert recipe.main([*arguments, "--out", str(out)]) == 0
    return out


def test_a_run_leaves_its_files(whole):
    files = ("config.json", "curves.png", "predictions.png", "confusion.png", "report.html")
    for name in files:
        assert (whole / name).stat().st_size > 100, name
    found = result(whole)
    assert set(found) >= set(KEYS.split())
    assert (found["steps"], found["epochs"], len(found["step_losses"])) == (10, 2, 10)
    names = ("loss", "accuracy", "val_loss", "val_accuracy", "test_loss", "test_accuracy")
    assert set(found["metrics"]) == set(names)
    assert found["parameters"] == found["trainable_parameters"] > 5000
    assert len(found["weights_digest"]) == 64
    with (whole / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["row"] == "step"]
    assert [float(row["loss"]) for row in steps] == found["step_losses"]
    assert [row["epoch"] for row in rows if row["row"] == "epoch"] == ["1", "2"]
    assert float(steps[0]["learning_rate"]) == pytest.approx(3e-3)
    checkpoints = sorted((whole / "checkpoints").glob("step_*"))
    assert [path.name for path in checkpoints] == ["step_00000006", "step_00000010"]
    assert json.loads((checkpoints[-1] / "state.json").read_text())["batch"] == 4


def test_the_model_has_a_card(whole, monkeypatch, capsys):
    card = (whole / "model" / "README.md").read_text()
    assert "license: mit\n" in card and "datasets:\n- synthetic:48\n" in card
    assert f"| val_accuracy | {result(whole)['metrics']['val_accuracy']:.4g} |" in card
    [example] = re.findall("```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(whole)
    exec(example, {})
    assert capsys.readouterr().out.startswith("[[")


@pytest.mark.parametrize(
    ("pooling", "settings"),
    [
        ("token", {}),
        ("token", {"head_bias": False}),
        ("distilled", {"use_distillation_token": True}),
    ],
)
def test_a_head_may_begin_close_to_zero(recipe, pooling, settings):
    with pool("vit_debug", num_classes=5, pooling=pooling, **settings) as model:
        names = ["logits", "distillation_logits"][: 1 + (pooling == "distilled")]
        heads = [model.get_layer(name) for name in names]
        biases = [head.bias for head in heads if head.bias is not None]
        for bias in biases:
            bias.assign(bias + 1)
        recipe.start_head(model, 2e-5)
        for head in heads:
            assert np.std(to_numpy(head.kernel)) == pytest.approx(2e-5, rel=1e-3)
        assert not any(to_numpy(bias).any() for bias in biases)


def test_models_begin_as_published(recipe):
    size = {"image_shape": (24, 16, 3), "hidden_dim": 32, "num_heads": 2}
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=5, **size)
    model.preprocessor = ViTImageClassifierPreprocessor((24, 16))
    other = recipe.with_pooled_norm(model)
    paths = {v.path: to_numpy(v) for v in model.backbone.variables}
    assert not any(v.path.startswith("final_norm") for v in other.variables)
    for variable in other.backbone.variables:
        np.testing.assert_array_equal(to_numpy(variable), paths[variable.path])
    settings = other.settings
    assert (settings["pooling"], settings["pooled_norm"], settings["num_classes"]) == ("gap", 1, 5)
    assert other.preprocessor is model.preprocessor
    recipe.start_kernels(model, 0.02, 3)
    for variable in model.backbone.trainable_variables:
        begins = variable.path.endswith("kernel") and "block_" in variable.path
        if begins or variable.path.endswith("class_token"):
            assert np.std(to_numpy(variable)) == pytest.approx(0.02, rel=0.3), variable.path
        else:
            np.testing.assert_array_equal(to_numpy(variable), paths[variable.path])
    recipe.fix_positions(model)
    table = model.backbone.get_layer("tokens").position_embedding
    assert table.path not in {v.path for v in model.trainable_variables}
    values = to_numpy(table)[0]
    assert not values[0].any()  # of the class token
    for row, column in ((0, 0), (2, 1), (1, 0)):
        for i in range(8):
            rate = 1 / 10_000 ** (i / 7)
            wanted = [np.sin(column * rate), np.cos(column * rate)]
            wanted += [np.sin(row * rate), np.cos(row * rate)]
            np.testing.assert_allclose(values[1 + 2 * row + column, i::8], wanted, atol=1e-6)
    narrow = ViTImageClassifier.from_preset("vit_debug", num_classes=2, hidden_dim=18)
    refused("--positions sincos needs a width of 4 n, not 18", recipe.fix_positions, narrow)
    constant = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=2, drop_path_rate=0.2, drop_path_constant=True
    )
    assert [block.drop_path.rate for block in constant.backbone.blocks] == [0.2, 0.2]


@pytest.mark.nightly("tensorflow")
@pytest.mark.each_backend
def test_a_cut_run_goes_on_bit_by_bit(recipe, whole, tmp_path, monkeypatch, capsys):
    """Cut in the middle of an epoch and at its last step: dropout, order, MixUp, EMA continue."""
    arguments = [*SMALL, "--epochs", "2", "--steps", "10", "--ema", "0.5", "--mixup", "0.2"]
    # The position in the data is the same on each backend, and each run traces its steps.
    stops = (3, 6) if keras.backend.backend() == "torch" else (3,)
    stop_at(monkeypatch, *stops)
    monkeypatch.chdir(tmp_path)
    assert recipe.main(["--resume"]) == 2
    assert "--resume found no run of vit with a checkpoint in" in capsys.readouterr().err
    out = Path("runs") / "first"
    assert recipe.main([*arguments, "--out", str(out)]) == 143
    assert "stopped at step 3 by signal 15; continue with --resume" in capsys.readouterr().err
    assert recipe.main(["--resume", "--out", str(out), "--steps", "2"]) == 2
    said = "3 steps are done, and the run is to have 2; give at least as many with --steps or"
    assert said in capsys.readouterr().err
    # The other settings are those of the run.
    for _ in stops[1:]:
        assert recipe.main(["--resume", "--out", str(out)]) == 143
    # Without a directory it is the newest run of this recipe.
    for name, other in (("older", "vit"), ("other", "gemma_lora")):
        (out.parent / name / "checkpoints" / "step_00000001").mkdir(parents=True)
        (out.parent / name / "config.json").write_text(json.dumps({"recipe": other}))
        os.utime(out.parent / name / "checkpoints" / "step_00000001", (1, 1))
    assert recipe.main(["--resume"]) == 0
    assert f"--resume continues with {out}, the newest run of vit" in capsys.readouterr().out
    with (out / "history.csv").open() as file:
        speeds = [row["samples_per_s"] for row in csv.DictReader(file) if row["row"] == "epoch"]
    # After two stops all steps of the first epoch were those of former processes.
    assert (speeds[0] == "") == (len(stops) == 2) and 0 < float(speeds[1]) < 1e6
    check_same_run(out, whole)


def test_a_run_is_evaluated_alone_and_not_overwritten(recipe, whole, tmp_path, capsys):
    assert recipe.main(["--evaluate", "--out", str(whole)]) == 0
    metrics, trained = result(whole, "evaluation.json")["metrics"], result(whole)["metrics"]
    for name in ("val_loss", "val_accuracy", "test_loss", "test_accuracy"):
        assert metrics[name] == pytest.approx(trained[name], abs=1e-6), name
    # The head of a model that is only evaluated stays, also if its settings begin with a new one.
    model = ["--weights", str(whole / "model"), "--head-std", "1", "--out", str(tmp_path)]
    assert recipe.main([*SMALL[2:], *model, "--evaluate"]) == 0
    found = result(tmp_path, "evaluation.json")["metrics"]["test_loss"]
    assert found == pytest.approx(trained["test_loss"], abs=1e-3)
    assert recipe.main([*SMALL, "--out", str(whole)]) == 2
    assert "holds checkpoints of a run; add --resume" in capsys.readouterr().err


def test_resume_without_a_checkpoint_starts_and_says_so(recipe, tmp_path, capsys):
    arguments = [*SMALL, "--steps", "1", "--epochs", "1", "--resume", "--out", str(tmp_path)]
    assert recipe.main(arguments) == 0
    assert "no checkpoint in" in capsys.readouterr().out
    # The same run again has nothing left to do; damaged, it names what does not verify.
    assert result(tmp_path)["steps"] == 1
    (tmp_path / "checkpoints" / "step_00000001" / "model.safetensors").write_bytes(b"x")
    assert recipe.main(["--resume", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "step_00000001" in error
    assert error.count("\n") == 1


def test_a_step_that_is_not_finite_can_be_left_out(recipe, tmp_path, monkeypatch, capsys):
    real = ImageLoader.__getitem__

    def spoiled(self, index):
        x, y = real(self, index)
        return (x * np.float32("nan"), y) if self.maker.shuffle and index == 2 else (x, y)

    monkeypatch.setattr(ImageLoader, "__getitem__", spoiled)
    arguments = [*SMALL, "--epochs", "1", "--non-finite", "skip", "--out", str(tmp_path)]
    assert recipe.main(arguments) == 0
    assert "step 3 was not finite and was skipped" in capsys.readouterr().out
    found = result(tmp_path)
    assert found["skipped_steps"] == 1
    assert [loss is None for loss in found["step_losses"]] == [n == 2 for n in range(6)]
    assert found["metrics"]["loss"] < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint-every", "5m"], "the distance of checkpoints is '5m'; give steps as in 500"),
        (["--epochs", "0"], "--epochs is 0; give at least 1"),
        (["--precision", "float8"], "Invalid value for '--precision': 'float8' is not one of"),
        (["--preset", "vit_tyni_patch16_224"], "did you mean vit_tiny_patch16_224"),
        (["--image-size", "9"], "does not divide the image side of 9; .* are 8 and 10"),
        (["--mesh", "data=3"], "data=3 does not divide the batch of 32"),
        (["--rand-augment", "9"], "--rand-augment is '9'; give 2 or 3 numbers"),
        (["--learning-rate", "-1"], "learning rate is -1.0; give a number above 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--head-std", "-1"], "--head-std is -1.0; give at least 0"),
        (["--kernel-std", "0"], "--kernel-std is 0.0; give a number above 0"),
        (["--eval-crop", "2"], "--eval-crop is 2.0; give a share up to 1"),
        (["--weights", "x", "--positions", "sincos"], "--positions are not for --weights"),
        (["--evaluate"], "there is no checkpoint"),
        (["--out", "/proc/nowhere"], "cannot write to --out /proc/nowhere"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(recipe, tmp_path, capsys, arguments, message):
    out = [] if "--out" in arguments else ["--out", str(tmp_path)]
    assert recipe.main([*arguments, *out]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert re.search(message, error), error


def test_an_unknown_backend_is_told_before_keras_is_imported(tmp_path):
    done = run_python(RECIPE, "--out", tmp_path, KERAS_BACKEND="foo")
    assert done.returncode == 2
    expected = "vit: error: KERAS_BACKEND is 'foo'; choose one of jax, torch, tensorflow\n"
    assert done.stderr == expected


def test_the_header_tells_how_to_run_it_and_what_it_reaches():
    header = RECIPE.read_text().split('"""')[1]
    for word in ("python recipes/vit.py", "cores", "minute", "validation accuracy"):
        assert word in header
