"""docs/architecture.md shows the house as it is: what it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "kmodels"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
WALKS = ("A walk of a batch", "A walk of a checkpoint", "A walk of a mesh")


def section(title: str) -> str:
    """The text from a heading to the next one."""
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def files_in(text: str) -> list[str]:
    return [name for name in re.findall(r"`([\w/]+\.py)`", text) if not name.startswith("tests/")]


def definitions(file: str) -> set[str]:
    tree = ast.parse((SOURCE / file).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_files_that_are_there(walk):
    named = files_in(section(walk))
    assert len(named) >= 6, f"{walk} names {named}"
    missing = [name for name in named if not (SOURCE / name).is_file()]
    assert not missing, f"{walk} names {missing}"


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_what_its_files_define(walk):
    """Of "`name` in `file`" and "`name` (`file`)", the file defines the name."""
    pairs = re.findall(r"`(\w+)`\s+(?:in\s+|\()`([\w/]+\.py)`", section(walk))
    assert len(pairs) >= 4, f"{walk} names {pairs}"
    wrong = [f"{name} in {file}" for name, file in pairs if name not in definitions(file)]
    assert not wrong, f"{walk} names {wrong}"


def test_every_other_file_that_the_page_names_is_there():
    other = [name for name in files_in(TEXT) if "<" not in name and "/" in name]
    missing = [name for name in other if not (SOURCE / name).is_file()]
    assert not missing


def test_the_picture_has_every_room():
    picture = TEXT.partition("```\n")[2].partition("```")[0]
    named = set(re.findall(r"(\w+)(?=/|\b)", picture))
    rooms = {
        path.stem for path in SOURCE.iterdir() if path.name not in ("__pycache__", "__init__.py")
    }
    assert rooms <= named, f"the image lacks {sorted(rooms - named)}"
