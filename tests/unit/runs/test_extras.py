"""Runs without the optional packages: what is left out is said, and which extra brings it."""

import json

import numpy as np
import pytest

from kmodels.runs import plots, probe
from kmodels.tools.bench import report
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
