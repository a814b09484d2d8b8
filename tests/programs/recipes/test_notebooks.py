"""Every notebook runs from top to bottom on each backend it names, and is stored without outputs.

The first cell says where a notebook runs, on a line of its own or at the start of one:
"Backends: `jax`, `torch`." is executed in the run of each; "Backends: `jax`, `torch` together."
needs them all at once and is executed once, in the full environment. A notebook that runs on torch
runs on the other backends with --nightly.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BACKENDS = ("jax", "torch", "tensorflow")
NAMED = re.compile(r"^Backends: ((?:`\w+`(?:, )?)+)( together)?\.", re.MULTILINE)


def _named(path):
    """The backends that a notebook names, and whether it needs them all at once."""
    found = NAMED.search(nbformat.read(path, as_version=4).cells[0].source)
    return (re.findall(r"\w+", found[1]), bool(found[2])) if found else ([], False)


def _for_this_backend():
    chosen = []
    for path in NOTEBOOKS:
        backends, together = _named(path)
        if together:
            chosen.append(pytest.param(path, id=path.stem, marks=pytest.mark.across))
        elif (backend := os.environ["KERAS_BACKEND"]) in backends:
            waits = backend != "torch" and "torch" in backends
            mark = pytest.mark.each_backend(*(["nightly"] if waits else []))
            chosen.append(pytest.param(path, id=path.stem, marks=mark))
    return chosen


def test_each_names_its_backends():
    wrong = {path.name: _named(path)[0] for path in NOTEBOOKS}
    wrong = {name: named for name, named in wrong.items() if not named or {*named} - {*BACKENDS}}
    assert not wrong, f"the first cell needs a line such as 'Backends: `jax`.': {wrong}"


def test_each_is_listed():
    page = (ROOT / "docs" / "README.md").read_text()
    listed = re.findall(r"^\| \[.*\]\(\.\./notebooks/(\S+)\) \| (.+) \|$", page, re.MULTILINE)
    found = []
    for path in NOTEBOOKS:
        backends, together = _named(path)
        found.append((path.name, ", ".join(backends) + " together" * together))
    assert NOTEBOOKS and listed == found


def test_each_begins_with_a_cell_that_installs():
    for path in NOTEBOOKS:
        _, cell, *_ = nbformat.read(path, as_version=4).cells
        assert re.search(
            r"import kmodels\n.*%pip install -q \"kmodels\[", cell.source, re.DOTALL
        ), path


def test_no_outputs_are_stored():
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not cell.outputs and cell.execution_count is None, path


@pytest.mark.parametrize("path", _for_this_backend())
# Jupyter's own packages leave sockets and event loops to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_runs_at_small_size(path, tmp_path, monkeypatch, exchange):
    monkeypatch.setenv("KMODELS_SMALL", "1")
    notebook = nbformat.read(path, as_version=4)
    settings = {"timeout": 200, "kernel_name": "python3"}
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, **settings).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    figures = [shown for shown in data if "<Figure" in shown.get("text/plain", "")]
    # Without %matplotlib inline a figure is shown as a line of text.
    assert figures and all("image/png" in shown for shown in figures)
    # For the site, whose pages show what came out.
    kept = exchange / os.environ["KERAS_BACKEND"] / "notebooks"
    kept.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, kept / path.name)
