"""report.html: what it says of a run, and how a browser shows it."""

import json
import re

import numpy as np
import pytest
import run_folders

import command_line
from browser import check_fits, look
from kmodels import models
from kmodels.data import ArraySource
from kmodels.runs import report, results
from kmodels.runs.report import confusion
from kmodels.runs.run_folder import USES, read
from refusals import refused

# Of the run of a classifier.
SHOWN = (
    *("vit_debug on /data/aaa", "23 November 2026, 14:46", "2 min 20 s", "jax on cpu x1"),
    *("0.9124", "1,411", "505 MB", "11%", "kmodels vit --resume", "Best epoch: 2", "ankle boot"),
    *("1,437 for training, 180 for validation, 120 for the test", "1,234,567, 1,000 trained"),
    *("Confident mistakes", "Unsure mistakes", "Barely right", "Learning rate", "Throughput"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a classifier: its folder, labels and shares."""
    return run_folders.images(tmp_path_factory.mktemp("images") / "run")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_all_of_a_classifier(run, tmp_path, width):
    seen = look(report.write(run[0]), width, tmp_path)
    assert seen["width"] == width
    check_fits(seen)
    assert len(seen["pictures"]) > 24
    assert all(natural == 80 and shown > 60 for _, natural, shown in seen["pictures"])
    assert len(seen["canvases"]) == 4 and min(seen["canvases"]) > 200
    for text in SHOWN:
        assert text in seen["text"], text


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_answers_beside_each_other(tmp_path, width):
    seen = look(report.write(run_folders.texts(tmp_path / "run")), width, tmp_path)
    assert seen["width"] == width
    check_fits(seen)
    for text in ("<script>alert(1)</script>", "(nothing)", "The sun.\nIt is a star.", "4.2500"):
        assert text in seen["text"], text


@pytest.mark.parametrize("name", USES)
def test_a_run_with_a_model_says_how_to_use_it(tmp_path, name):
    folder = run_folders.images(tmp_path / "run")[0]
    assert "Use this model" not in report.write(folder).read_text()
    (folder / "adapter").mkdir()
    assert read(folder).use == [f"kmodels chat {folder}/base --adapter {folder}/adapter"]
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps({"class": name}))
    command, *_, load, line = read(folder).use
    assert str(folder) in command and f"{name}.from_preset" in load
    method = line.removeprefix("model.").partition("(")[0]
    assert callable(getattr(getattr(models, name), method))
    assert "Use this model" in report.write(folder).read_text()
    (folder / "model/config.json").write_text("{}")
    assert read(folder).use == []


def test_the_page_needs_nothing_else(run):
    text = report.write(run[0]).read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,20})', text)
    assert sources and all(source.startswith("data:image/") for source in sources)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "MIT License" in text and "Leon Sorokin" in text


def test_what_differs_from_the_defaults_comes_first(run):
    found = read(run[0])
    assert found.changed == {"data": (run_folders.LONG, "digits"), "seed": (3, 0)}
    assert found.unchanged == {"preset": "vit_debug", "mesh": None}
    text = report.write(run[0]).read_text()
    words = (">seed<", "2 others are at their defaults", ">mesh<")
    assert [text.index(word) for word in words] == sorted(text.index(word) for word in words)


def test_the_best_epoch_is_that_of_its_metric(tmp_path):
    losses = run_folders.write(tmp_path / "a", notes={"best": "loss"})
    assert [read(losses).best[1][name] for name in ("epoch", "step")] == [3, 30]
    accuracies = run_folders.write(tmp_path / "b", notes={"best": "val_accuracy"})
    assert read(accuracies).best[1]["epoch"] == 2


def test_numbers_that_are_not_finite_cost_no_chart_and_are_not_the_best(tmp_path):
    folder = run_folders.write(tmp_path / "run", notes={"best": "val_accuracy"})
    text = (folder / "history.csv").read_text()
    (folder / "history.csv").write_text(text.replace("0.75", "nan").replace(",2.0,", ",inf,"))
    assert read(folder).best[1]["val_accuracy"] == 0.5
    page = report.write(folder).read_text()
    charts = re.search('id="charts">(.*?)</script>', page, re.DOTALL)[1]
    json.loads(charts, parse_constant=lambda name: pytest.fail(name))


def test_mistakes_are_the_surest_and_the_least_sure(run):
    _, labels, shares = run
    said, sure = shares.argmax(1), shares.max(1)
    wrong = np.sort(sure[said != labels])
    groups = json.loads((run[0] / "predictions.json").read_text())["groups"]
    assert len(wrong) > 24
    for group, expected in (("sure", wrong[::-1]), ("unsure", wrong)):
        shown = [picture["confidence"] for picture in groups[group]]
        np.testing.assert_allclose(shown, expected[:12], atol=1e-4)
    for picture in groups["narrow"]:
        assert picture["said"] == picture["label"] != picture["second"]


def test_confusions_of_few_classes_are_a_matrix(run):
    _, labels, shares = run
    found = confusion(json.loads((run[0] / "predictions.json").read_text()))
    expected = np.zeros((5, 5), int)
    np.add.at(expected, (labels, shares.argmax(1)), 1)
    shown = [[int(cell["text"] or 0) for cell in cells] for _, cells in found["matrix"]]
    assert shown == expected.tolist()
    assert not found["percent"] and found["worst"] == []
    content = {"classes": ["a", "b"], "confusions": [[0, 0, 1500], [0, 1, 500], [1, 1, 10]]}
    (_, first), _ = confusion(content)["matrix"]
    assert [cell["text"] for cell in first] == ["75", "25"]


def test_confusions_of_many_classes_are_pairs(tmp_path):
    classes = [f"class {number}" for number in range(40)]
    folder, labels, shares = run_folders.images(tmp_path / "run", classes, 400)
    found = confusion(json.loads((folder / "predictions.json").read_text()))
    assert found["matrix"] is None
    first = found["pairs"][0]
    label, said = classes.index(first["label"]), classes.index(first["said"])
    assert first["count"] == int(((labels == label) & (shares.argmax(1) == said)).sum()) > 0
    assert first["of"] == 10
    worst = found["worst"][0]
    rows = labels == classes.index(worst["name"])
    assert worst["share"] == (shares.argmax(1) == labels)[rows].mean()
    text = report.write(folder).read_text()
    assert "Hardest classes" in text and "class 39" in text


@pytest.mark.parametrize(("shape", "kind"), [((8, 8, 1), "png"), ((300, 200, 3), "jpeg")])
def test_pictures_are_small_files(shape, kind):
    source = ArraySource(np.zeros((2, *shape), "uint8"), np.array([0, 1]))
    found = results.predictions("test", source, np.array([[1.0, 0.0], [0.6, 0.4]]), "ab")
    (picture,) = found["groups"]["all"]
    assert picture["image"].startswith(f"data:image/{kind};base64,")
    assert picture["side"] == min(max(shape), 128)
    assert (picture["label"], picture["said"], picture["confidence"]) == ("b", "a", 0.6)
    assert found["confusions"] == [[0, 0, 1], [1, 0, 1]]


def test_long_runs_are_averaged_to_fewer_points(tmp_path):
    run = read(run_folders.write(tmp_path / "run"))
    step = {"row": "step", "epoch": 1.0}
    run.rows[:] = [{**step, "step": float(n), "loss": float(n % 2)} for n in range(1, 5001)]
    (chart,) = report.charts_of_run(run)
    assert len(chart["x"]) <= report.MOST_POINTS and chart["x"][-1] == 5000
    (line,) = chart["lines"]
    assert 0.3 < min(line["values"]) <= max(line["values"]) < 0.7


def test_a_run_that_is_not_finished(tmp_path):
    text = report.write(run_folders.write(tmp_path / "run", result=None)).read_text()
    assert "not finished" in text
    assert "vit_debug" in text


def test_no_run(tmp_path, capsys):
    refused("holds no run: no config", report.write, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert command_line.run("report", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "config.json").write_text("{")
    refused("config.json is not readable JSON", report.write, tmp_path)


def test_the_command_writes_it(run, capsys):
    assert command_line.run("report", run[0]) == 0
    assert capsys.readouterr().out.strip() == str(run[0] / report.NAME)
    assert (run[0] / report.NAME).stat().st_size > 50_000
