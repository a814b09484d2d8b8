"""report.html: what it says of a run, and how a browser shows it."""

import csv
import json

import numpy as np
import pytest

from browser import look
from kmodels.core.errors import InputError
from kmodels.runs import plots, report
from kmodels.runs.history import COLUMNS
from kmodels.tools import cli

pytestmark = pytest.mark.once

LONG = "/data/" + "a" * 300
SETTINGS = {"recipe": "vit", "preset": "vit_debug", "data": LONG, "mesh": None, "seed": 0}
RESULT = {
    "recipe": "vit",
    "backend": "jax",
    "device": "cpu x1",
    "precision": "float32",
    "preset": "vit_debug",
    "parameters": 1234567,
    "trainable_parameters": 1000,
    "steps": 30,
    "epochs": 3,
    "metrics": {"val_accuracy": 0.91237, "val_loss": None},
    "samples_per_s": 1411.04,
    "wait_for_data_share": 0.1088,
    "overrides": {"attention": "override"},
    "versions": {"keras": "3.15.1"},
    "samples": [{"prompt": "<script>alert(1)</script>", "after": "b" * 400}],
}


def _write(folder, settings=SETTINGS, found=RESULT):
    folder.mkdir(exist_ok=True)
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    if found:
        (folder / "result.json").write_text(json.dumps(found))
    return folder


@pytest.fixture
def run(tmp_path):
    folder = _write(tmp_path / "run")
    rows = [
        {"row": "step", "epoch": e, "step": 10 * e - 5, "loss": 2.0 / e} for e in range(1, 4)
    ] + [
        {"row": "epoch", "epoch": e, "step": 10 * e, "loss": 2.0 / e, "val_accuracy": e / 4}
        for e in range(1, 4)
    ]
    with (folder / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    plots.curves(folder / "curves.png", rows)
    plots.confusion(folder / "confusion.png", np.arange(9) % 3, np.arange(9) % 2, ("a", "b", "c"))
    return folder


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_all_of_it(run, tmp_path, width):
    seen = look(report.write(run), width, tmp_path)
    assert seen["width"] == width
    assert seen["page"] <= width
    assert seen["wide"] == []
    assert [alt.split()[0] for alt, _, _ in seen["pictures"]] == ["Loss", "How"]
    assert all(natural > 400 and shown > 200 for _, natural, shown in seen["pictures"])
    for text in (
        *("jax on cpu x1, float32", "1,234,567 parameters", "0.9124", "1,411.0", "10.88"),
        *("<script>alert(1)</script>", LONG, "attention", "3.15.1"),
    ):
        assert text in seen["text"], text
    epochs = seen["text"].split("Epochs")[1]
    assert "val_accuracy" in epochs
    assert "learning_rate" not in epochs  # a column without a value


def test_the_page_needs_nothing_else(run):
    text = report.write(run).read_text()
    assert "http" not in text
    assert text.count("data:image/png;base64,") == text.count("<img") == 2
    assert "<script" not in text


def test_a_run_that_is_not_finished(tmp_path):
    text = report.write(_write(tmp_path / "run", found=None)).read_text()
    assert "not finished" in text
    assert "vit_debug" in text


def test_no_run(tmp_path, capsys):
    with pytest.raises(InputError, match="holds no run: no config"):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        report.write(tmp_path)


def test_the_command_writes_it(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(run)])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == str(run / report.NAME)
    assert (run / report.NAME).stat().st_size > 10_000
