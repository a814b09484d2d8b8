"""Hooks of mkdocs: pages from outside of docs/, one page of the API for each public module.

Files keep their places in the repository, where their links are right on their own; here each link
is turned into one of the site. Links to what the site has no page of become plain text.
"""

import importlib
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Where notebooks lie that were executed, such as those of `make test`; else they have no outputs.
EXECUTED = Path(os.environ.get("KMODELS_EXECUTED", ROOT / ".venv" / "exchange"))
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/LOG.md": "benchmarks/LOG.md",
}
API = (
    *("models", "layers", "lora", "data", "text", "training", "callbacks", "transforms"),
    "distribution",
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

_places: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages; `_places` tells which file of the repository each is."""
    _places.clear()
    for file in files.documentation_pages():
        _places[f"docs/{file.src_uri}"] = file.src_uri

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for path, uri in PAGES.items():
        add(uri, (ROOT / path).read_text())
        _places[path] = uri
    for path in sorted((ROOT / "benchmarks").rglob("*.png")):
        _places[str(path.relative_to(ROOT))] = uri = str(path.relative_to(ROOT))
        add(uri, path.read_bytes())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        uri = f"notebooks/{path.stem}.md"
        _places[f"notebooks/{path.name}"] = uri
        text, pictures = _notebook(path)
        add(uri, text)
        for name, picture in pictures.items():
            add(f"notebooks/{name}", picture)
    for name in ("kmodels", *API):
        add(f"api/{name}.md", _api(name))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between pages."""
    origin = next((path for path, uri in _places.items() if uri == page.file.src_uri), None)
    if origin is None:
        return markdown

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        uri = _places.get(path) or _places.get(f"{path}/README.md")
        if uri is None:
            if not (ROOT / path).exists():
                return match[0]  # mkdocs says that it is missing
            return text
        uri = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{picture}[{text}]({uri}{'#' if anchor else ''}{anchor})"

    parts, end = [], 0
    for fence in _FENCED.finditer(markdown):
        parts += [_LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, markdown[end:])])


def _notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as text and the pictures that it shows."""
    import nbformat
    from nbconvert import MarkdownExporter

    executed = sorted(EXECUTED.glob(f"*/notebooks/{path.name}"))
    notebook = nbformat.read(executed[0] if executed else path, as_version=4)
    # Progress bars and warnings are not what a reader comes for.
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, found = MarkdownExporter().from_notebook_node(notebook, resources=resources)
    # A notebook's own links are those of its folder, as its page's are.
    return text, {name.replace("\\", "/"): data for name, data in found["outputs"].items()}


def _api(name: str) -> str:
    """What a module exports, each by where it is written: lazy exports cannot be read otherwise."""
    module = importlib.import_module("kmodels" if name == "kmodels" else f"kmodels.{name}")
    lines = [f"# {module.__name__}", "", (module.__doc__ or "").strip(), ""]
    for public in sorted(module.__all__, key=str.lower):
        value = getattr(module, public)
        where, what = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if what != public and what in module.__all__:
            lines += [f"`{module.__name__}.{public}` is another name of `{what}`.", ""]
        elif isinstance(where, str) and isinstance(what, str) and where.startswith("kmodels"):
            lines += [f"::: {where}.{what}", ""]
    return "\n".join(lines)
