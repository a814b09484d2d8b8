"""Writes docs/api.md, every public name, docs/presets.md, every preset, and docs/versions.md.

    python docs/site/api.py           writes them
    python docs/site/api.py --check   exit code 1 if one is out of date

A name is public where `__all__` of one of the modules below has it; all others may change any day.
"""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "api.md"
PRESETS_PAGE = DOCS / "presets.md"
VERSIONS_PAGE = DOCS / "versions.md"
# In the order of the page: what most people need first.
MODULES = (
    *("kmodels", "kmodels.models", "kmodels.layers", "kmodels.ops"),
    *("kmodels.training", "kmodels.callbacks", "kmodels.data", "kmodels.text"),
    *("kmodels.text.demo", "kmodels.text.training", "kmodels.generation", "kmodels.lora"),
    *("kmodels.distribution", "kmodels.distribution.ray"),
    *("kmodels.transforms", "kmodels.weights"),
    "kmodels.models.interpret",
    *("kmodels.interop", "kmodels.interop.keras_hub", "kmodels.interop.keras_cv"),
    *("kmodels.runs.recipe", "kmodels.runs.results", "kmodels.runs.plots", "kmodels.runs.probe"),
    *(
        "kmodels.tools.compare_backends.bench",
        "kmodels.tools.compare_backends.parity",
        "kmodels.tools.compare_backends.report",
    ),
    *("kmodels.tools.convert", "kmodels.tools.plan", "kmodels.tools.plan.recommend"),
)
HEAD = """# The public names

What is listed here is the public surface: recipes, notebooks and the README use nothing else, and
it changes only with a line in the [changelog](../CHANGELOG.md). Any other name of the package may
change any day. The page is written by `python docs/site/api.py`; the site has a page with arguments
and errors for most of these modules.
"""


def names(module: Any) -> list[str]:
    """Returns the public names of a module, in the order of the alphabet."""
    return sorted(module.__all__, key=lambda name: (name.lower(), name))


def sentence(module: Any, name: str) -> str:
    """Returns what a public name is, in a sentence.

    Args:
        module: that has it.
        name: of a function, class, module or value.
    """
    value = getattr(module, name)
    text = inspect.getdoc(value) or ""
    explained = inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    # An op has its function's docstring; other values have that of their class, or none.
    if not explained and text == (inspect.getdoc(type(value)) or ""):
        return f"A value of type `{type(value).__name__}`."
    first = re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(text.split("\n\n")[0].split()))[0]
    return first[:-1] + "." if first.endswith(":") else first


def page() -> str:
    """Returns the text of the page."""
    parts = [HEAD]
    for module in map(importlib.import_module, MODULES):
        about = " ".join((module.__doc__ or "").strip().split("\n\n")[0].split())
        parts.append(f"\n## {module.__name__}\n\n{about}\n\n| name | |\n| --- | --- |\n")
        parts += [
            f"| `{name}` | {sentence(module, name).replace('|', chr(92) + '|')} |\n"
            for name in names(module)
        ]
    return "".join(parts)


PRESETS_HEAD = """# Presets

`from_preset(NAME)` with one of these names makes the architecture with random initial weights.
Weights come from a directory or file, or from a name that begins with `hf://` or `kaggle://`. Names
that end in `debug` or contain `micro` are small enough for a test. The page is written by
`python docs/site/api.py`.
"""
# Heading -> fields of a config; the first that it has is shown.
FIELDS = {
    "image": ("image_shape", "image_size"),
    "patch": ("patch_size",),
    "blocks": ("num_layers",),
    "width": ("hidden_dim",),
    "heads": ("num_heads", "num_query_heads"),
    "key-value heads": ("num_key_value_heads",),
    "MLP": ("mlp_dim", "intermediate_dim"),
    "experts": ("num_experts",),
    "vocabulary": ("vocabulary_size",),
}
TOWERS = {"vision_encoder": "images", "text_encoder": "texts"}


def sizes(config: Any) -> dict[str, str]:
    """Returns the cells of a config or a dictionary of its fields, by heading."""
    fields = config if isinstance(config, dict) else vars(config)
    cells = {}
    for heading, names in FIELDS.items():
        value = next((fields[name] for name in names if fields.get(name)), None)
        if isinstance(value, tuple | list):
            value = " x ".join(map(str, value[:2]))
        if value is not None:
            cells[heading] = str(value)
    return cells


def row(family: Any, fields: dict[str, Any]) -> dict[str, str]:
    """Returns the cells of a preset, by heading; a tower is one cell."""
    own = {name: value for name, value in fields.items() if not name.startswith("task_")}
    config = family.backbone.config_class(**own)
    cells = sizes(config)
    for name, heading in TOWERS.items():
        if tower := getattr(config, name, None):
            cells[heading] = ", ".join(f"{key} {value}" for key, value in sizes(tower).items())
    return cells


def presets_page() -> str:
    """Returns the text of the page of presets."""
    from kmodels import registry

    parts = [PRESETS_HEAD]
    for family in registry.families():
        classes = ", ".join(f"`{one.__name__}`" for one in (family.backbone, *family.tasks))
        rows = {name: row(family, dict(fields)) for name, fields in family.presets.items()}
        headings = [
            heading
            for heading in (*FIELDS, *TOWERS.values())
            if any(heading in cells for cells in rows.values())
        ]
        parts.append(f"\n## {family.name}\n\n{classes}\n\n| preset | {' | '.join(headings)} |\n")
        parts.append(f"| {' | '.join(['---'] * (len(headings) + 1))} |\n")
        for name, cells in rows.items():
            shown = " | ".join(cells.get(heading, "") for heading in headings)
            parts.append(f"| `{name}` | {shown} |\n")
    return "".join(parts)


VERSIONS_HEAD = """# Versions

The suite ran with these versions. `lowest` are the floors of `pyproject.toml` (`make test-lowest`,
the core of the tests: ops, layers, families, training), `pinned` those of `constraints.txt`
(`make test`), `newest` what pip finds (`make test-newest`), and `nightly` has Keras' nightly build.
`kmodels doctor` names a version outside of what passed. The page is written by
`python docs/site/api.py` from `src/kmodels/tools/versions.json`, which
`python tests/run.py --versions KIND --record` writes.
"""


def versions_page() -> str:
    """Returns the text of the page of versions."""
    from kmodels.tools.doctor import VERSIONS

    rows = json.loads(VERSIONS.read_text(encoding="utf-8"))
    if not rows:
        return f"{VERSIONS_HEAD}\nNo run was recorded yet.\n"
    headings = list(dict.fromkeys(name for row in rows for name in row))
    parts = [VERSIONS_HEAD, f"\n| {' | '.join(headings)} |\n"]
    parts.append(f"| {' | '.join(['---'] * len(headings))} |\n")
    parts += [f"| {' | '.join(str(row.get(x, '')) for x in headings)} |\n" for row in rows]
    return "".join(parts)


def main() -> int:
    """Writes or checks the pages."""
    late = 0
    pages = ((PAGE, page()), (PRESETS_PAGE, presets_page()), (VERSIONS_PAGE, versions_page()))
    for path, wanted in pages:
        if "--check" not in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
            late = 1
            print(f"{path.name} is out of date; python docs/site/api.py writes it", file=sys.stderr)
    return late


if __name__ == "__main__":
    sys.exit(main())
