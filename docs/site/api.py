"""Writes docs/api.md: every public name, with the first sentence of its docstring.

    python docs/site/api.py           writes it
    python docs/site/api.py --check   exit code 1 where it is out of date

A name is public where `__all__` of one of the modules below has it; all others may change any day.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "api.md"
# In the order of the page: what most people need first.
MODULES = (
    *("kmodels", "kmodels.models", "kmodels.layers", "kmodels.ops"),
    *("kmodels.training", "kmodels.callbacks", "kmodels.data", "kmodels.text"),
    *("kmodels.text.demo", "kmodels.text.training", "kmodels.generation", "kmodels.lora"),
    *("kmodels.distribution", "kmodels.distribution.ray"),
    *("kmodels.transforms", "kmodels.weights"),
    "kmodels.models.interpret",
    *("kmodels.interop", "kmodels.interop.keras_hub", "kmodels.interop.keras_cv"),
    *("kmodels.runs.recipe", "kmodels.runs.classification", "kmodels.runs.plots"),
    *("kmodels.runs.pretrained", "kmodels.runs.probe", "kmodels.runs.results"),
    "kmodels.runs.segmentation",
    *("kmodels.tools.bench", "kmodels.tools.convert", "kmodels.tools.parity"),
    "kmodels.tools.plan",
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


def main() -> int:
    """Writes or checks the page."""
    wanted = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    print("docs/api.md is out of date; python docs/site/api.py writes it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
