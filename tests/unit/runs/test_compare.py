"""kmodels compare: runs beside each other, in a terminal and on a page."""

import json

import pytest
import run_folders

from browser import check_fits, look
from command_line import run
from kmodels.core.metric_names import best_of
from kmodels.runs.compare import Comparison, _scores
from refusals import refused


@pytest.fixture
def runs(tmp_path):
    first = run_folders.texts(tmp_path / "first" / "run", seed=0)
    return first, run_folders.texts(tmp_path / "second" / "run", learning_rate=2e-3)


@pytest.fixture
def better(runs):
    """The second run's result is better by accuracy."""
    path = runs[1] / "result.json"
    path.write_text(path.read_text().replace("0.91237", "0.95"))
    return runs


def test_the_best_of_a_row_is_marked(better):
    rows = dict(Comparison(better).results)
    assert [cell["best"] for cell in rows["test_accuracy"]] == [False, True]
    assert [cell["text"] for cell in rows["test_accuracy"]] == ["0.9124", "0.9500"]
    assert not any(cell["best"] for cell in rows["val_accuracy"] + rows["loss"] + rows["steps"])
    assert [cell["text"] for cell in rows["best val_accuracy"]] == ["0.7500", "0.7500"]


def test_a_value_that_is_not_finite_is_not_the_best():
    metrics = [{"accuracy": x} for x in (float("nan"), 0.5, 0.75)]
    assert [cell["best"] for cell in _scores("accuracy", metrics, True)] == [False, False, True]


def test_settings_that_differ(runs):
    found = Comparison(runs)
    assert found.labels == ["first/run", "second/run"]
    shown = {name: [cell["text"] for cell in cells] for name, cells in found.settings}
    assert shown == {"seed": ["0", "3"], "learning_rate": ["–", "0.002"]}


def test_answers_stand_under_their_prompt(runs):
    first, second = Comparison(runs).samples
    assert second["prompt"] == "Which is larger?"
    answer = "The sun.\nIt is a star."
    answers = [("first/run", answer, 0), ("second/run", answer, 1)]
    assert second["answers"] == [("before", "No.", None), *answers]
    assert len(first["answers"]) == 3


def test_answers_without_a_prompt_or_a_text_are_shown(runs):
    (runs[0] / "result.json").write_text(json.dumps({"samples": [{}, {"prompt": "a"}]}))
    first, *_ = Comparison(runs).samples
    assert first == {"prompt": "", "answers": [("first/run", "", 0)]}


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_all_of_it(better, tmp_path, width):
    images, *_ = run_folders.images(tmp_path / "images")
    seen = look(Comparison([*better, images]).write(tmp_path / "c.html"), width, tmp_path)
    assert seen["width"] == width
    check_fits(seen)
    assert len(seen["canvases"]) >= 4 and min(seen["canvases"]) > 200
    for text in ("3 runs beside each other", "0.9500", "learning_rate", "(nothing)", "second/run"):
        assert text in seen["text"], text


def test_the_command(better, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert run("compare", *better) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "0.9500*" in shown and "* the best of a row" in shown
    assert shown.splitlines()[-1] == "compare.html"
    assert run("compare", *better, "--out", "both.html") == 0
    assert (tmp_path / "both.html").read_text() == (tmp_path / "compare.html").read_text()


def test_texts_of_a_run_do_not_control_the_terminal(better, tmp_path, monkeypatch, capsys):
    path = better[0] / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "data": "\x1b]0;a\x07", "\x1b[2J": 1})
    )
    monkeypatch.chdir(tmp_path)
    assert run("compare", *better) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[2J" in shown


def test_more_runs_than_a_terminal_has_room_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folders = [run_folders.write(tmp_path / f"run-{n}", scale=1.0 + n) for n in range(6)]
    assert run("compare", *folders, "--out", tmp_path / "c.html") == 0
    shown = capsys.readouterr().out
    assert shown.count("Results") == 2 and "run-5" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "c.html" not in line)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "1 run cannot be compared; give at least 2 directories"),
        ([], "0 runs cannot be compared; give at least 2 directories"),
        (["a", "a"], "a is given twice; give each run once"),
        (["a", "."], "holds no run: no config.json"),
        (["a", "nowhere"], "nowhere holds no run: no config.json"),
    ],
)
def test_wrong_uses_give_a_line(names, message, tmp_path, monkeypatch, capsys):
    run_folders.write(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert run("compare", *names) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "compare.html").exists()
    refused("cannot be compared", Comparison, ["a"])


@pytest.mark.parametrize(
    ("best", "names"),
    [
        ("max", "val_accuracy val_mean_iou map_50 mar_100 recall@10 mrr@10 accuracy@1 top5"),
        ("max", "acc_norm exact_match val_f1_score val_pixel_accuracy val_reward mean_io_u"),
        ("min", "loss val_loss word_perplexity bits_per_byte calibration_error top1_err"),
        ("min", "rejected_reward val_mean_absolute_error sparse_categorical_crossentropy"),
        (None, "size chosen_tokens entropy"),
    ],
)
def test_the_name_of_a_metric_says_which_value_is_the_best(best, names):
    assert {name: best_of(name) for name in names.split()} == dict.fromkeys(names.split(), best)
