"""Runs without the optional packages: what is left out is said, and which extra brings it."""

import json
import warnings

import numpy as np
import pytest

from kmodels.runs import plots, probe
from kmodels.tools.compare_backends import report
from refusals import refused


@pytest.fixture
def bare(monkeypatch):
    """Neither Matplotlib nor scikit-learn is found."""
    for module in (plots, probe):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    plots._say_left_out.cache_clear()


def test_pictures_are_left_out_with_one_line(bare, tmp_path, capsys):
    plots.confusion(tmp_path / "confusion.png", np.arange(9) % 3, np.arange(9) % 2, ("a", "b", "c"))
    plots.curves(tmp_path / "curves.png", [])
    assert not list(tmp_path.iterdir())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("pip install 'kmodels[plots]'")


def test_a_benchmark_has_its_table_without_a_picture(bare, tmp_path):
    result = {"rows": [{"failed": None, "precision": "float32"}]}
    assert report.draw(result) is None
    (path,) = report.write(result, tmp_path / "bench.json")
    assert json.loads(path.read_text()) == result


def test_a_probe_is_refused_before_it_begins(bare):
    refused(r"needs scikit-learn: pip install 'kmodels\[probe\]'", probe.check_installed)


def test_with_the_packages_nothing_is_refused():
    assert plots.installed()
    probe.check_installed()


NAMES = ["猫", "कुत्ता", "кот", "$5", "\\frac{", "$x^", "_unknown", "a\nb", ""]


@pytest.mark.parametrize("known", [False, True])
def test_class_names_of_any_script_are_drawn_without_a_warning(
    tmp_path, capsys, monkeypatch, known
):
    """A "$" is not read as mathematics, which raised an error, nor "_" as a label to leave out."""
    plots._fonts.cache_clear()
    plots._say_missing.cache_clear()
    if known:  # as where a font of every script is installed
        monkeypatch.setattr(plots, "_fonts", lambda characters: (("DejaVu Sans",), ""))
    images, labels = [np.zeros((4, 4, 3))] * 9, np.arange(9)
    masks = [np.full((4, 4), i) for i in labels]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.predictions(tmp_path / "a.png", images, labels[::-1], np.eye(9), NAMES)
        plots.captions(tmp_path / "b.png", images, NAMES, NAMES[::-1])
        plots.masks(tmp_path / "c.png", images, masks, masks, NAMES)
        plots.confusion(tmp_path / "d.png", labels, labels, NAMES)
        plots.probe(tmp_path / "e.png", {"猫": 0.5}, np.eye(9), labels, NAMES)
        plots.rows(str(tmp_path / "f.png"), {name: np.zeros((2, 4, 4, 1)) for name in NAMES})
    assert len(list(tmp_path.glob("*.png"))) == 6
    shown = capsys.readouterr()
    assert not shown.err
    if known:
        assert not shown.out
    else:
        for line in shown.out.splitlines():
            assert line.startswith("figures have boxes for") and line.endswith("one of Noto")


def test_fonts_are_found_by_their_characters():
    assert plots._fonts("aж") == (("DejaVu Sans",), "")
    families, missing = plots._fonts("aж猫𓀀")
    assert families[0] == "DejaVu Sans" and set(missing) <= {"猫", "𓀀"}
    assert (len(families) == 1) == (len(missing) == 2)


def test_a_figure_that_cannot_be_drawn_costs_no_run(tmp_path, capsys):
    rows = [{"row": "step", "epoch": 1, "step": step, "loss": 1e308} for step in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Matplotlib's, of an overflow
        plots.curves(tmp_path / "curves.png", rows)
    assert capsys.readouterr().out.startswith("no figure curves.png: ")
    (tmp_path / "folder").touch()
    refused("cannot write|Not a directory", plots.curves, tmp_path / "folder/curves.png", [])
