"""README and docs do what they say: Python blocks run, commands and links exist."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """First line number and text of every fenced block in a language."""
    text = page.read_text()
    return [
        (text[: match.start()].count("\n") + 2, match[2])
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
# Pages about packages that one environment alone has.
NEEDS = {
    "interop.md": pytest.mark.needs("keras_hub", "keras_cv"),
    "remote.md": pytest.mark.needs("fsspec"),
}


def test_the_readme_has_code():
    assert ROOT / "README.md" in WITH_PYTHON


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=NEEDS.get(page.name, ())) for page in WITH_PYTHON],
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page, in order, as one program in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, text in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    named = {
        name for _, text in blocks(page, "sh") for name in re.findall(r"^make ([\w-]+)", text, re.M)
    }
    targets = " ".join(re.findall(r"^([\w -]+):", makefile, re.MULTILINE)).split()
    missing = [name for name in named if name not in targets]
    assert not missing, f"{page.name} names make targets that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    text = FENCE.sub("", page.read_text())
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    missing = [
        link
        for link in links
        if link and "://" not in link and not (page.parent / link).resolve().exists()
    ]
    assert not missing, f"{page.name} links to {missing}"


def test_the_presets_named_exist():
    from kmodels.models.vit.presets import PRESETS

    for page in PAGES:
        unknown = set(re.findall(r"`(vit_\w+)`", page.read_text())) - set(PRESETS)
        assert not unknown, f"{page.name} names presets that do not exist: {unknown}"


def test_the_table_of_overrides_is_the_folder():
    source = ROOT / "src" / "kmodels"
    rows = dict(
        re.findall(r"^\| `(\w+)` \| ([\w, –]+) \|$", (ROOT / "README.md").read_text(), re.M)
    )
    found = {
        path.stem: [
            name
            for name in ("jax", "torch", "tensorflow")
            if (source / "overrides" / f"{path.stem}_{name}.py").is_file()
        ]
        for path in (source / "ops").glob("[a-z]*.py")
    }
    assert rows == {name: ", ".join(backends) or "–" for name, backends in found.items()}


RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def test_the_index_shows_no_dead_link():
    """Without an address of the repository, links between its files are plain text there."""
    text = (ROOT / "README.md").read_text()
    description = runpy.run_path(str(ROOT / "hatch_build.py"))["description"]
    found = description(text, None)
    assert RELATIVE.findall(text) and not RELATIVE.findall(found)
    assert "| Continue a killed run | `--resume` |" in found
    assert FENCE.findall(found) == FENCE.findall(text)


def test_the_index_links_to_the_repository():
    text = (ROOT / "README.md").read_text()
    description = runpy.run_path(str(ROOT / "hatch_build.py"))["description"]
    found = description(text, "https://example.org/kmodels/")
    linked = re.findall(r"\]\(https://example.org/kmodels/blob/HEAD/([^)]+)\)", found)
    assert linked == RELATIVE.findall(text)
    assert not RELATIVE.findall(found)
