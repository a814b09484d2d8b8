"""Every notebook runs from an installed wheel on each backend it names, and has no outputs.

The first cell says where a notebook runs, on a line of its own or at the start of one:
"Backends: `jax`, `torch`." is executed in the run of each; "Backends: `jax`, `torch` together."
needs them all at once and is executed once, in the full environment. `make test` executes two, and
`make test-all` each on each backend. No variable chooses the backend: a person has one.
"""

import importlib.util
import os
import re
import tomllib
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

import installed_wheel

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


def _needed(path):
    """The packages that a notebook needs: those of any backend are not among them."""
    backends, together = _named(path)
    return ["kmodels", "matplotlib", *(backends if together or len(backends) == 1 else [])]


@pytest.mark.parametrize(
    ("path", "missing"),
    [pytest.param(p, name, id=f"{p.stem}-{name}") for p in NOTEBOOKS for name in _needed(p)],
)
def test_the_first_cell_installs_what_is_missing(path, missing, monkeypatch):
    import kmodels  # noqa: F401, so that the cell's own import finds it

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    monkeypatch.setattr(os, "environ", {})
    asked = []

    class Shell:
        def run_line_magic(self, magic, words):
            asked.append((magic, re.fullmatch(r'install -q "kmodels\[([\w,]+)\]"', words)[1]))

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != missing)
    _, cell, *_ = nbformat.read(path, as_version=4).cells
    code = TransformerManager().transform_cell(cell.source)
    exec(code, {"get_ipython": Shell})
    ((magic, named),) = asked
    brought = {package.split(">=")[0] for name in named.split(",") for package in extras[name]}
    assert magic == "pip" and {*_needed(path)} - {"kmodels"} <= brought
    assert missing != "kmodels" or brought & {*BACKENDS}
    asked.clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    exec(code, {"get_ipython": Shell})
    assert not asked


def test_no_outputs_are_stored():
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert not cell.outputs and cell.execution_count is None, path


@pytest.mark.each_time("01_fine_tune_vit", "10_many_devices")
@pytest.mark.parametrize("path", _for_this_backend())
def test_runs_from_the_wheel_at_small_size(path, request, tmp_path, exchange, monkeypatch):
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(home))
    # Imports of torch and Keras are part of the first one; the processes of the others are forks.
    real = path == NOTEBOOKS[0]
    programs = request.getfixturevalue("programs" if real else "forked_programs")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources=where)
    client.create_kernel_manager().kernel_spec.argv[0] = str(programs / "python")
    client.execute(env=installed_wheel.variables(programs, home) | {"KMODELS_SMALL": "1"})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    figures = [shown for shown in data if "<Figure" in shown.get("text/plain", "")]
    # Without %matplotlib inline a figure is shown as a line of text.
    assert figures and all("image/png" in shown for shown in figures)
    # For the site, whose pages show what came out.
    kept = exchange / os.environ["KERAS_BACKEND"] / "notebooks"
    kept.mkdir(parents=True, exist_ok=True)
    # Whole, since another process may build the site meanwhile.
    nbformat.write(notebook, kept / f".{path.name}")
    (kept / f".{path.name}").replace(kept / path.name)
