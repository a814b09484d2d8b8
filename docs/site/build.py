"""Hooks of mkdocs: pages from outside of docs/, one page of the API for each public module.

Files keep their places in the repository, where their links are right on their own; here each link
is turned into one of the site. Links to what the site has no page of become plain text.
"""

import importlib
import inspect
import os
import posixpath
import re
from pathlib import Path
from typing import Any

import api
import inherited
import notebooks
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Where notebooks lie that were executed, by docs/site/notebooks.py or by the tests.
EXECUTED = Path(os.environ.get("KMODELS_EXECUTED", notebooks.FOLDER))
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
# Their classes have so many methods from one another that each is a page of its own.
ONE_PAGE_EACH = ("models",)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

_places: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Adds the pages of single classes to the navigation, below their module."""
    for part in config["nav"]:
        for entry in part.get("API", []):
            for name in ONE_PAGE_EACH:
                if entry.get(name) == f"api/{name}.md":
                    module = importlib.import_module(f"kmodels.{name}")
                    publics = sorted(module.__all__, key=str.lower)
                    pages = [{public: f"api/{name}/{public}.md"} for public in publics]
                    entry[name] = [{"All of it": entry[name]}, *pages]
    return config


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
        for uri, text in _api(name).items():
            add(uri, text)
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
    """A notebook as text and the figures that it shows."""
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


def _api(name: str) -> dict[str, str]:
    """The pages of a module: one for all it exports, or an index and a page for each class."""
    module = importlib.import_module("kmodels" if name == "kmodels" else f"kmodels.{name}")
    lines, pages = [f"# {module.__name__}", "", (module.__doc__ or "").strip(), ""], {}
    if name in ONE_PAGE_EACH:
        lines += ["| name | |", "| --- | --- |"]
    for public in sorted(module.__all__, key=str.lower):
        text = _entry(module, public, 1 if name in ONE_PAGE_EACH else 2)
        if name in ONE_PAGE_EACH:
            lines.append(f"| [`{public}`]({name}/{public}.md) | {api.sentence(module, public)} |")
            pages[f"api/{name}/{public}.md"] = text
        elif text:
            lines += [text, ""]
    return {f"api/{name}.md": "\n".join(lines), **pages}


def _entry(module: Any, public: str, level: int) -> str:
    """One name, by where it is written: lazy exports cannot be read otherwise."""
    value = getattr(module, public)
    where, what = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if what != public and what in module.__all__:
        return f"`{module.__name__}.{public}` is another name of `{what}`."
    if not (isinstance(where, str) and isinstance(what, str) and where.startswith("kmodels")):
        return ""
    text = f"::: {where}.{what}\n    options:\n      heading_level: {level}\n"
    if inspect.isclass(value):
        if found := inherited.own(value):
            text += f"      members: {inherited.ordered(value)}\n"
            text += f"      inherited_members: {found}\n"
        if links := inherited.of_keras(value):
            text += f"\n`{public}` has these from Keras as they are there: {', '.join(links)}.\n"
    return text
