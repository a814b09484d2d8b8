"""README and docs do what they say: Python blocks run, commands and links exist."""

import json
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

import installed_wheel
from python_process import run_python
from source_tree import decorated

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A program within a block of commands: `python - <<'PY'`, or `cat > train.py <<'PY'`.
HERE = re.compile(r"<<'(\w+)'\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """First line number and text of every fenced block in a language."""
    text = page.read_text()
    return [
        (text[: match.start()].count("\n") + 2, match[2])
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


# Pages whose programs depend on the backend, and those about packages of one environment. What
# data.md says of `fit` is proved on each backend by tests/loop/data/test_any_data.py.
EACH_BACKEND = ("README.md", "keras.md", "transforms.md")
MARKS = {
    **dict.fromkeys(EACH_BACKEND, pytest.mark.each_backend),
    **dict.fromkeys(("distribution.md", "training.md"), pytest.mark.each_backend("nightly")),
    "interop.md": pytest.mark.needs("keras_hub", "keras_cv"),
    "remote.md": pytest.mark.needs("fsspec"),
    "flax_and_optax.md": [pytest.mark.across("jax"), pytest.mark.needs("flax", "optax")],
}


WITH_PYTHON = pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=MARKS.get(page.name, ()))
        for page in PAGES
        if blocks(page, "python")
    ],
)


@WITH_PYTHON
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page, in order, as one program in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, text in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)


@pytest.mark.nightly
@WITH_PYTHON
def test_python_blocks_run_from_the_wheel(page, programs, tmp_path):
    """The same in a process of its own, for a person who has set no variable."""
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    done = subprocess.run(
        [programs / "python", "-"],
        input="\n".join(text for _, text in blocks(page, "python")),
        cwd=folder, env=installed_wheel.variables(programs, home),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


IMPORT = re.compile(r"^ *(?:import|from) (\w+)", re.MULTILINE)
USES_KERAS = ("keras", "keras_hub", "keras_cv", "keras_nlp")


def test_kmodels_is_imported_before_keras():
    """Keras alone uses TensorFlow if nothing is set, and TensorFlow need not be installed."""
    codes = [
        (f"{page.name}:{line}", text)
        for page in PAGES
        for language in ("python", "")
        for line, text in blocks(page, language)
    ]
    for page in PAGES:
        found = [text for _, block in blocks(page, "sh") for _, text in HERE.findall(block)]
        codes += [(f"{page.name}, program {i}", text) for i, text in enumerate(found)]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        codes.append((path.name, "\n".join(code)))
    late = []
    for place, text in codes:
        names = [name for name in IMPORT.findall(text) if name in ("kmodels", *USES_KERAS)]
        if names and names[0] != "kmodels" and "KERAS_BACKEND" not in text:
            late.append(place)
    assert not late


def test_the_first_block_needs_no_variable(tmp_path):
    (_, text), *_ = blocks(ROOT / "README.md", "python")
    imports = "\n".join(line for line in text.splitlines() if IMPORT.match(line))
    program = f"{imports}\nprint(keras.backend.backend())"
    done = run_python("-c", program, HOME=str(tmp_path), KERAS_BACKEND=None)
    assert done.stdout.strip() == os.environ["KERAS_BACKEND"], done.stderr


def test_make_targets_and_named_files_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = " ".join(re.findall(r"^([\w -]+):", makefile, re.MULTILINE)).split()
    missing = []
    for page in PAGES:
        for _, text in blocks(page, "sh"):
            named = re.findall(r"^make ([\w-]+)", text, re.M)
            missing += [(page.name, f"make {name}") for name in named if name not in targets]
        text = FENCE.sub("", page.read_text())
        for link in (link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)):
            if link and "://" not in link and not (page.parent / link).resolve().exists():
                missing.append((page.name, link))
    assert not missing


def test_the_presets_named_exist():
    from kmodels.models.vit.presets import PRESETS
    from kmodels.runs.settings import shipped

    for page in PAGES:
        unknown = set(re.findall(r"`(vit_\w+)`", page.read_text())) - {*PRESETS, *shipped()}
        assert not unknown, f"{page.name} names presets or settings that do not exist: {unknown}"


def test_the_table_of_overrides_is_the_folder():
    rows = dict(
        re.findall(r"^\| `(\w+)` \| ([\w, –]+) \|$", (ROOT / "README.md").read_text(), re.M)
    )
    overrides = decorated("overrides", "override")
    found = {
        op: [name for name in ("jax", "torch", "tensorflow") if f"{op}_{name}" in overrides]
        for op in decorated("ops", "op")
    }
    assert rows == {name: ", ".join(backends) or "–" for name, backends in found.items()}


def test_the_table_of_versions_is_that_of_the_project():
    """Oldest versions are in pyproject.toml, tested ones in constraints.txt."""
    rows = re.findall(
        r"^\| (\w+) \| ([\d.]+) or newer \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M
    )
    project, tested = ((ROOT / f).read_text() for f in ("pyproject.toml", "constraints.txt"))
    packages = {"Keras": "keras", "JAX": "jax", "PyTorch": "torch", "TensorFlow": "tensorflow"}
    assert {name for name, *_ in rows} == {"Python", *packages}
    for name, oldest, newest in rows:
        if name == "Python":
            assert f'requires-python = ">={oldest}"' in project
        else:
            assert f'"{packages[name]}>={oldest}"' in project
            assert f"\n{packages[name]}=={newest}\n" in tested


RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def test_the_index_shows_no_dead_link_and_those_to_the_repository():
    """Without an address of the repository, links between its files are plain text there."""
    text = (ROOT / "README.md").read_text()
    description = runpy.run_path(str(ROOT / "hatch_build.py"))["description"]
    alone = description(text, None)
    assert RELATIVE.findall(text) and not RELATIVE.findall(alone)
    assert "| Continue a killed run | `--resume` |" in alone
    assert FENCE.findall(alone) == FENCE.findall(text)
    linked = description(text, "https://example.org/kmodels/")
    links = re.findall(r"\]\(https://example.org/kmodels/blob/HEAD/([^)]+)\)", linked)
    assert links == RELATIVE.findall(text)
    assert not RELATIVE.findall(linked)
