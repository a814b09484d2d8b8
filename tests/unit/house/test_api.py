"""The public surface: docs/api.md names it, it is there and explained, and examples keep to it."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A line of a notebook that is not Python.
MAGIC = re.compile(r"^( *)[%!].*$", re.MULTILINE)


def load_script():
    spec = importlib.util.spec_from_file_location("docs_api", ROOT / "docs" / "site" / "api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api = load_script()
PUBLIC = {name: set(importlib.import_module(name).__all__) for name in api.MODULES}


@pytest.mark.parametrize(
    ("path", "page"),
    [
        (api.PAGE, api.page),
        (api.PRESETS_PAGE, api.presets_page),
        (api.VERSIONS_PAGE, api.versions_page),
    ],
)
def test_the_page_is_up_to_date(path, page):
    assert path.read_text() == page(), "python docs/site/api.py writes it"


def test_every_preset_is_on_its_page():
    from kmodels import registry

    rows = re.findall(r"^\| `(\S+)` \| (.*) \|$", api.PRESETS_PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [n for f in registry.families() for n in f.presets]
    assert all(re.search(r"\d", cells) for _, cells in rows)


@pytest.mark.parametrize("name", api.MODULES)
def test_every_name_is_there_and_explained(name):
    module = importlib.import_module(name)
    assert PUBLIC[name] <= set(dir(module))
    assert module.__doc__ and api.names(module)
    for public in api.names(module):
        value = getattr(module, public)
        if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"
        assert len(api.sentence(module, public)) > 5, f"{name}.{public}"


def test_top_level_names_are_few():
    import kmodels

    values = [n for n in kmodels.__all__ if not inspect.ismodule(getattr(kmodels, n))]
    assert len(values) <= 12 and len(kmodels.__all__) <= 25
    # A module of the list is a module of the page, so nothing public has no page.
    modules = {f"kmodels.{n}" for n in kmodels.__all__} - {f"kmodels.{n}" for n in values}
    assert modules <= set(api.MODULES)


def examples() -> dict[str, str]:
    """Python of recipes, notebooks and pages, by file name."""
    found = {path.name: path.read_text() for path in sorted((ROOT / "recipes").glob("*.py"))}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        found[path.name] = MAGIC.sub(r"\1pass", text)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if blocks := FENCE.findall(path.read_text()):
            found[str(path.relative_to(ROOT))] = "\n".join(blocks)
    return found


def used(text: str) -> set[str]:
    """Dotted names of kmodels in a program, through what it imports them as."""
    names, found = {}, set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in names:
            found.add(".".join([names[inner.id], *reversed(parts)]))
    return {name for name in found if name.split(".")[0] == "kmodels"}


def is_public(name: str) -> bool:
    """Whether a dotted name is a public module, a name of one, or below such a name."""
    module = max((m for m in PUBLIC if f"{name}.".startswith(f"{m}.")), key=len, default=None)
    if module is None:
        return False
    rest = name[len(module) + 1 :].split(".")[0]
    # `kmodels.runs` is no module of the page, but a folder of some.
    return not rest or rest in PUBLIC[module] or any(m.startswith(f"{name}.") for m in PUBLIC)


def test_what_is_not_public_is_seen():
    text = """
import kmodels
import kmodels.core.files
from kmodels import text as t, training
from kmodels.models.vit import presets
kmodels.InputError, kmodels.core.errors.InputError, t.read_records, t.nothing.x, training.AdamW
"""
    assert {name for name in used(text) if not is_public(name)} == {
        *("kmodels.core", "kmodels.core.errors", "kmodels.core.errors.InputError"),
        *("kmodels.core.files", "kmodels.models.vit.presets"),
        *("kmodels.text.nothing", "kmodels.text.nothing.x"),
    }


def test_examples_use_what_is_public():
    seen, wrong = set(), []
    for file, text in examples().items():
        names = used(text)
        seen |= names
        wrong += [f"{file} uses {name}" for name in sorted(names) if not is_public(name)]
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 60 and "kmodels.runs.recipe.main" in seen


def test_editors_see_the_families_that_are_loaded():
    from kmodels import models

    tree = ast.parse(Path(models.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {node.module: {alias.name for alias in node.names} for node in block.body}
    loaded = {
        importlib.util.resolve_name(f".{module}", "kmodels.models"): set(names)
        for module, names in (models.MODULES | models.BASES).items()
    }
    assert shown == loaded
